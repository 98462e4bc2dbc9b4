"""The base of all servers of the package: limits on what a client may cost, known hosts, and a clean end.

uvicorn and h11 read HTTP, limit heads, and end idle connections. What they lack is here:

    connection_made --> "request" ---------> the server works --> "idle" --> "request" ...
                        request_seconds      "read": STALL_SECONDS, while the client does not read its answer

A turn of the client that lasts too long ends the connection. A connection beyond the limit replaces the one whose
client has had its turn longest. So clients that connect and say nothing shut out nobody. Limits of one address and
encryption are the task of a proxy.
"""

import asyncio
import logging
import re
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

STALL_SECONDS = 60.0
BACKLOG = 128  # connections that asyncio accepts at once; four times as many are open until the first are closed
OTHER_FILES = 4 * BACKLOG + 128
LOOPBACK = ("127.", "::1")

ErrorForm = Callable[[int, str], Response]


@dataclass(frozen=True)
class Limits:
    """`connections` at most, `request_seconds` from the first byte of a request to its last, and `idle_seconds` between
    requests.
    """

    connections: int = 512
    request_seconds: float = 30.0
    idle_seconds: float = 75.0  # longer than clients keep idle connections: one must not end just when it is used again


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    return host.startswith(LOOPBACK) or host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket of this address, on which nobody listens yet; port 0: any that is free. Raises ValueError."""
    try:
        return _bound(host, port)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"cannot listen on {host}:{port}: {why}: choose another --port, or 0") from None


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # asyncio sends at once only on sockets that say that they speak TCP; others keep each answer back for 40 ms.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_known(header: str, names: Iterable[str]) -> bool:
    """Whether a Host header has an address, one of these names (or patterns), or nothing.

    A page of any site can let a browser ask this server, once the site's name leads to this machine (DNS rebinding).
    Such a request has that name as its Host.
    """
    found = re.fullmatch(r"(?:\[([^\]]*)\]|([^:@\[\]]*))(?::\d*)?", header.lower())
    if found is None:
        return False
    host = found[1] or found[2].rstrip(".")
    try:
        return bool(ip_address(host.partition("%")[0]))
    except ValueError:
        return not host or any(fnmatchcase(host, name) for name in names)


class Guard:
    """The checks of every request to `app`: its Host, the size of its body, and those of `check`.

    `hosts`: names of this machine beside localhost and its own. `headers` are those of every response, and `seen` is
    called with its path and status. A body that says no length but exceeds `max_body` is an HTTPException in `app`.
    """

    def __init__(
        self,
        app: ASGIApp,
        error: ErrorForm,
        hosts: Iterable[str],
        max_body: int,
        check: Callable[[Scope], Response | None],
        headers: Mapping[str, str] | None = None,
        seen: Callable[[str, int], None] = lambda path, status: None,
    ) -> None:
        here = socket.gethostname()
        self._names = [name.lower() for name in ("localhost", here, here.partition(".")[0], *hosts)]
        self._app, self._error, self._max_body, self._check, self._seen = app, error, max_body, check, seen
        self._headers = Headers(headers or {}).raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = 0

        async def limited() -> Message:
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > self._max_body:
                raise HTTPException(413)
            return message

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._seen(scope["path"], message["status"])
                message = {**message, "headers": [*message.get("headers", []), *self._headers]}
            await send(message)

        await (self._refusal(scope) or self._app)(scope, limited, sealed)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not is_known(host, self._names):
            return self._error(421, f"this server is not known as {host[:80]!r}: --allowed-hosts adds names")
        found = self._check(scope)
        if found is None and int(headers.get("content-length", "0")) > self._max_body:
            return self._error(413, f"the body is longer than {self._max_body:,} bytes")
        return found


class LimitedConnection(H11Protocol):
    """A connection of uvicorn that ends when its client takes too long for its turn."""

    def __init__(self, owner: "HttpServer", **options: Any) -> None:
        super().__init__(**options)
        self._owner, self._turn = owner, ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()
        if len(self.connections) > self._owner.limits.connections:
            longest = next(iter(self._owner.waiting))
            if longest is self:  # all others have requests under way
                full = self._owner.error(429, "the server has no room for more connections: try again soon")
                full.headers["connection"] = "close"
                self.app = full
            else:
                longest.give_up("replaced")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_turn()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins with the next request, if it has come already
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def _look(self) -> None:
        """Find whose turn it is: a new one of the client has a limit."""
        turn, their_state = "", self.conn.their_state
        if self.flow.write_paused or self.transport.is_closing():
            turn = "read"
        elif their_state is h11.SEND_BODY:
            turn = "request"
        elif their_state is h11.IDLE:
            turn = "request" if self.cycle is None or self.conn.trailing_data[0] else "idle"
        if turn != self._turn:
            self._end_turn()
            self._turn = turn
            if turn:
                limits = self._owner.limits
                seconds = {"request": limits.request_seconds, "idle": limits.idle_seconds + STALL_SECONDS}
                self._timer = self.loop.call_later(seconds.get(turn, STALL_SECONDS), self.give_up, turn)
                self._owner.waiting[self] = None

    def _end_turn(self) -> None:
        self._owner.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def give_up(self, reason: str) -> None:
        """End the connection, and count why."""
        self._owner.closed[reason] += 1
        if reason == "request":
            self._refuse(408, f"the request did not come within {self._owner.limits.request_seconds:g} s")
        self._end_turn()
        self.connections.discard(self)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Write an error by hand, unless an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = self._owner.error(status, message)
            lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(), b"connection: close"]
            lines += [name + b": " + value for name, value in error.raw_headers]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(error.body))


class HttpServer(uvicorn.Server):
    """A server of HTTP alone, with limits. `error` makes its own responses; `closed` counts connections that it ended.

    At the end, clients have `last_words_seconds` to take what they were sent.
    """

    def __init__(self, app: ASGIApp, error: ErrorForm, limits: Limits, last_words_seconds: int) -> None:
        self.limits = Limits(_within_files(limits.connections), limits.request_seconds, limits.idle_seconds)
        self.error = error
        self.waiting: dict[LimitedConnection, None] = {}  # whose client has its turn, the longest one first
        self.closed: Counter[str] = Counter()
        protocol: Any = partial(LimitedConnection, self)
        config = uvicorn.Config(
            app,
            http=protocol,
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]  # it is only added to the time
            timeout_graceful_shutdown=last_words_seconds,
        )
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of chunks for clients that have left
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # who has not taken its answer is no error
        await super().shutdown(sockets)


def _within_files(connections: int) -> int:
    """As many connections, or fewer if this process cannot have so many files open. Raises its limit if it may."""
    wanted, (soft, hard) = connections + OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - OTHER_FILES))
