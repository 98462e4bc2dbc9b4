"""The serving command by OpenAI's client, with a model: streams, load, clients that leave, signals, deaths of ranks."""

import asyncio
import os
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import NamedTuple

import httpx
import openai
import pytest

from mpi4dl.serve import serve
from tests.pool.ranks import Ranks, RanksFailed
from tests.text.serving.command import CONTEXT, PATIENCE_SECONDS, Server, server
from tests.text.serving.damage import mutated, systematic
from tests.text.serving.served import eventually

MAX_BODY = 1 << 20


def test_the_client_of_openai_completes_streams_and_chats(shared: Server) -> None:
    client = shared.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt="for x", max_tokens=12, temperature=0, logprobs=0)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs is not None
    assert all(-6.0 < logprob < 0 for logprob in whole.choices[0].logprobs.token_logprobs or [1.0])
    stream = client.completions.create(model="tiny", prompt="for x", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    stopped = client.completions.create(
        model="tiny", prompt="for x", max_tokens=12, temperature=0, stop=whole.choices[0].text[4:6]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert whole.choices[0].text.startswith(stopped.choices[0].text)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=12, seed=3
    )
    same = client.completions.create(model="tiny", prompt="user: hello\nassistant: ", max_tokens=12, seed=3)
    assert chat.choices[0].message.content == same.choices[0].text


def test_who_goes_away_frees_its_pages(shared: Server) -> None:
    before = shared.metrics()
    stream = shared.client().completions.create(
        model="tiny", prompt="x", max_tokens=CONTEXT - 1, temperature=0, stream=True
    )
    next(stream)
    assert shared.metrics()["mpi4dl_pages_used"] == before["mpi4dl_pages_used"] + CONTEXT / 16
    stream.close()
    eventually(lambda: shared.metrics()["mpi4dl_pages_used"] == before["mpi4dl_pages_used"])
    after = shared.metrics()
    assert after["mpi4dl_requests_cancelled_total"] == before["mpi4dl_requests_cancelled_total"] + 1
    assert after["mpi4dl_tokens_generated_total"] < before["mpi4dl_tokens_generated_total"] + CONTEXT - 1


def test_damaged_requests_do_no_harm(shared: Server) -> None:
    with httpx.Client(base_url=shared.url, timeout=PATIENCE_SECONDS) as client:
        for damaged in [*list(systematic(CONTEXT, MAX_BODY))[::4], *mutated(40)]:
            body = iter(damaged.body) if isinstance(damaged.body, list) else damaged.body
            response = client.request(damaged.method, damaged.path, content=body, headers=damaged.headers)
            assert 400 <= response.status_code < 500, f"{damaged.what}: {response.status_code} {response.text}"
    assert shared.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices[0].text


class Wish(NamedTuple):
    """One request of a load, sent so many seconds after the first."""

    prompt: str
    num_tokens: int
    seed: int
    at: float


def rising(count: int, slowest: float, fastest: float) -> list[Wish]:
    """Requests at rates that rise from so many a second to so many."""
    numbers, wishes, at = random.Random(0), [], 0.0
    for i in range(count):
        at += 1 / (slowest + (fastest - slowest) * i / count)
        wishes.append(Wish(f"{i} {'x' * numbers.randint(0, 30)}", numbers.randint(1, 24), i, at))
    return wishes


async def answer(client: openai.AsyncOpenAI, wish: Wish, stream: bool) -> str:
    """What the server writes, asked again if there is no room for it."""
    while True:
        try:
            found = await client.completions.create(
                model="tiny", prompt=wish.prompt, max_tokens=wish.num_tokens, seed=wish.seed, stream=stream
            )
            if not isinstance(found, openai.AsyncStream):
                return found.choices[0].text
            return "".join([chunk.choices[0].text async for chunk in found])
        except openai.RateLimitError as refused:
            await asyncio.sleep(float(refused.response.headers["retry-after"]))


def answers(one: Server, wishes: list[Wish], alone: bool = False, max_retries: int = 0) -> list[str]:
    """What the server writes, each wish `alone`, or all as they come, every other one as a stream."""

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{one.url}/v1", api_key="none", max_retries=max_retries, timeout=PATIENCE_SECONDS
        ) as client:
            if alone:
                return [await answer(client, wish, stream=False) for wish in wishes]
            begin = time.monotonic()

            async def in_time(number: int, wish: Wish) -> str:
                await asyncio.sleep(begin + wish.at - time.monotonic())
                return await answer(client, wish, stream=number % 2 == 0)

            return await asyncio.gather(*(in_time(number, wish) for number, wish in enumerate(wishes)))

    return asyncio.run(ask_all())


def check_load(one: Server, wishes: list[Wish], max_retries: int = 0) -> None:
    alone = answers(one, wishes, alone=True)
    assert len(set(alone)) > 0.9 * len(alone)  # so that it shows if answers are mixed up
    assert answers(one, wishes, max_retries=max_retries) == alone


def long_request(one: Server, threads: ThreadPoolExecutor, num_tokens: int) -> "Future[openai.types.Completion]":
    """A request that runs, and is waited for by a thread."""
    create = one.client().completions.create
    asked = threads.submit(create, model="tiny", prompt="x", max_tokens=num_tokens, temperature=0)
    eventually(lambda: one.metrics()["mpi4dl_requests_running"] == 1)
    return asked


def test_requests_at_rising_rates_get_what_they_get_alone(shared: Server) -> None:
    check_load(shared, rising(30, 20, 200))


@pytest.mark.exhaustive
def test_a_thousand_requests_at_rising_rates(run: Path) -> None:
    with server(1, run) as one:
        # Beyond its limits the server closes idle connections, which a client may be about to use again.
        check_load(one, rising(1000, 5, 300), max_retries=openai.DEFAULT_MAX_RETRIES)
        assert one.metrics()["mpi4dl_pages_used"] == 0
        one.job.send_signal(SIGTERM)
        assert one.ended() == 0
    print(one.said)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
@pytest.mark.parametrize("flags", ["--tensor 2", "--stages 2", "--data 2"])
def test_ranks_serve_and_stop_together(run: Path, shared: Server, flags: str, number: Signals) -> None:
    wishes = rising(20, 50, 100)
    with server(2, run, *flags.split()) as one, ThreadPoolExecutor(1) as threads:
        assert answers(one, wishes) == answers(shared, wishes, alone=True)
        asked = long_request(one, threads, 200)
        one.job.send_signal(number)
        usage = asked.result(PATIENCE_SECONDS).usage
        assert usage is not None
        assert usage.completion_tokens == 200
        assert one.ended() == 0
    assert one.complained == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("busy", [False, True])
def test_the_death_of_a_rank_ends_all(run: Path, victim: int, busy: bool) -> None:
    with server(2, run, "--tensor", "2", forked=False) as one, ThreadPoolExecutor(1) as threads:
        asked = long_request(one, threads, 2000) if busy else None
        pids = one.pids()
        assert len(pids) == 2
        os.kill(pids[victim], SIGKILL)
        assert one.ended() not in (0, 2)
        if asked is not None:
            with pytest.raises(openai.APIConnectionError):
                asked.result(PATIENCE_SECONDS)
    assert one.complained == ""  # the launcher has said whom it lost
    assert one.said.count("EXIT CODE: 9") == 1


@pytest.mark.exhaustive
def test_a_rank_that_comes_no_further_ends_all(run: Path) -> None:
    with server(2, run, "--tensor", "2", "--hang-timeout", "5", forked=False) as one, ThreadPoolExecutor(1) as threads:
        asked = long_request(one, threads, 2000)
        os.kill(one.pids()[1], SIGSTOP)
        assert one.ended() not in (0, 2)
        with pytest.raises(openai.APIConnectionError):
            asked.result(PATIENCE_SECONDS)
    assert one.complained.startswith("mpi4dl: rank 0 of 2 came no further for 5 s, ")
    assert one.complained.count("came no further") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "name the folder of a run"),
        ("nowhere", "nowhere: there is no such file or folder"),
        ("RUN --port 70000", "--port"),
        ("RUN --host 203.0.113.1", "cannot listen on 203.0.113.1:0: "),
        ("RUN --token-file /dev/null", "is no regular file"),
        ("RUN --tensor 2", "mpirun"),
    ],
)
def test_what_cannot_be_served_is_refused(ranks: Ranks, run: Path, flags: str, said: str) -> None:
    with pytest.raises(RanksFailed, match=said):
        ranks(1).run(serve, flags.replace("RUN", f"{run} --port 0" if "port" not in flags else str(run)).split())
