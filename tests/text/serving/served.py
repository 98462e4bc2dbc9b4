"""The server in this process, before the stand-in of a batch."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from mpi4dl._http import HttpServer, Limits, bind, url_of
from mpi4dl.runs.stopping import StopSignals
from mpi4dl.text.serving.admission import Admission
from mpi4dl.text.serving.app import api_error, make_app
from mpi4dl.text.serving.server import HttpThread
from tests.text.serving.standin import StandIn

CONTEXT = 64
PATIENCE_SECONDS = 60.0


class Served:
    """A running server. `signals.caught = "SIGTERM"` is what a signal would do."""

    def __init__(
        self,
        max_batch: int = 16,
        max_queue: int = 64,
        max_body: int = 1 << 20,
        token: str | None = None,
        drain_seconds: float = 30.0,
        limits: Limits = Limits(),  # noqa: B008
        hosts: tuple[str, ...] = (),
    ) -> None:
        self.batch, self.signals = StandIn(CONTEXT, max_batch), StopSignals()
        self.front = Admission(self.batch.as_batcher(), max_queue)
        listener = bind("127.0.0.1", 0)
        self.url = url_of(listener)
        self.server = HttpServer(make_app(self.front, "tiny", max_body, token, hosts), api_error, limits, 5)
        self.thread = HttpThread(self.server, self.front, listener, self.signals, "serving at", drain_seconds)
        self.running = threading.Thread(target=self.batch.run, daemon=True)

    def client(self, token: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=PATIENCE_SECONDS)

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": "tiny", **fields}, timeout=PATIENCE_SECONDS)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds that is sure to come about."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def serving(**options: Any) -> Iterator[Served]:
    served = Served(**options)
    served.thread.start()
    served.running.start()
    eventually(lambda: served.server.started)
    try:
        yield served
    finally:
        served.batch.step()
        served.signals.caught = "SIGTERM"
        served.thread.join(PATIENCE_SECONDS)
        served.running.join(PATIENCE_SECONDS)
    assert not served.thread.is_alive()
    assert not served.running.is_alive()
    assert served.thread.error is None
