"""What the server answers, by OpenAI's client, and what it refuses: before a stand-in of the batch."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from mpi4dl.text.options import Sampling
from mpi4dl.text.serving.app import ChatRequest
from tests.text.serving.damage import DEEP, Damaged, mutated, systematic
from tests.text.serving.served import CONTEXT, PATIENCE_SECONDS, Served, serving
from tests.text.serving.standin import SILENT, text_after

MAX_BODY = 50_000


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_queue=16, max_body=MAX_BODY) as one:
        yield one


def expected(prompt: str, num_tokens: int) -> str:
    return text_after(prompt.encode(), num_tokens)


def test_completions(served: Served) -> None:
    create = served.client().completions.create
    found = create(model="tiny", prompt="a b", max_tokens=5)
    assert [(choice.text, choice.finish_reason) for choice in found.choices] == [(expected("a b", 5), "length")]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (3, 5, 8)
    many = create(model="tiny", prompt=["a b", "né"], n=2, max_tokens=4, echo=True, seed=7)
    texts = [f"{prompt}{expected(prompt, 4)}" for prompt in ("a b", "né") for _ in range(2)]
    assert [(choice.index, choice.text) for choice in many.choices] == list(enumerate(texts))
    assert many.usage is not None
    assert (many.usage.prompt_tokens, many.usage.completion_tokens) == (6, 16)
    assert [sampling.seed for sampling in served.batch.submitted[-4:]] == [7, 8, 7, 8]
    tokens = create(model="tiny", prompt=[[97], [98]], logprobs=0)
    assert [choice.text for choice in tokens.choices] == [expected("a", 16), expected("b", 16)]
    assert tokens.choices[0].logprobs is not None
    assert tokens.choices[0].logprobs.tokens == list(expected("a", 16))
    assert tokens.choices[0].logprobs.token_logprobs == [-1.0] * 16


def test_an_echo_is_the_text_that_was_sent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tokenizer decodes its tokens with a space before them, as Llama's does."""
    monkeypatch.setattr(served.batch.tokenizer, "decode", lambda tokens: " a", raising=False)
    found = served.client().completions.create(model="tiny", prompt="a", max_tokens=2, echo=True)
    assert found.choices[0].text == "a" + expected("a", 2)


def test_what_is_asked_reaches_the_batch(served: Served) -> None:
    served.client().completions.create(
        model="tiny",
        prompt="a",
        max_tokens=3,
        temperature=0.5,
        top_p=0.25,
        seed=-1,
        stop=["x", "yz"],
        extra_body={"top_k": 7, "repetition_penalty": 1.5, "never_heard_of": [1], "user": None},
    )
    assert served.batch.submitted[-1] == Sampling(3, 0.5, 7, 0.25, 1.5, 2**63 - 1, ("x", "yz"))


def test_streams(served: Served) -> None:
    stream = served.client().completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=3, stream=True, echo=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts, reasons = ["", ""], [[], []]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index].append(choice.finish_reason)
    assert texts == ["a" + expected("a", 3), "b" + expected("b", 3)]
    assert reasons == [[None, None, None, "length"]] * 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1
    for logprobs, count in ((None, 1), (0, 3)):  # tokens without text are streamed for their probabilities alone
        silent = served.client().completions.create(
            model="tiny", prompt=SILENT, max_tokens=3, stream=True, logprobs=logprobs
        )
        assert len(list(silent)) == count
    raw = served.post(prompt="a", max_tokens=1, stream=True)
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("\n\ndata: [DONE]\n\n")


def test_chats(served: Served) -> None:
    create = served.client().chat.completions.create
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    prompt = "system: be brief\nuser: hello\nassistant: "
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    assert ChatRequest.model_validate({"model": "tiny", "messages": messages}).prompts == [prompt]
    found = create(model="tiny", messages=messages, max_completion_tokens=6, logprobs=True)  # type: ignore[arg-type]
    assert found.choices[0].message.content == expected(prompt, 6)
    assert found.choices[0].logprobs is not None
    assert [each.token for each in found.choices[0].logprobs.content or []] == list(expected(prompt, 6))
    assert served.batch.submitted[-1].stop == ("\nuser:",)
    stream = create(model="tiny", messages=messages, stream=True)  # type: ignore[arg-type]
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected(prompt, CONTEXT - len(prompt))


def test_models_and_health(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "mpi4dl"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other': this is tiny"):
        client.completions.create(model="other", prompt="a")
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}


def sent(client: httpx.Client, damaged: Damaged) -> httpx.Response:
    body = iter(damaged.body) if isinstance(damaged.body, list) else damaged.body
    return client.request(damaged.method, damaged.path, content=body, headers=damaged.headers)


def test_damaged_requests_are_refused_in_words(served: Served) -> None:
    all_of_them = [*systematic(CONTEXT, MAX_BODY), *mutated(100)]
    assert len(all_of_them) > 300
    with httpx.Client(base_url=served.url, timeout=PATIENCE_SECONDS) as client:
        for damaged in all_of_them:
            response = sent(client, damaged)
            assert 400 <= response.status_code < 500, f"{damaged.what}: {response.status_code} {response.text}"
            if damaged.method != "HEAD":
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert 10 < len(error["message"]) < 400, damaged.what
    assert served.front.idle
    assert served.post(prompt="a", max_tokens=3).json()["choices"][0]["text"] == expected("a", 3)


@pytest.mark.parametrize(
    ("damaged", "status", "said"),
    [
        (Damaged("", b"{"), 400, "Invalid JSON"),
        (Damaged("", b"[" * DEEP), 400, "recursion limit"),
        (Damaged("", b'{"a": "\xff"}'), 400, "invalid unicode"),
        (Damaged("", [b"x" * MAX_BODY, b"x"]), 413, "longer than 50,000 bytes"),
        (Damaged("", b"x", headers={"content-type": "text/plain"}), 415, "must be application/json"),
        (Damaged("", method="GET"), 405, "the method is wrong"),
        (Damaged("", path="/v1/nothing"), 404, "there is no POST '/v1/nothing'"),
        (Damaged("", b'{"model": "tiny", "prompt": "a", "best_of": 3}'), 400, "best_of is not supported"),
        (Damaged("", b'{"model": "tiny", "prompt": ""}'), 200, "text"),
    ],
)
def test_what_is_said_of_damage(served: Served, damaged: Damaged, status: int, said: str) -> None:
    with httpx.Client(base_url=served.url, timeout=PATIENCE_SECONDS) as client:
        response = sent(client, damaged)
    assert response.status_code == status
    assert said in response.text


def test_chats_of_a_form_of_the_models_own_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.batch.tokenizer, "has_chats", True)
    answer = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "chat_template")
    assert "apply_chat_template" in answer.json()["error"]["message"]
    assert served.post(prompt="a", max_tokens=1).status_code == 200
