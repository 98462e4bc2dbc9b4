"""The server beside the batch: uvicorn's event loop in a thread, the batch on the main thread, which alone calls MPI.

main thread     StopSignals; Batcher.run .................................................... returns
HTTP thread     uvicorn; 10 times a second: a signal? -> no new requests -> what runs ends -> Batcher.stop
                                                         (or is cancelled, after `drain_seconds`)
"""

import asyncio
import socket
import threading
import time
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from mpi4dl.generation.batcher import Batcher
from mpi4dl.runtime.stopping import StopSignals
from mpi4dl.serving.front import Front

LOOK_SECONDS = 0.1
LAST_WORDS_SECONDS = 5  # for connections to take what they were sent
BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address; port 0: any that is free. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # asyncio sends at once only on sockets that say that they speak TCP; others keep each answer back for 40 ms.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True)
class Timing:
    """How long the end may take for what runs, and how often there is a report; 0: only at the end."""

    drain_seconds: float = 30.0
    report_seconds: float = 60.0


class HttpThread(threading.Thread):
    """Serves `app` on `listener` until a signal is caught, and then ends the batch. `error`: what it died of."""

    def __init__(
        self,
        app: ASGIApp,
        front: Front,
        batcher: Batcher,
        listener: socket.socket,
        signals: StopSignals,
        timing: Timing,
    ) -> None:
        super().__init__(name="http", daemon=True)
        self.error: BaseException | None = None
        self._front, self._batcher, self._listener = front, batcher, listener
        self._signals, self._timing = signals, timing
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the main thread raises it: it would wait for ever else
            self.error = error
        finally:
            self._batcher.stop(drain=False)

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._server.serve([self._listener]))
        try:
            await self._watch(serving)
            if not serving.done():
                await self._drain()
        finally:
            self._server.should_exit = True
            await serving

    async def _watch(self, serving: "asyncio.Task[None]") -> None:
        """Until a signal: reports."""
        reported = time.monotonic()
        while self._signals.caught is None and not serving.done():
            await asyncio.sleep(LOOK_SECONDS)
            if self._timing.report_seconds and time.monotonic() - reported >= self._timing.report_seconds:
                reported = time.monotonic()
                self.report()

    async def _drain(self) -> None:
        self._front.stopping = True
        print(f"stopping by {self._signals.caught}: no new requests", flush=True)
        deadline = time.monotonic() + self._timing.drain_seconds
        while not self._front.idle and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
        self._front.cancel_all()
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while not self._front.idle and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)

    def report(self) -> None:
        line = self._front.statistics.report()
        if line is not None:
            print(line, flush=True)


def serve(app: ASGIApp, front: Front, batcher: Batcher, listener: socket.socket, timing: Timing) -> None:
    """Serve `app` until a signal asks for the end. On the main thread of rank 0; the others follow the batch."""
    with StopSignals() as signals:
        thread = HttpThread(app, front, batcher, listener, signals, timing)
        thread.start()
        batcher.run()
        thread.join()
        if thread.error is not None:
            raise thread.error
        thread.report()
