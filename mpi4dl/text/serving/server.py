"""The server beside the batch: uvicorn in a thread, signals and the end.

main thread     StopSignals; Batcher.run .................................................... returns
HTTP thread     uvicorn; 10 times a second: a signal? -> no new requests -> what runs ends -> Batcher.stop
                                                         (or is cancelled, after `drain_seconds`)
"""

import asyncio
import socket
import threading
import time

from mpi4dl._http import HttpServer, url_of
from mpi4dl.comm.failure import Watchdog
from mpi4dl.runs.stopping import StopSignals
from mpi4dl.text.serving.admission import Admission

LOOK_SECONDS = 0.1
FEED_SECONDS = 1.0
LAST_WORDS_SECONDS = 5  # for connections to take what they were sent


class HttpThread(threading.Thread):
    """Serves on `listener` until a signal is caught, and then ends the batch. `error`: what it died of.

    What runs may take `drain_seconds` at the end, and a step of the batch `hang_seconds` (0: any time).
    """

    def __init__(
        self,
        server: HttpServer,
        front: Admission,
        listener: socket.socket,
        signals: StopSignals,
        greeting: str,
        drain_seconds: float = 30.0,
        hang_seconds: float = 0.0,
    ) -> None:
        super().__init__(name="http", daemon=True)
        self.server = server
        self.error: BaseException | None = None
        self._front, self._listener, self._signals = front, listener, signals
        self._greeting, self._drain_seconds = greeting, drain_seconds
        self.watchdog = Watchdog(hang_seconds)
        self._fed, self._steps = time.monotonic(), 0

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the main thread raises it: it would wait for ever else
            self.error = error
        finally:
            self._front.batcher.stop(drain=False)

    async def _serve(self) -> None:
        self._listener.listen()  # so that clients may ask as soon as they know the address
        serving = asyncio.create_task(self.server.serve([self._listener]))
        print(f"{self._greeting} {url_of(self._listener)}/v1", flush=True)
        try:
            while self._signals.caught is None and not serving.done():
                await self._look()
            if not serving.done():
                await self._drain()
        finally:
            self.server.should_exit = True
            await serving

    async def _drain(self) -> None:
        self._front.stopping = True
        print(f"stopping by {self._signals.caught}: no new requests", flush=True)
        await self._wait_for_idle(self._drain_seconds)
        self._front.cancel_all()
        await self._wait_for_idle(LAST_WORDS_SECONDS)

    async def _wait_for_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._front.idle and time.monotonic() < deadline:
            await self._look()

    async def _look(self) -> None:
        """After a while, whether the batch has come further, if it has anything to do."""
        await asyncio.sleep(LOOK_SECONDS)
        steps = self._front.batcher.stats().steps
        if time.monotonic() - self._fed >= FEED_SECONDS and (self._front.idle or steps != self._steps):
            self.watchdog.feed()
            self._fed, self._steps = time.monotonic(), steps


def run_server(server: HttpServer, front: Admission, listener: socket.socket, greeting: str, *seconds: float) -> None:
    """Serve until a signal asks for the end, with the `seconds` of `HttpThread`. On the main thread of rank 0."""
    with StopSignals() as signals:
        thread = HttpThread(server, front, listener, signals, greeting, *seconds)
        thread.start()
        front.batcher.run()
        thread.join()
        thread.watchdog.stop()
        if thread.error is not None:
            raise thread.error
        if server.closed:
            print("connections closed:", ", ".join(f"{n:,} ({why})" for why, n in sorted(server.closed.items())))
