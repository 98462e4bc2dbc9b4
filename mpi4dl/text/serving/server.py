"""The server beside the batch: uvicorn in a thread, limits on connections, signals and the end.

main thread     StopSignals; Batcher.run .................................................... returns
HTTP thread     uvicorn; 10 times a second: a signal? -> no new requests -> what runs ends -> Batcher.stop
                                                         (or is cancelled, after `drain_seconds`)
"""

import asyncio
import logging
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mpi4dl._http import url_of
from mpi4dl.comm.failure import Watchdog
from mpi4dl.runs.stopping import StopSignals
from mpi4dl.text.batcher import Batcher
from mpi4dl.text.serving.admission import Admission, busy

# Limits on connections, before anything looks at a token: how many there are, and how long one may keep the server
# waiting.
#
#     connection_made --> waits for a head --> waits for a body --> a request is under way --> waits for a head ...
#                         head_seconds         BODY_SECONDS         STALL_SECONDS if the client reads nothing
#
# A connection beyond a limit takes the place of the one that has waited for its client longest. If none waits, as all
# have requests under way, the new one is answered with 429 and closed. So clients that connect and say nothing shut out
# nobody. Once a minute, a line of log has the counts of what was closed.

BACKLOG = 512  # connections that the system keeps until they are accepted: asyncio accepts as many at once
OTHER_FILES = 128  # that the process has open beside connections
STALL_SECONDS = 60.0
MOST_REFUSED = 256  # connections beyond the limits that are kept until their request comes, and is refused
SWEEP_SECONDS = 0.5
REPORT_SECONDS = 60.0
ACCEPT_FAILED = "socket.accept() out of system resource"  # asyncio's words


@dataclass(frozen=True)
class ConnectionLimits:
    """`most` connections in all, of which `per_address` from one address (of IPv6: one /64 network).

    A head must be complete `head_seconds` after the connection, or its first byte, and so must be a body after its
    request was answered. `idle_seconds` may pass between requests.
    """

    most: int = 512
    per_address: int = 256
    head_seconds: float = 10.0
    idle_seconds: float = 75.0  # longer than clients keep idle connections: one must not end just when it is used again

    def within_files(self) -> "ConnectionLimits":
        """The same, or fewer connections if this process cannot have so many files open. Raises its limit if it may."""
        wanted = self.most + BACKLOG + OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return self
        return replace(self, most=max(1, soft - BACKLOG - OTHER_FILES))


class Connections:
    """All connections of a server. For one event loop."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self.closed: Counter[str] = Counter()  # since the last line of log, by reason
        self._open: dict[LimitedConnection, None] = {}
        self._refused: dict[LimitedConnection, None] = {}
        self._waiting: dict[str, dict[LimitedConnection, None]] = {}  # by address; who has waited longest comes first
        self._addresses: Counter[str] = Counter()
        self._reported = float("-inf")

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, new: "LimitedConnection") -> None:
        """Take a connection in. One that waits, or this one, is closed if there are too many."""
        address, limits = new.address, self.limits
        if self._addresses[address] >= limits.per_address:
            self._make_room(new, self._waiting.get(address, {}))
        elif len(self._open) >= limits.most:
            longest = (next(iter(some)) for some in self._waiting.values())
            first = min(longest, key=lambda each: each.waits_since, default=None)
            self._make_room(new, {} if first is None else {first: None})
        if not new.transport.is_closing() and not self.refuses(new):
            self._open[new] = None
            self._addresses[address] += 1
            self.wait(new, True)

    def _make_room(self, new: "LimitedConnection", waiting: dict["LimitedConnection", None]) -> None:
        victim = next(iter(waiting), None)
        if victim is not None:
            self.close(victim, "replaced")
        elif len(self._refused) < MOST_REFUSED:
            self.closed["refused"] += 1
            self._refused[new] = None
        else:
            self.close(new, "refused")

    def refuses(self, one: "LimitedConnection") -> bool:
        """Whether there was no room for it, so that its first words are answered with a refusal."""
        return one in self._refused

    def wait(self, one: "LimitedConnection", waits: bool) -> None:
        """From now on it waits for its client, anew, or has a request under way."""
        waiting = self._waiting.setdefault(one.address, {})
        waiting.pop(one, None)
        if waits and one in self._open:
            one.waits_since = self.clock()
            waiting[one] = None
        elif not waiting:
            del self._waiting[one.address]

    def close(self, one: "LimitedConnection", reason: str) -> None:
        self.closed[reason] += 1
        self.forget(one)
        one.transport.abort()

    def forget(self, one: "LimitedConnection") -> None:
        """It is over. It may be called again."""
        self._refused.pop(one, None)
        if one in self._open:
            del self._open[one]
            self._addresses -= Counter([one.address])  # which leaves out what is 0
            self.wait(one, False)

    def sweep(self) -> None:
        """Close what has kept the server waiting for too long."""
        now = self.clock()
        for one in [*self._open, *self._refused]:
            if one.head_since is not None and now - one.head_since > self.limits.head_seconds:
                self.close(one, "heads")
            elif one.stalled_since is not None and now - one.stalled_since > STALL_SECONDS:
                self.close(one, "stalled")

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count what asyncio cannot accept for want of files: it tries hundreds of times, and logs each otherwise."""
        if context.get("message") == ACCEPT_FAILED:
            self.closed["accept"] += 1
        else:
            loop.default_exception_handler(context)

    def report(self, last: bool = False) -> str | None:
        """A line about what was closed since the last one, at most once in REPORT_SECONDS, or for the `last` time."""
        now, limits = self.clock(), self.limits
        if not self.closed or (now - self._reported < REPORT_SECONDS and not last):
            return None
        self._reported, found, self.closed = now, self.closed, Counter()
        most = f"at most {limits.most:,} in all, {limits.per_address:,} from one address"
        words = {
            "replaced": f"{found['replaced']:,} that waited for a client made room for new ones ({most})",
            "refused": f"{found['refused']:,} were refused, as all others had requests under way ({most})",
            "heads": f"{found['heads']:,} sent no whole request within {limits.head_seconds:g} s",
            "stalled": f"{found['stalled']:,} did not read their answer for {STALL_SECONDS:g} s",
            "accept": f"{found['accept']:,} times there was no file for a new one (ulimit -n)",
        }
        return f"connections: {'; '.join(words[reason] for reason in words if found[reason])}"


def no_room() -> bytes:
    """The whole response to a connection beyond the limits."""
    message = "the server has no room for more connections: close some, or try again"
    response = busy(message, code="too_many_connections").response()
    status = HTTPStatus(response.status_code)
    lines = [f"HTTP/1.1 {status} {status.phrase}".encode(), b"connection: close"]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)


def address_of(peer: tuple[str, int] | None) -> str:
    """The address by which connections are counted."""
    if peer is None:
        return ""
    try:
        found = ip_address(peer[0].partition("%")[0])
    except ValueError:
        return peer[0]
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or IPv6Network((int(found) >> 64 << 64, 64)))
    return str(found)


class LimitedConnection(H11Protocol):
    """A connection of uvicorn that tells `connections` when it waits for its client."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.known = connections
        self.address = ""
        self.waits_since = connections.clock()
        self.head_since: float | None = None  # when the head that is not complete was begun
        self.stalled_since: float | None = None  # since when the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address, self.head_since = address_of(self.client), self.known.clock()
        self.known.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.known.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.known.refuses(self):
            self.known.forget(self)
            if not self.transport.is_closing():
                self.transport.write(no_room())
                self.transport.close()
            return
        if self.head_since is None and self.conn.their_state is h11.IDLE:
            self.head_since = self.known.clock()
        waited = self._waits
        super().data_received(data)
        self._look(waited)

    def on_response_complete(self) -> None:
        waited = self._waits
        super().on_response_complete()  # which begins with the next request, if it has come already
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        self.head_since = self.known.clock() if begun or self._is_late else None
        self._look(waited)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled_since = self.known.clock()
        self._look(False)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stalled_since = None
        self._look(True)

    @property
    def _waits(self) -> bool:
        coming = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        return coming or self.stalled_since is not None

    @property
    def _is_late(self) -> bool:
        """Whether a body still comes whose request was answered, such as by a refusal."""
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _look(self, waited: bool) -> None:
        if self.conn.their_state is not h11.IDLE and not self._is_late:
            self.head_since = None
        if self._waits != waited or not self._waits:
            self.known.wait(self, self._waits)


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
        limits: ConnectionLimits = ConnectionLimits(),
    ) -> None:
        super().__init__(name="http", daemon=True)
        self.error: BaseException | None = None
        self._front, self._batcher, self._listener = front, batcher, listener
        self._signals, self._timing, self._greeting = signals, timing, greeting
        self.watchdog = Watchdog(timing.hang_seconds)
        self._fed, self._steps = time.monotonic(), 0
        self.connections = Connections(limits.within_files())
        if self.connections.limits.most < limits.most:
            most = self.connections.limits.most
            print(f"connections: at most {most:,}, not {limits.most:,}, as files are limited (ulimit -n)", flush=True)
        connection: Any = partial(LimitedConnection, self.connections)
        config = uvicorn.Config(
            app,
            http=connection,
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]  # it is only added to the time
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        )
        self._server = uvicorn.Server(config)

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
        sweeping = asyncio.create_task(self._sweep())
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

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.connections.sweep()
            self._say(self.connections.report())

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
