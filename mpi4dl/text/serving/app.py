"""The HTTP application: routes, the fields of requests, bodies within limits, answers whole or streamed."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpi4dl._http import KnownHosts
from mpi4dl.datasets.text import Tokenizer
from mpi4dl.text.batcher import Event
from mpi4dl.text.options import LARGEST_SEED, Sampling
from mpi4dl.text.serving.admission import (
    Admission,
    ApiError,
    Reply,
    as_json,
    busy,
    explain_errors,
    json_response,
    quoted,
)

# Answers in the form of OpenAI's, whole or in chunks as they come.

DONE = b"data: [DONE]\n\n"


@dataclass
class Continued:
    """The text of one choice so far."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, event: Event) -> None:
        self.text += event.text
        self.finish_reason = event.finish_reason
        self.logprobs += scored(event)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens


def scored(event: Event) -> list[tuple[int, float]]:
    """The token of an event with its logarithmic probability, if it has one."""
    return [] if event.token is None or event.logprob is None else [(event.token, event.logprob)]


class CompletionForm:
    """The shape of /v1/completions. `echoes`: what the text of each choice begins with."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, echoes: Sequence[str], logprobs: bool) -> None:
        self.echoes, self.logprobs = echoes, logprobs
        self._tokenizer = tokenizer
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Continued], usage: dict[str, int]) -> dict[str, Any]:
        """The answer that is not streamed."""
        texts = [self._choice(i, self._said(self.echoes[i] + choice.text), choice) for i, choice in enumerate(choices)]
        return {**self._head, "object": self.object_name, "choices": texts, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None, tells_usage: bool) -> bytes:
        """One event of a stream."""
        told: dict[str, Any] = {**self._head, "object": self.chunk_name, "choices": choices}
        return b"data: " + as_json({**told, "usage": usage} if tells_usage else told) + b"\n\n"

    def opening(self, index: int) -> dict[str, Any] | None:
        """The beginning of the stream of a choice, before there is any text."""
        return self.piece(index, Continued(self.echoes[index])) if self.echoes[index] else None

    def piece(self, index: int, new: Continued) -> dict[str, Any]:
        """The new text of a choice."""
        return self._choice(index, {"text": new.text}, new)

    def _said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _choice(self, index: int, said: dict[str, Any], found: Continued) -> dict[str, Any]:
        return {"index": index, **said, "logprobs": self._scores(found), "finish_reason": found.finish_reason}

    def _scores(self, found: Continued) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {
            "tokens": [self._tokenizer.decode([token]) for token, _ in found.logprobs],
            "token_logprobs": [logprob for _, logprob in found.logprobs],
            "top_logprobs": None,
            "text_offset": [],
        }


class ChatForm(CompletionForm):
    """The shape of /v1/chat/completions."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, Continued())

    def piece(self, index: int, new: Continued) -> dict[str, Any]:
        return self._choice(index, {"delta": {"content": new.text} if new.text else {}}, new)

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _scores(self, found: Continued) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        tokens = [(self._tokenizer.decode([token]), logprob) for token, logprob in found.logprobs]
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in tokens
            ],
            "refusal": None,
        }


def usage_of(choices: Sequence[Continued], per_prompt: int) -> dict[str, int]:
    """Tokens of all choices; a prompt counts once, however many choices it has."""
    prompt = sum(choice.prompt_tokens for choice in choices[::per_prompt])
    completion = sum(choice.completion_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _failure(event: Event) -> ApiError | None:
    """The error of an event, if any."""
    if event.finish_reason == "cancelled":
        return busy("the server is stopping, and this request took too long for that", 503, "stopping")
    if event.finish_reason == "error":
        return ApiError(500, f"this request failed: {event.message}", None, "generation_failed")
    return None


async def whole_answer(reply: Reply, form: CompletionForm, per_prompt: int) -> dict[str, Any]:
    """The answer when all choices are over. Raises ApiError if one fails."""
    choices = [Continued() for _ in form.echoes]
    while any(choice.finish_reason is None for choice in choices):
        index, event = await reply.next()
        failure = _failure(event)
        if failure is not None:
            raise failure
        choices[index].add(event)
    return form.whole(choices, usage_of(choices, per_prompt))


async def streamed_answer(
    reply: Reply, form: CompletionForm, per_prompt: int, tells_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events as the answer grows: https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    choices = [Continued() for _ in form.echoes]
    for index in range(len(choices)):
        opening = form.opening(index)
        if opening is not None:
            yield form.chunk([opening], None, tells_usage)
    while any(choice.finish_reason is None for choice in choices):
        index, event = await reply.next()
        failure = _failure(event)
        if failure is not None:
            yield b"data: " + as_json(failure.body()) + b"\n\n"
            return
        choices[index].add(event)
        if event.text or event.finish_reason or form.logprobs:
            new = Continued(event.text, event.finish_reason, scored(event))
            yield form.chunk([form.piece(index, new)], None, tells_usage)
    if tells_usage:
        yield form.chunk([], usage_of(choices, per_prompt), tells_usage)
    yield DONE


# Requests: the fields of OpenAI's requests that have an effect here, with their types and ranges.
#
# Fields that are not named here are ignored, as by other servers that speak this protocol, except for those that would
# change the answer: they are refused in words.

MOST_STOPS, LONGEST_STOP = 4, 256
MOST_CHOICES = 128
MOST_PROMPTS = 1024
MOST_MESSAGES = 4096

Token = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1)]
# One error for a list of a hundred thousand wrong members is enough.
Prompt = (
    str
    | Tokens
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    | Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
)
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]

# Names of fields that would change the answer and are not supported, and the values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}

# Of what may be of several types, pydantic would tell why it is none of them.
RULES = {
    "prompt": f"prompt must be a text, a list of 1 to {MOST_PROMPTS} texts, a list of tokens (integers from 0), "
    "or a list of such lists, none of which is empty",
    "stop": f"stop must be a text, or a list of up to {MOST_STOPS}, of 1 to {LONGEST_STOP} characters each",
    "messages": f"messages must be a list of 1 to {MOST_MESSAGES}, each with a role (system, developer, user, "
    'assistant) and a content: a text, or a list of {"type": "text", "text": ...}',
}


class StreamExtras(BaseModel):
    """Fields of a stream besides text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class Asked(BaseModel):
    """Common fields of completions and chats."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), le=LARGEST_SEED)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)] = []
    stream: bool = False
    stream_options: StreamExtras = StreamExtras()

    @property
    def tokens_asked(self) -> int | None:
        """The limit of tokens, if the request has one."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with how many tokens there were."""
        return self.stream_options.include_usage

    def sampling(self, max_tokens: int, choice: int, stop: tuple[str, ...] = ()) -> Sampling:
        """How the tokens of this choice of several are drawn; each of them has a seed of its own."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            seed=None if self.seed is None else (self.seed + choice) % (LARGEST_SEED + 1),
            stop=stops + stop,
        )


class CompletionRequest(Asked):
    """The body of /v1/completions."""

    prompt: Prompt
    echo: bool = False
    logprobs: Literal[0] | None = None


class TextPart(BaseModel):
    """A part of a message: text is all that there may be."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of one side."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Asked):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False

    @property
    def tokens_asked(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


A = TypeVar("A", bound=Asked)


def checked(kind: type[A], body: dict[str, Any]) -> A:
    """`body` as a request of this kind. Raises ApiError about the first field that is wrong."""
    for name, nothing in NOT_SUPPORTED.items():
        if name in body and body[name] not in nothing:
            allowed = " or ".join(map(repr, nothing))
            message = f"{name} is not supported: leave it away{f', or send {allowed}' if nothing else ''}"
            raise ApiError(400, message, name, "unsupported_parameter")
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Behind the field's name come numbers, and names of types that are tried: only numbers help a reader.
        field, *places = first["loc"]
        where = f"{field}{''.join(f'[{place}]' for place in places if isinstance(place, int))}"
        raise ApiError(400, RULES.get(str(field), f"{where}: {first['msg']}"), str(field)) from None
    return asked


# The body of a request, read with limits on its size and on how long it may take, before anything looks into it.

BODY_SECONDS = 30.0


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object that is the body. Members that are null are left out, as if they had not been sent.

    Raises:
        ApiError: it is no JSON, of another type, too long, too deep, or does not come.
    """
    kind = request.headers.get("content-type", "")
    if kind.split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"the content type is {quoted(kind)}, but must be application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"the body is encoded as {quoted(encoding)}: send it plain")
    value = _parsed(await _read(request, max_bytes))
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return {name: member for name, member in value.items() if member is not None}


async def _read(request: Request, max_bytes: int) -> bytes:
    too_long = ApiError(413, f"the body is longer than {max_bytes:,} bytes (--max-body)", None, "body_too_long")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:  # as chunks say no length beforehand
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended too early") from None
    return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        value = json.loads(body.decode(), parse_constant=_no_number)
        if b"\\ud" in body.lower():  # halves of surrogate pairs are no Unicode
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise ApiError(400, "the body is no Unicode: it has half of a surrogate pair") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


# Work for a client that may go away at any time: then it is given up, and what it held is freed.

R = TypeVar("R")


class ClientGone(Exception):
    """The client has closed its connection."""


async def while_present(receive: Receive, work: Coroutine[Any, Any, R]) -> R:
    """The result of `work`; it is cancelled if the client disconnects first. The request's body must have been read.

    Raises:
        ClientGone: it did.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, up to their end or that of the client's connection; then `close` is called."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_present(receive, self._send(send))
        except (ClientGone, OSError):
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


OPEN_PATHS = ("/health",)
PATHS = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")
DEFAULT_TOKENS = 16  # of a completion that does not say how many, as OpenAI's
NEXT_TURN = "\nuser:"  # a model without training on chats continues with the other side
ASK_FOR_TOKEN = {"WWW-Authenticate": "Bearer"}
CLIENT_GONE = 499  # nobody reads it: for the count


class Authentication:
    """The checks of every request: its Host, and the token, if one is required; each response is counted."""

    def __init__(self, app: ASGIApp, front: Admission, token: str | None, hosts: Collection[str]) -> None:
        self._app, self._front = app, front
        self._token = None if token is None else token.encode()
        self._hosts = KnownHosts(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, headers = scope["path"], dict(scope["headers"])

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._front.statistics.responded(path if path in PATHS else "other", message["status"])
            await send(message)

        stranger = self._hosts.stranger(scope["headers"])
        if stranger is not None:
            said = f"this server is not known as {quoted(stranger)}: --allowed-hosts adds names"
            await ApiError(421, said, None, "unknown_host").response()(scope, receive, counted)
        elif path in OPEN_PATHS or self._knows(headers.get(b"authorization", b"")):
            await self._app(scope, receive, counted)
        else:
            refusal = ApiError(401, "the token is missing or wrong", None, "invalid_api_key", ASK_FOR_TOKEN)
            await refusal.response()(scope, receive, counted)

    def _knows(self, authorization: bytes) -> bool:
        if self._token is None:
            return True
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def chat_prompt(messages: Sequence[ChatMessage]) -> str:
    """The prompt that a model continues as the assistant: "role: content" on a line for each message."""
    return "".join(f"{message.role}: {message.text}\n" for message in messages) + "assistant: "


def make_app(front: Admission, model: str, token: str | None = None, hosts: Collection[str] = ()) -> ASGIApp:
    """The application. `model`: the name that requests must ask for; `token`: what they must bear, if any; `hosts`:
    names of this server beside localhost and the machine's own, such as "*.example.org".
    """
    app = FastAPI(title="mpi4dl", docs_url=None, redoc_url=None, openapi_url=None)
    explain_errors(app)
    described = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "mpi4dl"}

    @app.get("/health")
    async def health() -> Response:
        if front.stopping:
            raise busy("the server is stopping", 503, "stopping")
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(front.statistics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [described]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        _must_be(name, model)
        return json_response(described)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        arrived = time.perf_counter()
        asked = checked(CompletionRequest, await read_object(request, front.limits.max_body_bytes))
        _must_be(asked.model, model)
        if asked.echo and asked.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported: the prompt's are not computed", "logprobs")
        prompts = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
        if isinstance(prompts[0], int):
            prompts = [prompts]
        front.check_room(len(prompts) * asked.n)
        tokens = await front.encode(prompts)
        echoes = [front.tokenizer.decode(each) if asked.echo else "" for each in tokens for _ in range(asked.n)]
        form = CompletionForm(model, front.tokenizer, echoes, asked.logprobs is not None)
        return await _answer(request, front, asked, tokens, form, arrived, DEFAULT_TOKENS)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        arrived = time.perf_counter()
        asked = checked(ChatRequest, await read_object(request, front.limits.max_body_bytes))
        _must_be(asked.model, model)
        front.check_room(asked.n)
        tokens = await front.encode([chat_prompt(asked.messages)])
        form = ChatForm(model, front.tokenizer, [""] * asked.n, asked.logprobs)
        return await _answer(request, front, asked, tokens, form, arrived, None, (NEXT_TURN,))

    return Authentication(app, front, token, hosts)


def _must_be(name: str, model: str) -> None:
    if name != model:
        raise ApiError(404, f"there is no model {quoted(name)}: this is {model}", "model", "model_not_found")


async def _answer(
    request: Request,
    front: Admission,
    asked: Asked,
    prompts: Sequence[list[int]],
    form: CompletionForm,
    arrived: float,
    default_tokens: int | None,
    stop: tuple[str, ...] = (),
) -> Response:
    """Generate what was asked for, `asked.n` choices for each prompt, whole or streamed."""
    lengths = [_tokens_for(front, asked, len(prompt), default_tokens) for prompt in prompts]
    wanted = [
        (prompt, asked.sampling(length, choice, stop))
        for prompt, length in zip(prompts, lengths, strict=True)
        for choice in range(asked.n)
    ]
    reply = front.start(wanted, arrived)
    if asked.stream:
        return EventStream(streamed_answer(reply, form, asked.n, asked.wants_usage), reply.close)
    try:
        return json_response(await while_present(request.receive, whole_answer(reply, form, asked.n)))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        reply.close()


def _tokens_for(front: Admission, asked: Asked, prompt_tokens: int, default: int | None) -> int:
    """How many tokens at most to generate after a prompt of so many. Raises ApiError if there is no room for them."""
    limits, wanted = front.limits, asked.tokens_asked
    most = limits.context if limits.max_tokens is None else limits.max_tokens
    if wanted is not None and wanted > most:
        raise ApiError(400, f"max_tokens is {wanted}, but may be {most} at most", "max_tokens")
    room = limits.context - prompt_tokens
    if room < (wanted or 1):
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens, and {wanted or 1} more are asked for, but the context of this "
            f"model is {limits.context} tokens: shorten the prompt{' or max_tokens' if wanted else ''}",
            "prompt",
            "context_length_exceeded",
        )
    return min(room, most, wanted or default or most)
