"""Requests that are wrong in all ways that come to mind, and in some that come to a generator of random numbers."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "def f(", "max_tokens": 2},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
}
COMPLETIONS, CHAT = GOOD
JSON = {"content-type": "application/json"}
DEEP = 12_000  # Python 3.13 reads up to 9,998
WRONG = ["", "x", [], {}, [[]], -1, 1.5, 1e400, 10**400, "NaN", True, [None], {"a": [1]}]
# Per field, what of WRONG is right.
RIGHT: dict[str, list[Any]] = {
    "prompt": ["", "x", "NaN"],
    "stop": ["x", "NaN", []],
    "temperature": [1.5],
    "seed": [-1],
    "repetition_penalty": [1.5],
    "stream": [True],
    "echo": [True],
    "stream_options": [{}, {"a": [1]}],
    "logit_bias": [{}],
    "suffix": [""],
    "tools": [[]],
    "best_of": [True],
}
FIELDS = (
    "model prompt max_tokens temperature top_p top_k repetition_penalty n seed stop stream stream_options echo "
    "logprobs presence_penalty frequency_penalty logit_bias suffix best_of tools"
).split()


@dataclass(frozen=True)
class Damaged:
    """One request; `body` in pieces is sent in chunks."""

    what: str
    body: bytes | list[bytes] = b""
    path: str = COMPLETIONS
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))


def dumped(**fields: Any) -> bytes:
    return json.dumps({**GOOD[COMPLETIONS], **fields}).encode()


def systematic(context: int, max_body: int) -> Iterator[Damaged]:
    for name in FIELDS:
        for wrong in WRONG:
            if not any(wrong == right and type(wrong) is type(right) for right in RIGHT.get(name, [])):
                yield Damaged(f"{name}={str(wrong)[:20]!r}", dumped(**{name: wrong}))
    for content in [None, 1, [], {}, [1], [{"type": "image_url", "image_url": {}}], [{"type": "text"}]]:
        if content != []:
            chat = {**GOOD[CHAT], "messages": [{"role": "user", "content": content}]}
            yield Damaged(f"content={content}", json.dumps(chat).encode(), CHAT)
    for messages in [None, [], {}, "x", [None], [{}], [{"role": "king", "content": "x"}], [{"role": "user"}]]:
        yield Damaged(f"messages={messages}", json.dumps({**GOOD[CHAT], "messages": messages}).encode(), CHAT)
    whole = dumped()
    yield Damaged("no body")
    yield Damaged("half a body", whole[:-4])
    yield Damaged("not JSON", b"prompt=x")
    yield Damaged("a list", b"[" + whole + b"]")
    yield Damaged("null", b"null")
    yield Damaged("NaN", whole.replace(b": 2", b": NaN"))
    yield Damaged("Infinity", whole[:-1] + b', "temperature": Infinity}')
    yield Damaged("no UTF-8", whole.replace(b"def", b"\xff\xfe"))
    yield Damaged("UTF-16", whole.decode().encode("utf-16"))
    yield Damaged("half of a surrogate pair", whole.replace(b"def", b"\\ud800"))
    yield Damaged("too deep", b"[" * DEEP)
    yield Damaged("too deep, closed", b"[" * DEEP + b"]" * DEEP)
    yield Damaged("deep in a field", whole[:-1] + b', "x": ' + b"[" * DEEP + b"]" * DEEP + b"}")
    yield Damaged("too long", dumped(prompt="x" * max_body))
    yield Damaged("too long, in chunks", [b"x" * 1000] * (max_body // 1000 + 2))
    yield Damaged("many wrong tokens", dumped(prompt=[1.5] * (max_body // 8)))
    yield Damaged("prompt longer than the context", dumped(prompt="x" * (context + 1)))
    yield Damaged("no room for tokens", dumped(prompt="x" * context))
    yield Damaged("max_tokens over the context", dumped(max_tokens=context))
    yield Damaged("a token over the vocabulary", dumped(prompt=[1, 257]))
    yield Damaged("a huge token", dumped(prompt=[2**31 - 1]))
    yield Damaged("more texts than places", dumped(n=128, prompt=["a", "b", "c"]))
    yield Damaged("no content type", whole, headers={})
    yield Damaged("another content type", whole, headers={"content-type": "text/plain"})
    yield Damaged("compressed", whole, headers={**JSON, "content-encoding": "gzip"})
    for path in [
        "/",
        "/v1",
        "/v2/completions",
        "/v1/completions/x",
        "/docs",
        "/openapi.json",
        "/v1/models/other",
        "/%00",
    ]:
        yield Damaged(f"GET {path}", path=path, method="GET")
    for method in ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"]:
        yield Damaged(f"{method} completions", method=method)
    yield Damaged("POST models", path="/v1/models")


def mutated(count: int, seed: int = 0) -> Iterator[Damaged]:
    """Good bodies of which bytes were changed, cut out or put in, so that they are no JSON any more."""
    numbers = random.Random(seed)
    while count:
        path = numbers.choice(list(GOOD))
        body = bytearray(json.dumps(GOOD[path]).encode())
        for _ in range(numbers.randint(1, 5)):
            place = numbers.randrange(len(body))
            what = numbers.randrange(3)
            if what == 0:
                body[place] = numbers.randrange(256)
            elif what == 1:
                del body[place : place + numbers.randint(1, 9)]
            else:
                body[place:place] = numbers.randbytes(numbers.randint(1, 9))
        try:
            json.loads(bytes(body).decode())
        except ValueError:
            count -= 1
            yield Damaged(f"mutant {bytes(body)!r}", bytes(body), path)
