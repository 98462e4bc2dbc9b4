"""A server under rising load, with clients that go away and damaged requests: right answers, and nothing grows."""

import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.pool.ranks import Ranks
from tests.text.serving.command import Server, make_run, server
from tests.text.serving.damage import COMPLETIONS, Damaged, mutated, systematic
from tools.nets.soak.resources import Resources, grown

CLIENTS = 24
PROMPTS = ["for word in", "print", "words: ", "f", "  \n", "né"]
KINDS = ("whole", "streamed", "goes away", "damaged", "half a request", "silent")
MAX_BODY, CONTEXT = 1 << 20, 2048
WARM_SHARE = 0.25  # of the time, before memory is looked at


class Load:
    """What clients do, and what came of it."""

    def __init__(self, served: Server, seed: int, end: float) -> None:
        self.served, self.end, self.draws = served, end, random.Random(seed)
        self.damaged = [*systematic(CONTEXT, MAX_BODY), *mutated(400, seed)]
        self.counts = dict.fromkeys(KINDS, 0)
        self.wrong: list[str] = []
        self.expected = {prompt: self._text(prompt, 12) for prompt in PROMPTS}
        self.level = 1.0
        self._lock = threading.Lock()

    def _text(self, prompt: str, count: int) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0}
        answer = httpx.post(f"{self.served.url}{COMPLETIONS}", json=body, timeout=120)
        text: str = answer.json()["choices"][0]["text"]
        return text

    def client(self, number: int) -> None:
        draws = random.Random(f"{number} of {self.draws.random()}")
        begin = time.monotonic()
        while time.monotonic() < self.end:
            share = (time.monotonic() - begin) / max(1.0, self.end - begin)
            if number >= 2 + share * CLIENTS:  # the load rises
                time.sleep(0.5)
                continue
            kind = draws.choice(KINDS)
            try:
                said = getattr(self, f"_{kind.replace(' ', '_')}")(draws)
            except (httpx.TransportError, OSError) as error:
                said = f"{type(error).__name__}: {error}"
            with self._lock:
                self.counts[kind] += 1
                if said:
                    self.wrong.append(f"{kind}: {said}")

    def _whole(self, draws: random.Random) -> str | None:
        prompt = draws.choice(PROMPTS)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{self.served.url}{COMPLETIONS}", json=body, timeout=120)
        if answer.status_code == 429:
            return None
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text}"
        text = answer.json()["choices"][0]["text"]
        return None if text == self.expected[prompt] else f"{prompt!r}: {text!r} instead of {self.expected[prompt]!r}"

    def _streamed(self, draws: random.Random) -> str | None:
        body = {"model": "tiny", "prompt": draws.choice(PROMPTS), "max_tokens": 12, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self.served.url}{COMPLETIONS}", json=body, timeout=120) as answer:
            if answer.status_code == 429:
                return None
            lines = list(answer.iter_lines())
        return None if any("[DONE]" in line for line in lines) else f"it ended without [DONE]: {lines[-2:]}"

    def _goes_away(self, draws: random.Random) -> str | None:
        body = {
            "model": "tiny",
            "prompt": "x" * draws.randint(1, 900),
            "max_tokens": 900,
            "stream": draws.random() < 0.5,
        }
        with suppress(httpx.TimeoutException):
            httpx.post(f"{self.served.url}{COMPLETIONS}", json=body, timeout=draws.uniform(0.01, 0.5))
        return None

    def _damaged(self, draws: random.Random) -> str | None:
        damaged: Damaged = draws.choice(self.damaged)
        body = iter(damaged.body) if isinstance(damaged.body, list) else damaged.body
        url = f"{self.served.url}{damaged.path}"
        answer = httpx.request(damaged.method, url, content=body, headers=damaged.headers, timeout=120)
        return None if 400 <= answer.status_code < 500 else f"{damaged.what}: {answer.status_code} {answer.text[:200]}"

    def _half_a_request(self, draws: random.Random) -> str | None:
        request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n{" + b" " * 999
        self._raw(request[: draws.randint(1, len(request))], 0.0)
        return None

    def _silent(self, draws: random.Random) -> str | None:
        self._raw(draws.randbytes(draws.randint(0, 40)), draws.uniform(0.0, 1.0))
        return None

    def _raw(self, sent: bytes, seconds: float) -> None:
        where = urlsplit(self.served.url)
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=30) as connection:
            connection.sendall(sent)
            time.sleep(seconds)


def soak(folder: Path, seconds: float, seed: int, num_ranks: int = 2) -> tuple[dict[str, int], list[str]]:
    """How many requests of each kind there were, and what was wrong."""
    ranks = Ranks()
    try:
        run = make_run(ranks, folder)
    finally:
        ranks.stop()
    with server(num_ranks, run, "--tensor", str(num_ranks), forked=False) as served:
        load = Load(served, seed, time.monotonic() + seconds)
        pids = served.pids()
        with ThreadPoolExecutor(CLIENTS) as clients:
            running = [clients.submit(load.client, number) for number in range(CLIENTS)]
            time.sleep(WARM_SHARE * seconds)
            before = [Resources.of(pid) for pid in pids]
            for each in running:
                each.result()
        deadline = time.monotonic() + 120
        while served.metrics()["mpi4dl_pages_used"] and time.monotonic() < deadline:
            time.sleep(0.5)
        if served.metrics()["mpi4dl_pages_used"]:
            load.wrong.append("pages are used when nobody asks any more")
        load.wrong += grown(before, [Resources.of(pid) for pid in pids])
        again = {prompt: load._text(prompt, 12) for prompt in PROMPTS}
        if again != load.expected:
            load.wrong.append(f"other answers at the end: {again} instead of {load.expected}")
        served.job.send_signal(signal.SIGTERM)
        code = served.ended()
        if code:
            load.wrong.append(f"it ended with code {code}: {served.complained[-2000:]}")
    return load.counts, load.wrong
