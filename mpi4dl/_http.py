"""What all servers of the package share: the socket they listen on, its address, and the host names they answer to."""

import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase
from http import HTTPStatus
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.responses import Response

LOOPBACK = ("127.", "::1")


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    return host.startswith(LOOPBACK) or host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket of this address, on which nobody listens yet; port 0: any that is free. Raises OSError."""
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


def response_bytes(response: "Response") -> bytes:
    """A whole response that is sent by hand, after which the connection is closed."""
    status = HTTPStatus(response.status_code)
    lines = [f"HTTP/1.1 {status} {status.phrase}".encode(), b"connection: close"]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)


class KnownHosts:
    """The names in Host headers that a server answers to.

    A page of any site can let a browser ask this server, once the site's name leads to this machine (DNS rebinding).
    Such a request has that name as its Host. So names are answered that are known; addresses need none.
    """

    def __init__(self, names: Iterable[str]) -> None:
        here = socket.gethostname().lower()
        self._names = ("localhost", here, here.partition(".")[0], *(name.lower() for name in names))

    def stranger(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The host of a request with these headers if it is not known."""
        host = host_of(dict(headers).get(b"host", b"").decode("latin-1"))
        return host if host and not self._is_known(host) else None

    def _is_known(self, host: str) -> bool:
        try:
            ip_address(host.partition("%")[0])
        except ValueError:
            return any(fnmatchcase(host, known) for known in self._names)
        return True


def host_of(header: str) -> str:
    """The name or address in a Host header, without its port."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")
