"""Both servers, of text and of slides: who says nothing, reads nothing or says nonsense shuts out nobody."""

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from mpi4dl import _http
from mpi4dl._http import HttpServer, Limits, bind, is_known, url_of
from mpi4dl.viewer.app import make_app, server_of
from mpi4dl.viewer.results import read_results
from tests.text.serving.served import PATIENCE_SECONDS, eventually, serving

HOST = b"Host: localhost\r\n"
SLOW = (
    b"",
    b"GET /health HTTP/1.1\r\nHost: ",
    b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
)
LONGER = {"serve": "/metrics", "view": "/static/openseadragon.min.js"}
EVERY = {"serve": "/v1/models", "view": "/api/slides"}
BOTH = pytest.mark.parametrize("kind", EVERY)


class Started(NamedTuple):
    url: str
    server: HttpServer

    def connect(self, said: bytes, within: ExitStack, buffer: int | None = None) -> socket.socket:
        client = within.enter_context(socket.socket())
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.settimeout(PATIENCE_SECONDS)
        client.connect(("127.0.0.1", int(self.url.rpartition(":")[2])))
        with suppress(OSError):  # it does not even read on
            client.sendall(said)
        return client

    def status(self, path: str, host: str = "localhost") -> int:
        return httpx.get(self.url + path, headers={"Host": host}, timeout=PATIENCE_SECONDS).status_code


def answer(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while more := client.recv(10_000):
            found += more
    return found


@contextmanager
def started(kind: str, folder: Path, limits: Limits = Limits()) -> Iterator[Started]:  # noqa: B008
    if kind == "serve":
        with serving(limits=limits, hosts=("*.example.org",)) as served:
            yield Started(served.url, served.server)
        return
    (folder / "predictions.jsonl").write_text('{"image": "a.tif", "prediction": "tumour"}\n')
    listener = bind("127.0.0.1", 0)
    server = server_of(make_app(read_results(folder), ("*.example.org",)), limits)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    url = url_of(listener)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield Started(url, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


@BOTH
@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_silent_and_slow_connections_shut_out_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, count: int
) -> None:
    limits = Limits(connections=count // 3)
    with ExitStack() as within:
        one = within.enter_context(started(kind, tmp_path, limits))
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        for number in range(count):
            one.connect(SLOW[number % len(SLOW)], within)
            if number % (count // 4) == 0:
                assert one.status(EVERY[kind]) == 200
        eventually(lambda: one.server.closed["replaced"] >= count - limits.connections)
        assert len(one.server.server_state.connections) <= limits.connections
        assert one.status(EVERY[kind]) == 200
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    package = Path(_http.__file__).parent
    assert [path.name for path in package.rglob("*.py") if "uvicorn.Config(" in path.read_text()] == ["_http.py"]


@BOTH
def test_the_longest_silence_makes_room(tmp_path: Path, kind: str) -> None:
    asked = f"GET {EVERY[kind]} HTTP/1.1\r\n".encode() + HOST + b"\r\n"
    with ExitStack() as within:
        one = within.enter_context(started(kind, tmp_path, Limits(connections=2)))
        first = one.connect(b"", within)
        second = one.connect(b"GET", within)
        eventually(lambda: len(one.server.waiting) == 2)
        first.sendall(asked)
        assert first.recv(10_000).startswith(b"HTTP/1.1 200")
        eventually(lambda: next(iter(one.server.waiting)).cycle is None)  # the second waits longest from now on
        one.connect(b"", within)
        assert answer(second) == b""
        one.connect(b"", within)
        assert b"HTTP" not in answer(first)  # which was idle


def test_requests_under_way_are_not_given_up_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as within:
        served = within.enter_context(serving(limits=Limits(connections=3)))
        one = Started(served.url, served.server)
        served.batch.hold()
        body = b'{"model": "tiny", "prompt": "a", "max_tokens": 2}'
        head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
        whole = head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
        busy = [one.connect(whole, within) for _ in range(3)]
        eventually(lambda: served.batch.stats().running == 3)
        refusal = answer(one.connect(whole, within))
        assert refusal.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in refusal.lower()
        assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["type"] == "rate_limit_error"
        monkeypatch.setattr(_http, "STALL_SECONDS", 0.1)
        stalled = next(iter(one.server.server_state.connections))
        stalled.loop.call_soon_threadsafe(stalled.pause_writing)
        eventually(lambda: one.server.closed["read"] == 1)
        served.batch.step()
        assert sorted(answer(each)[:12] for each in busy) == [b"", b"HTTP/1.1 200", b"HTTP/1.1 200"]


@BOTH
@pytest.mark.parametrize("said", SLOW)
def test_a_request_must_come_in_time(tmp_path: Path, kind: str, said: bytes) -> None:
    with ExitStack() as within:
        one = within.enter_context(started(kind, tmp_path, Limits(request_seconds=0.3)))
        client = within.enter_context(httpx.Client(base_url=one.url))
        assert client.get(EVERY[kind]).status_code == 200
        found = answer(one.connect(said, within))
        assert found.startswith(b"HTTP/1.1 405" if kind == "view" and b"POST" in said else b"HTTP/1.1 408")
        assert '"error"' in found.decode()
        assert client.get(EVERY[kind]).status_code == 200  # between requests there is more time
        assert len(one.server.server_state.connections) == 1


@BOTH
def test_answers_must_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    many = (f"GET {LONGER[kind]} HTTP/1.1\r\n".encode() + HOST + b"\r\n") * 1000
    with ExitStack() as within:
        one = within.enter_context(started(kind, tmp_path))
        monkeypatch.setattr(_http, "STALL_SECONDS", 0.3)
        one.connect(many, within, buffer=2048)
        eventually(lambda: one.server.closed["read"] == 1)
        monkeypatch.setattr(_http, "STALL_SECONDS", 60.0)
        one.connect(many, within, buffer=2048)  # which must not hold up the end
        one.connect(SLOW[2], within)
        eventually(lambda: any(each.flow.write_paused for each in list(one.server.server_state.connections)))
        assert one.status(EVERY[kind]) == 200


@BOTH
@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00" + bytes(99), 400),
        (b"GET\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nx\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\n" + HOST + b"x: 1\r\n" * 1_000_000, 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"x: " + b"1" * 1_000_000, 400),
        (b"HEAD / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nx\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"Content-Length: 5000000000\r\nConnection: close\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nHost: evil.example.com\r\nConnection: close\r\n\r\n", 421),
    ],
)
def test_nonsense_is_refused(kinds: dict[str, Started], kind: str, said: bytes, status: int) -> None:
    with ExitStack() as within:
        found = answer(kinds[kind].connect(said, within))
    assert found.startswith(b"HTTP/1.1 %d " % status) or (not found and len(said) > 1_000_000)  # it was cut off
    assert not found or "error" in json.loads(found.partition(b"\r\n\r\n")[2])
    assert kinds[kind].status(EVERY[kind], "a.example.org") == 200


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    with ExitStack() as within:
        yield {kind: within.enter_context(started(kind, tmp_path_factory.mktemp(kind))) for kind in EVERY}


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost:8000", True),
        ("127.0.0.1", True),
        ("[::1]:80", True),
        ("gpu7.Example.org:80", True),
        ("localhost.", True),
        ("", True),
        ("evil.example.com", False),
        ("localhost.evil.example.com:8000", False),
        ("127.0.0.1.evil.example.com", False),
        ("[::1].evil.example.com", False),
        ("evil.example.com@localhost", False),
        ("localhost, evil.example.com", False),
        ("[", False),
    ],
)
def test_foreign_names_are_not_known(host: str, known: bool) -> None:
    assert is_known(host, ("localhost", "*.example.org")) is known
