"""Limits on the connections of a server of uvicorn: how many there are, and how long each may keep it waiting."""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

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


LIMITS = ConnectionLimits()


class Connections:
    """All connections of a server. For one event loop."""

    def __init__(self, limits: ConnectionLimits, no_room: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.no_room, self.clock = limits, no_room, clock
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

    async def watch(self, say: Callable[[str | None], None]) -> None:
        """Sweep, and say what was closed, for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()
            say(self.report())

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
                self.transport.write(self.known.no_room)
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


def server_of(app: "ASGIApp", connections: Connections, last_words_seconds: int) -> uvicorn.Server:
    """A server of HTTP alone, with these limits, which at its end lets clients take what they were sent for so long."""
    connection: Any = partial(LimitedConnection, connections)
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
        timeout_keep_alive=connections.limits.idle_seconds,  # type: ignore[arg-type]  # it is only added to the time
        timeout_graceful_shutdown=last_words_seconds,
    )
    return uvicorn.Server(config)
