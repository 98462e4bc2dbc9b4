"""How the server bears load, clients that go away, a wrong token, and how it stops: before a stand-in of the batch."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import httpx
import openai
import pytest

from mpi4dl.options.declare import ConfigError
from mpi4dl.serve import TOKEN_VARIABLE, _token
from tests.text.serving.served import PATIENCE_SECONDS, Served, eventually, serving
from tests.text.serving.standin import text_after

BOTH = pytest.mark.parametrize("stream", [False, True])


@BOTH
def test_who_goes_away_frees_what_it_held(stream: bool) -> None:
    responses = 'mpi4dl_http_responses_total{path="/v1/completions"'
    with serving() as served:
        served.batch.hold()
        sockets = served.client()
        if stream:
            events = sockets.completions.create(model="tiny", prompt="a", max_tokens=50, stream=True)
            eventually(lambda: served.batch.stats().pages_used == 1)
            served.batch.step(3)
            assert [next(events).choices[0].text for _ in range(3)] == list(text_after(b"a", 3))
            events.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                sockets.with_options(timeout=0.3).completions.create(model="tiny", prompt="a", max_tokens=50)
            eventually(lambda: served.metric(f'{responses},status="499"}}') == 1)
        eventually(lambda: served.batch.stats().pages_used == 0 and served.front.idle)
        assert served.metric("mpi4dl_requests_cancelled_total") == 1
        assert served.metric("mpi4dl_pages_used") == 0


def test_the_queue_is_bounded() -> None:
    with serving(max_batch=2, max_queue=3) as served, ThreadPoolExecutor(5) as threads:
        served.batch.hold()
        asked = [threads.submit(served.post, prompt=f"{i}", max_tokens=4) for i in range(5)]
        eventually(lambda: served.batch.stats().waiting == 3)
        refused = served.post(prompt="one too many")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.BadRequestError, match="asks for 6 texts, but 5 at most"):
            served.client().completions.create(model="tiny", prompt=["a"] * 6)
        assert served.metric("mpi4dl_requests_waiting") == 3
        served.batch.step()
        texts = [each.result(PATIENCE_SECONDS).json()["choices"][0]["text"] for each in asked]
        assert texts == [text_after(b"%d" % i, 4) for i in range(5)]
        assert served.post(prompt="there is room again").status_code == 200


def test_the_token() -> None:
    with serving(token="né secret") as served:
        for token in ("wrong", "né secre"):
            answer = httpx.get(f"{served.url}/v1/models", headers={b"authorization": f"Bearer {token}".encode()})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert served.post(prompt="a").status_code == 401
        assert httpx.get(f"{served.url}/metrics").status_code == 401
        assert httpx.get(f"{served.url}/nowhere").status_code == 401
        assert httpx.get(f"{served.url}/health").status_code == 200
        right = {b"authorization": "bearer né secret".encode()}
        assert httpx.get(f"{served.url}/v1/models", headers=right).status_code == 200


@BOTH
def test_who_runs_may_end_and_who_comes_is_sent_away(stream: bool) -> None:
    with serving(drain_seconds=600) as served, ThreadPoolExecutor(1) as threads:
        served.batch.hold()
        asked = threads.submit(served.post, prompt="a", max_tokens=3, stream=stream)
        eventually(lambda: served.batch.stats().running == 1)
        served.signals.caught = "SIGTERM"
        eventually(lambda: served.front.stopping)
        late = served.post(prompt="b")
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert httpx.get(f"{served.url}/health").status_code == 503
        served.batch.step()
        assert asked.result(PATIENCE_SECONDS).status_code == 200
        assert ("[DONE]" if stream else text_after(b"a", 3)) in asked.result().text
        served.thread.join(PATIENCE_SECONDS)
        with pytest.raises(httpx.ConnectError):
            served.post(prompt="b")


@BOTH
def test_what_takes_too_long_at_the_end_is_cancelled(stream: bool) -> None:
    with serving(drain_seconds=0.0) as served, ThreadPoolExecutor(1) as threads:
        served.batch.hold()
        asked = threads.submit(served.post, prompt="a", max_tokens=3, stream=stream)
        eventually(lambda: served.batch.stats().running == 1)
        served.signals.caught = "SIGTERM"
        answer = asked.result(PATIENCE_SECONDS)
        assert answer.status_code == (200 if stream else 503)
        assert '"code":"stopping"' in answer.text
        assert "[DONE]" not in answer.text


def test_times_are_measured() -> None:
    with serving() as served:
        served.post(prompt="a", max_tokens=4)
        served.post(prompt=["a", "b"], max_tokens=4)
        served.post(prompt=3)
        assert served.metric("mpi4dl_tokens_generated_total") == 12
        assert served.metric("mpi4dl_prompt_tokens_total") == 3
        assert served.metric("mpi4dl_time_to_first_token_seconds_count") == 3
        assert served.metric("mpi4dl_time_between_tokens_seconds_count") == 9
        assert served.metric("mpi4dl_http_responses_total") >= 7
        assert served.metric('mpi4dl_http_responses_total{path="/v1/completions",status="400"}') == 1


def test_what_the_http_thread_dies_of_reaches_the_main_thread() -> None:
    served = Served()
    served.server.serve = None  # type: ignore[method-assign]
    running = threading.Thread(target=served.batch.run)
    running.start()
    served.thread.start()
    running.join(PATIENCE_SECONDS)
    assert not running.is_alive()
    assert isinstance(served.thread.error, TypeError)
    served.thread._listener.close()


def test_clients_that_left_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio warns of each write to a connection that is lost already; its errors are still heard."""
    with serving():
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
        logging.getLogger("asyncio").error("something else")
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == ["something else"]


@pytest.mark.parametrize(("text", "token"), [("secret\n", "secret"), (" a b\r\n", "a b"), ("a\nb", ""), (" \n", "")])
def test_white_space_around_a_token_locks_nobody_out(monkeypatch: pytest.MonkeyPatch, text: str, token: str) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, text)
    with nullcontext() if token else pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        assert _token(None) == token
