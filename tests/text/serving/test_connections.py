"""Who connects and says nothing, or reads nothing, shuts out nobody; and which names the server is known by."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from mpi4dl._connections import ConnectionLimits, Connections, address_of
from mpi4dl.options.declare import ConfigError
from mpi4dl.serve import TOKEN_VARIABLE, _token
from mpi4dl.text.serving.admission import Limits
from tests.text.serving.served import CONTEXT, PATIENCE_SECONDS, Served, eventually, serving

SLOW = (
    b"",
    b"GET /health HTTP/1.1\r\nHost: ",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
)


@contextmanager
def files_for(number: int) -> Iterator[None]:
    """Let this process have so many files open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < number:
        pytest.skip(f"this machine allows {before[1]} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], number), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connect(served: Served, said: bytes, within: ExitStack) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    client = within.enter_context(socket.create_connection((host, int(port)), PATIENCE_SECONDS))
    client.sendall(said)
    return client


@pytest.mark.parametrize(
    ("count", "limits", "patience"),
    [
        (120, ConnectionLimits(40, 30), PATIENCE_SECONDS),
        (120, ConnectionLimits(30, 40), PATIENCE_SECONDS),
        pytest.param(2000, ConnectionLimits(), 1.0, marks=pytest.mark.exhaustive),
    ],
)
def test_silent_and_slow_connections_shut_out_nobody(
    capfd: pytest.CaptureFixture[str], count: int, limits: ConnectionLimits, patience: float
) -> None:
    with files_for(2 * count + 2000), ExitStack() as within, serving(token="secret", connections=limits) as served:
        for number in range(count):
            connect(served, SLOW[number % len(SLOW)], within)
            if number % (count // 4) == 0:
                assert httpx.get(f"{served.url}/health", timeout=patience).status_code == 200
        for _ in range(3):
            asked = {"model": "tiny", "prompt": "a"}
            bearing = {"Authorization": "Bearer secret"}
            answer = httpx.post(f"{served.url}/v1/completions", json=asked, headers=bearing, timeout=patience)
            assert answer.status_code == 200
        assert len(served.thread.connections) <= min(limits.most, limits.per_address)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    said = [line for line in out.splitlines() if line.startswith("connections: ")]
    assert 1 <= len(said) <= 2  # soon, and at the end if more came after that


def test_requests_under_way_are_not_given_up_for_new_ones() -> None:
    with ExitStack() as within, serving(Limits(CONTEXT), connections=ConnectionLimits(3, 3)) as served:
        served.batch.hold()
        body = b'{"model": "tiny", "prompt": "a", "max_tokens": 2}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
        busy = [connect(served, whole, within) for _ in range(3)]
        eventually(lambda: served.batch.stats().running == 3)
        refusal = connect(served, whole, within).recv(10_000)
        assert refusal.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in refusal.lower()
        assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["type"] == "rate_limit_error"
        served.batch.step()
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in busy)


@pytest.mark.parametrize("said", [*SLOW[:2], b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"])
def test_a_request_must_come_in_time(said: bytes) -> None:
    limits = ConnectionLimits(head_seconds=0.3)
    with ExitStack() as within, serving(connections=limits) as served, httpx.Client(base_url=served.url) as client:
        slow = connect(served, said, within)
        assert client.get("/health").status_code == 200
        with suppress(ConnectionResetError):
            while slow.recv(1000):
                pass
        assert client.get("/health").status_code == 200  # between requests there is more time


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class StandIn:
    """As much of a connection as its limits look at."""

    head_since: float | None = None
    stalled_since: float | None = None

    def __init__(self, address: str) -> None:
        self.address, self.transport, self.closed = address, self, False

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_the_longest_silence_makes_room() -> None:
    clock = Clock()
    known = Connections(ConnectionLimits(3, 2, head_seconds=5), b"", clock)
    a, b, c, d, e, first, last = made = [cast(Any, StandIn(address)) for address in "xxyzzxy"]
    for each in (a, b, c):
        known.admit(each)
        clock.now += 1
    known.wait(a, False)
    known.admit(d)  # too many in all: b has waited longest, as a has a request under way
    assert [each.closed for each in (a, b, c, d)] == [False, True, False, False]
    known.wait(a, True)
    c.head_since, clock.now = 0.0, 6.0
    known.sweep()
    assert [each.closed for each in (a, c, d)] == [False, True, False]
    for each in (a, d):
        known.wait(each, False)
    known.admit(e)
    known.wait(e, False)
    known.admit(first)  # all others have requests under way
    assert known.refuses(first)
    assert [each.closed for each in (a, d, e, first)] == [False, False, False, False]
    first.head_since, clock.now = clock.now, clock.now + 6
    known.sweep()  # it sent no head in time
    assert [each.closed for each in (a, d, e, first)] == [False, False, False, True]
    line = known.report()
    assert line is not None
    assert "1 that waited" in line
    assert "1 were refused" in line
    assert "2 sent no whole request within 5 s" in line
    known.admit(last)
    assert known.report() is None  # at most one line a minute
    clock.now += 60
    assert known.report() is not None
    for each in made:
        known.forget(each)
    assert len(known) == 0


def test_all_servers_have_the_same_limits() -> None:
    package = Path(__file__).parents[3] / "mpi4dl"
    made = [path.name for path in package.rglob("*.py") if "uvicorn.Config(" in path.read_text()]
    assert made == ["_connections.py"]


def test_networks_of_ipv6_count_as_one_address() -> None:
    one, same, other = (address_of((host, 1)) for host in ("2001:db8::1", "2001:db8::2:1", "2001:db8:0:1::1"))
    assert one == same != other
    assert address_of(("::ffff:10.0.0.1", 1)) == address_of(("10.0.0.1", 2)) == "10.0.0.1"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        (socket.gethostname(), 200),
        ("gpu7.Example.org:80", 200),
        ("evil.example.com", 421),
        ("localhost.evil.example.com:8000", 421),
        ("127.0.0.1.evil.example.com", 421),
    ],
)
def test_foreign_names_are_not_answered(names: Served, host: str, status: int) -> None:
    for path in ("/health", "/v1/models"):
        assert httpx.get(names.url + path, headers={"Host": host}).status_code == status


@pytest.fixture(scope="module")
def names() -> Iterator[Served]:
    with serving(hosts=("*.example.org",)) as one:
        yield one


@pytest.mark.parametrize(
    ("text", "token"), [("secret\n", "secret"), (" a b\r\n", "a b"), ("a\nb", None), (" \n", None)]
)
def test_white_space_around_a_token_locks_nobody_out(
    monkeypatch: pytest.MonkeyPatch, text: str, token: str | None
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, text)
    if token is not None:
        assert _token(None) == token
    else:
        with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
            _token(None)
