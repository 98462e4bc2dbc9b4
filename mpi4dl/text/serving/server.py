"""The server beside the batch: uvicorn in a thread, limits on connections, signals and the end.

main thread     StopSignals; Batcher.run .................................................... returns
HTTP thread     uvicorn; 10 times a second: a signal? -> no new requests -> what runs ends -> Batcher.stop
                                                         (or is cancelled, after `drain_seconds`)
"""

import asyncio
import logging
import socket
import threading
import time
from dataclasses import dataclass

from starlette.types import ASGIApp

from mpi4dl._connections import LIMITS, ConnectionLimits, Connections, server_of
from mpi4dl._http import response_bytes, url_of
from mpi4dl.comm.failure import Watchdog
from mpi4dl.runs.stopping import StopSignals
from mpi4dl.text.batcher import Batcher
from mpi4dl.text.serving.admission import Admission, busy

START_SECONDS, LOOK_SECONDS = 0.01, 0.1
FEED_SECONDS = 1.0
WRITTEN_TO_NOBODY = "socket.send() raised exception."
LAST_WORDS_SECONDS = 5  # for connections to take what they were sent


@dataclass(frozen=True)
class Timing:
    """How long what runs may take at the end, how often there is a report (0: only at the end), and how long a step of
    the batch may take (0: any time).
    """

    drain_seconds: float = 30.0
    report_seconds: float = 60.0
    hang_seconds: float = 0.0


class HttpThread(threading.Thread):
    """Serves `app` on `listener` until a signal is caught, and then ends the batch. `error`: what it died of."""

    def __init__(
        self,
        app: ASGIApp,
        front: Admission,
        batcher: Batcher,
        listener: socket.socket,
        signals: StopSignals,
        timing: Timing,
        greeting: str,
        limits: ConnectionLimits = LIMITS,
    ) -> None:
        super().__init__(name="http", daemon=True)
        self.error: BaseException | None = None
        self._front, self._batcher, self._listener = front, batcher, listener
        self._signals, self._timing, self._greeting = signals, timing, greeting
        self.watchdog = Watchdog(timing.hang_seconds)
        self._fed, self._steps = time.monotonic(), 0
        full = busy(
            "the server has no room for more connections: close some, or try again", code="too_many_connections"
        )
        self.connections = Connections(limits.within_files(), response_bytes(full.response()))
        if self.connections.limits.most < limits.most:
            most = self.connections.limits.most
            print(f"connections: at most {most:,}, not {limits.most:,}, as files are limited (ulimit -n)", flush=True)
        self._server = server_of(app, self.connections, LAST_WORDS_SECONDS)

    def run(self) -> None:
        logging.getLogger("asyncio").addFilter(_is_no_lost_client)
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the main thread raises it: it would wait for ever else
            self.error = error
        finally:
            self._batcher.stop(drain=False)

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self.connections.on_loop_error)
        sweeping = asyncio.create_task(self.connections.watch(self._say))
        serving = asyncio.create_task(self._server.serve([self._listener]))
        try:
            while not self._server.started and not serving.done():
                await asyncio.sleep(START_SECONDS)
            if not serving.done():
                print(f"{self._greeting} {url_of(self._listener)}/v1", flush=True)
            await self._watch(serving)
            if not serving.done():
                await self._drain()
        finally:
            self._server.should_exit = True
            await serving
            sweeping.cancel()
            self._say(self.connections.report(last=True))

    async def _watch(self, serving: "asyncio.Task[None]") -> None:
        """Until a signal: reports."""
        reported = time.monotonic()
        while self._signals.caught is None and not serving.done():
            await self._look()
            if self._timing.report_seconds and time.monotonic() - reported >= self._timing.report_seconds:
                reported = time.monotonic()
                self.report()

    async def _drain(self) -> None:
        self._front.stopping = True
        print(f"stopping by {self._signals.caught}: no new requests", flush=True)
        await self._wait_for_idle(self._timing.drain_seconds)
        self._front.cancel_all()
        await self._wait_for_idle(LAST_WORDS_SECONDS)

    async def _wait_for_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._front.idle and time.monotonic() < deadline:
            await self._look()

    async def _look(self) -> None:
        """After a while, whether the batch has come further, if it has anything to do."""
        await asyncio.sleep(LOOK_SECONDS)
        steps = self._batcher.stats().steps
        if time.monotonic() - self._fed >= FEED_SECONDS and (self._front.idle or steps != self._steps):
            self.watchdog.feed()
            self._fed, self._steps = time.monotonic(), steps

    def report(self) -> None:
        self._say(self.connections.report())
        self._say(self._front.statistics.report())

    def _say(self, line: str | None) -> None:
        if line is not None:
            print(line, flush=True)


def _is_no_lost_client(record: logging.LogRecord) -> bool:
    """False for what asyncio logs of a client that left while chunks for it were being written."""
    return record.getMessage() != WRITTEN_TO_NOBODY


def run_server(
    app: ASGIApp,
    front: Admission,
    batcher: Batcher,
    listener: socket.socket,
    timing: Timing,
    greeting: str,
    limits: ConnectionLimits,
) -> None:
    """Serve `app` until a signal asks for the end. On the main thread of rank 0; the others follow the batch."""
    with StopSignals() as signals:
        thread = HttpThread(app, front, batcher, listener, signals, timing, greeting, limits)
        thread.start()
        batcher.run()
        thread.join()
        thread.watchdog.stop()
        if thread.error is not None:
            raise thread.error
        thread.report()
