"""Random requests to a server of two ranks: each token is one that the plain model may say there, by its logits.

Requests of a case are sent at once. Whole and streamed answers agree, and so do those to a request that comes again.
"""

import atexit
import functools
import json
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from hypothesis import strategies as st
from safetensors.torch import load_model
from torch import Tensor, nn

from mpi4dl import models
from mpi4dl.datasets.text.tokenizer import ByteTokenizer
from tests.pool.ranks import Ranks
from tests.text.serving.command import MODEL, Server, make_run, server
from tests.text.serving.damage import CHAT, COMPLETIONS

CLOSE = 1e-4  # of logarithmic probabilities, in float32
SECONDS = 120.0


@dataclass(frozen=True)
class Asked:
    """A request: where to, and its fields."""

    path: str
    fields: tuple[tuple[str, Any], ...]

    @property
    def body(self) -> dict[str, Any]:
        return {"model": "tiny", **dict(self.fields)}


@functools.cache
def _served() -> tuple[Server, nn.Module]:
    """A server that stays, and the model that it serves, in this process."""
    folder, ranks = Path(tempfile.mkdtemp(prefix="fuzz-serve")), Ranks()
    try:
        run = make_run(ranks, folder)
    finally:
        ranks.stop()
    staying = ExitStack()
    atexit.register(staying.close)
    served = staying.enter_context(server(2, run, "--tensor", "2"))
    options = dict(pair.split("=") for pair in MODEL.split(","))
    tokenizer = ByteTokenizer()
    model = models.build(
        "gpt", vocabulary=tokenizer.vocabulary, **{name: int(value) for name, value in options.items()}
    )
    load_model(model, run / "model.safetensors")
    return served, model.eval()


@torch.no_grad()
def scores_of(model: nn.Module, tokens: list[int]) -> Tensor:
    """The logarithmic probabilities of what comes behind each of some tokens."""
    return model(torch.tensor([tokens]))[0].log_softmax(-1)  # type: ignore[no-any-return]


def _answer(served: Server, asked: Asked, stream: bool) -> httpx.Response | list[dict[str, Any]]:
    url = f"{served.url}{asked.path}"
    if not stream:
        return httpx.post(url, json=asked.body, timeout=SECONDS)
    chunks = []
    with httpx.stream("POST", url, json={**asked.body, "stream": True}, timeout=SECONDS) as answer:
        if answer.status_code != 200:
            answer.read()
            return answer
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
    return chunks


def _joined(asked: Asked, chunks: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The text and the end of each choice of a stream."""
    texts: dict[int, str] = {}
    ends: dict[int, Any] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said = choice["delta"].get("content", "") if asked.path == CHAT else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + said
        ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"])
    return [(texts[index], ends[index]) for index in sorted(texts)]


def _texts(asked: Asked, whole: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (choice["message"]["content"] if asked.path == CHAT else choice["text"], choice["finish_reason"])
        for choice in whole["choices"]
    ]


def _wrong(asked: Asked, whole: dict[str, Any], model: nn.Module) -> str | None:
    """What is wrong with a whole answer, by the plain model."""
    fields, tokenizer = dict(asked.fields), ByteTokenizer()
    prompts = fields.get("prompt", "")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    count = fields.get("n", 1)
    if len(whole["choices"]) != (count if asked.path == CHAT else count * len(prompts)):
        return f"{len(whole['choices'])} choices"
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    total = 0
    for index, (choice, (text, end)) in enumerate(zip(whole["choices"], _texts(asked, whole), strict=True)):
        if end not in ("stop", "length"):
            return f"it ended with {end!r}"
        own = text
        if fields.get("echo"):
            if not text.startswith(prompts[index // count]):
                return f"choice {index} does not begin with its prompt"
            own = text[len(prompts[index // count]) :]
        if any(stop in own for stop in stops):
            return f"choice {index} has a text to stop at: {own!r}"
        if choice["logprobs"] is None:
            continue
        if asked.path == CHAT:
            told = [each["logprob"] for each in choice["logprobs"]["content"]]
        else:
            told = choice["logprobs"]["token_logprobs"]
        total += len(told)
        if end == "length" and len(told) != fields["max_tokens"]:
            return f"{len(told)} tokens"
        if asked.path == CHAT or fields.get("temperature", 1.0) or fields.get("repetition_penalty", 1.0) != 1.0:
            continue
        tokens = tokenizer.encode(prompts[index // count]).tolist()
        tokens = tokens or [tokenizer.end]
        for logprob in told:
            scores = scores_of(model, tokens)[-1]
            if not math.isclose(logprob, float(scores.max()), abs_tol=CLOSE):
                return f"choice {index}: {logprob} behind {tokens}, but the plain model has {float(scores.max())}"
            tokens.append(int(scores.argmax()))
    if total and whole["usage"]["completion_tokens"] != total:
        return f"{total} tokens, but usage {whole['usage']}"
    return None


def problem(ranks: Ranks, case: tuple[Asked, ...]) -> str | None:
    """What is wrong; None if all is well; a text that begins with "refused: " if a request is refused."""
    served, model = _served()
    ways = [(asked, stream) for asked in case for stream in (False, True, False)]
    with ThreadPoolExecutor(len(ways)) as threads:
        answers = list(threads.map(lambda way: _answer(served, *way), ways))
    refused = None
    for number, asked in enumerate(case):
        first, streamed, again = answers[3 * number : 3 * number + 3]
        assert isinstance(first, httpx.Response)
        assert isinstance(again, httpx.Response)
        if first.status_code != 200:
            if not 400 <= first.status_code < 500:
                return f"{asked}: {first.status_code} {first.text}"
            if isinstance(streamed, list) or {streamed.status_code, again.status_code} != {first.status_code}:
                return f"{asked}: refused in one way alone: {first.text}"
            refused = f"refused: {first.json()['error']['message']}"
            continue
        if not isinstance(streamed, list):
            return f"{asked}: the stream was refused: {streamed.text}"
        said = _wrong(asked, first.json(), model)
        if said is not None:
            return f"{asked}: {said}"
        fields = dict(asked.fields)
        if fields.get("temperature", 1.0) and fields.get("seed") is None:
            continue  # each answer is another one
        texts = _texts(asked, first.json())
        if texts != _texts(asked, again.json()):
            return f"{asked}: {texts}, and again {_texts(asked, again.json())}"
        if texts != _joined(asked, streamed):
            return f"{asked}: {texts}, but streamed {_joined(asked, streamed)}"
    return refused


TEXTS = st.text(st.sampled_from("ab f(:)\n\u00e9\u4e2d\U0001f600\u0301\x00\ufeff"), max_size=12)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    path = draw(st.sampled_from([COMPLETIONS, COMPLETIONS, CHAT]))
    fields: dict[str, Any] = {"max_tokens": draw(st.integers(1, 9))}
    if path == COMPLETIONS:
        fields["prompt"] = draw(st.one_of(TEXTS, TEXTS, st.lists(TEXTS, min_size=1, max_size=3)))
        fields |= draw(st.sampled_from([{}, {"logprobs": 0}, {"logprobs": 0}, {"echo": True}]))
    else:
        roles = st.sampled_from(["system", "user", "assistant"])
        messages = draw(st.lists(st.tuples(roles, TEXTS), min_size=1, max_size=3))
        fields["messages"] = [{"role": role, "content": content} for role, content in messages]
        fields |= draw(st.sampled_from([{}, {"logprobs": True}]))
    fields["temperature"] = draw(st.sampled_from([0.0, 0.0, 0.7, 2.0]))
    if fields["temperature"] and draw(st.booleans()):
        fields["seed"] = draw(st.sampled_from([0, -1, 7, 2**63 - 1, -(2**63)]))
    for name, values in OPTIONAL.items():
        if draw(st.sampled_from([True, False, False])):
            fields[name] = draw(values)
    return Asked(path, tuple(fields.items()))


OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "top_p": st.sampled_from([1e-9, 0.5, 1.0]),
    "top_k": st.sampled_from([0, 1, 3, 2**31 - 1]),
    "repetition_penalty": st.sampled_from([0.01, 0.9, 1.0, 100.0]),
    "stop": st.one_of(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=2),
        st.lists(st.sampled_from([*"ab\n\x00"]), max_size=4),
    ),
}


def cases() -> st.SearchStrategy[tuple[Asked, ...]]:
    return st.lists(requests(), min_size=1, max_size=4).map(tuple)


__all__ = ["Asked", "cases", "problem"]
