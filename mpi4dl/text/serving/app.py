"""The HTTP application: routes, the fields of requests, answers whole or streamed."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mpi4dl._http import Guard
from mpi4dl.datasets.text.tokenizer import Tokenizer
from mpi4dl.options.kinds import MOST_SEED
from mpi4dl.text.batcher import Event, Usage
from mpi4dl.text.options import Sampling
from mpi4dl.text.serving.admission import Admission, ApiError, Reply, stopping

# Requests: the fields of OpenAI's requests that have an effect here, with their types and ranges.
#
# Fields that are not named here are ignored, as by other servers that speak this protocol, except for those that would
# change the answer: they are refused in words.

MOST_STOPS, LONGEST_STOP, MOST_CHOICES, MOST_PROMPTS, MOST_MESSAGES = 4, 256, 128, 1024, 4096

# One error for a list of a hundred thousand wrong members is enough.
Count = Annotated[int, Field(ge=1, lt=2**31)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, min_length=1)]
Several = Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)
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


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamExtras(Strict):
    include_usage: bool = False


class Asked(Strict):
    """Common fields of completions and chats. Fields that are null are left out, as if they had not been sent."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), le=MOST_SEED)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)] = []
    stream: bool = False
    stream_options: StreamExtras = StreamExtras()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = {name: value for name, value in body.items() if value is not None}
        for name, nothing in NOT_SUPPORTED.items():
            if name in fields and fields[name] not in nothing:
                remedy = "".join(f", or send {value!r}" for value in nothing)
                raise ApiError(400, f"{name} is not supported: leave it away{remedy}", name, "unsupported_parameter")
        return fields

    def sampling(self, max_tokens: int, choice: int, stop: tuple[str, ...]) -> Sampling:
        """How the tokens of this choice of several are drawn; each of them has a seed of its own."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        seed = None if self.seed is None else (self.seed + choice) % (MOST_SEED + 1)
        drawn = self.temperature, self.top_k, self.top_p, self.repetition_penalty
        return Sampling(max_tokens, *drawn, seed, stops + stop)


class CompletionRequest(Asked):
    """The body of /v1/completions."""

    chat: ClassVar = False
    default_tokens: ClassVar = 16  # as OpenAI's
    own_stops: ClassVar = ()
    prompt: str | Tokens | Annotated[list[str], Several] | Annotated[list[Tokens], Several]
    echo: bool = False
    logprobs: Literal[0] | None = None

    @property
    def prompts(self) -> list[Any]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def line(self) -> str:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return f"{self.role}: {''.join(parts)}\n"


class ChatRequest(Asked):
    """The body of /v1/chat/completions."""

    chat: ClassVar = True
    default_tokens: ClassVar = None
    own_stops: ClassVar = ("\nuser:",)  # a model without training on chats continues with the other side
    echo: ClassVar = False
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Count | None = Field(None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: bool = False

    @property
    def prompts(self) -> list[Any]:
        """The text that a model continues as the assistant: "role: content" on a line for each message."""
        return ["".join(message.line for message in self.messages) + "assistant: "]


AnyRequest = CompletionRequest | ChatRequest


async def read(request: Request, kind: type[AnyRequest], model: str) -> AnyRequest:
    """The body as a request of this kind to this model. Raises ApiError about the first thing that is wrong."""
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "the content type must be application/json, without a content encoding")
    try:
        asked = kind.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if not first["loc"]:
            raise ApiError(400, f"the body: {first['msg']}") from None
        # Behind the field's name come numbers, and names of types that are tried: only numbers help a reader.
        name, *places = first["loc"]
        where = f"{name}{''.join(f'[{place}]' for place in places if isinstance(place, int))}"
        raise ApiError(400, RULES.get(str(name), f"{where}: {first['msg']}"), str(name)) from None
    check_model(asked.model, model)
    return asked


def check_model(name: str, model: str) -> None:
    if name != model:
        raise ApiError(404, f"there is no model {name[:80]!r}: this is {model}", "model", "model_not_found")


# Answers in the form of OpenAI's, whole or in chunks as they come.


@dataclass(frozen=True)
class Form:
    """The shape of the answers of completions, or of chats. `echoes`: what each text begins with.

    `tells_usage`: whether a stream ends with the number of tokens.
    """

    chat: bool
    model: str
    tokenizer: Tokenizer
    echoes: Sequence[str]
    logprobs: bool
    per_prompt: int
    tells_usage: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """An answer, or a chunk of one."""
        prefix, name = ("chatcmpl", f"chat.completion{kind}") if self.chat else ("cmpl", "text_completion")
        head = {"id": f"{prefix}-{self.id}", "created": self.created, "model": self.model}
        return {**head, "object": name, "choices": choices}

    def choice(self, index: int, events: Sequence[Event], before: str = "", whole: bool = False) -> dict[str, Any]:
        """A text, the whole of it or a piece; a piece without events is the beginning."""
        text = before + "".join(event.text for event in events)
        said: dict[str, Any] = {"text": text}
        if self.chat and whole:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        elif self.chat:
            role = {} if events else {"role": "assistant"}
            said = {"delta": {**role, "content": text} if text or role else {}}
        reason = events[-1].finish_reason if events else None
        scores = self._scores(events) if self.logprobs else None
        return {"index": index, **said, "logprobs": scores, "finish_reason": reason}

    def _scores(self, events: Sequence[Event]) -> dict[str, Any]:
        tokens = [(self.tokenizer.decode([event.token]), event.logprob) for event in events if event.token is not None]
        if self.chat:
            content = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in tokens
            ]
            return {"content": content, "refusal": None}
        texts, logprobs = [text for text, _ in tokens], [logprob for _, logprob in tokens]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": []}

    def usage(self, ends: dict[int, Event]) -> dict[str, int]:
        """Tokens of all texts, by their last events; a prompt counts once, however many choices it has."""
        usages = [ends[index].usage or Usage(0, 0) for index in sorted(ends)]
        prompt = sum(each.prompt_tokens for each in usages[:: self.per_prompt])
        completion = sum(each.completion_tokens for each in usages)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def events_of(reply: Reply, num_texts: int) -> AsyncGenerator[tuple[int, Event], None]:
    """All events of a reply. Raises ApiError if one says that a text failed."""
    while num_texts:
        index, event = await reply.events.get()
        if event.finish_reason == "cancelled":
            raise stopping("the server is stopping, and this request took too long for that")
        if event.finish_reason == "error":
            raise ApiError(500, f"this request failed: {event.message}", None, "generation_failed")
        num_texts -= event.finish_reason is not None
        yield index, event


async def whole_answer(reply: Reply, form: Form) -> dict[str, Any]:
    """The answer when all texts are over. Raises ApiError if one fails."""
    found: list[list[Event]] = [[] for _ in form.echoes]
    async for index, event in events_of(reply, len(found)):
        found[index].append(event)
    choices = [form.choice(index, events, form.echoes[index], whole=True) for index, events in enumerate(found)]
    return {**form.body("", choices), "usage": form.usage({index: each[-1] for index, each in enumerate(found)})}


async def streamed_answer(reply: Reply, form: Form) -> AsyncGenerator[bytes, None]:
    """Server-sent events as the answer grows: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

    def sent(value: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"

    def chunk(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        return sent(form.body(".chunk", choices) | ({"usage": usage} if form.tells_usage else {}))

    ends = {}
    for index, echo in enumerate(form.echoes):
        if echo or form.chat:
            yield chunk([form.choice(index, [], echo)])
    try:
        async for index, event in events_of(reply, len(form.echoes)):
            if event.text or event.finish_reason or form.logprobs:
                yield chunk([form.choice(index, [event])])
            if event.finish_reason:
                ends[index] = event
    except ApiError as error:
        yield sent(error.body)
        return
    if form.tells_usage:
        yield chunk([], form.usage(ends))
    yield b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Server-sent events, up to their end or that of the client's connection; then `close` is called."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


R = TypeVar("R")


async def while_present(receive: Receive, work: Coroutine[Any, Any, R]) -> R:
    """The result of `work`, for a request whose body was read. If the client goes away first, it is cancelled.

    Raises:
        ClientDisconnect: the client has gone.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


CLIENT_GONE = 499  # nobody reads it: for the count
PATHS = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")


def api_error(status: int, message: str) -> Response:
    return ApiError(status, message).response()


class Api:
    """The answers of each route. `model`: the name that requests must ask for."""

    def __init__(self, front: Admission, model: str) -> None:
        self._front, self._model = front, model
        self._described = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "mpi4dl"}

    async def health(self, request: Request) -> Response:
        if self._front.stopping:
            raise stopping()
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._front.statistics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described]})

    async def one_model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._model)
        return JSONResponse(self._described)

    async def generate(self, kind: type[AnyRequest], request: Request) -> Response:
        """What was asked for, `asked.n` texts for each prompt, whole or streamed."""
        front, asked = self._front, await read(request, kind, self._model)
        if asked.chat and front.tokenizer.has_chats:
            raise ApiError(
                400,
                "this model was trained on chats in the form of its chat template, which the server does not apply: "
                "send the tokens that apply_chat_template of transformers makes to /v1/completions, as `prompt`",
                "messages",
                "chat_template",
            )
        arrived, scored = time.perf_counter(), asked.logprobs is not None and asked.logprobs is not False
        if asked.echo and scored:
            raise ApiError(400, "echo with logprobs is not supported: the prompt's are not computed", "logprobs")
        front.check_room(len(asked.prompts) * asked.n)
        wanted, echoes = [], []
        for given, prompt in zip(asked.prompts, await front.encode(asked.prompts), strict=True):
            length = front.room_for(len(prompt), asked.max_tokens, asked.default_tokens)
            wanted += [(prompt, asked.sampling(length, choice, asked.own_stops)) for choice in range(asked.n)]
            text = given if isinstance(given, str) else front.tokenizer.decode(given)
            echoes += [text if asked.echo else ""] * asked.n
        usage = asked.stream_options.include_usage
        form = Form(asked.chat, self._model, front.tokenizer, echoes, scored, asked.n, usage)
        reply = front.start(wanted, arrived)
        if asked.stream:
            return EventStream(streamed_answer(reply, form), lambda: front.close(reply))
        try:
            return JSONResponse(await while_present(request.receive, whole_answer(reply, form)))
        finally:
            front.close(reply)


def make_app(front: Admission, model: str, max_body: int, token: str | None, hosts: Collection[str]) -> ASGIApp:
    """The application. `token`: what requests must bear, if any; `hosts`: names of this server, such as
    "*.example.org", beside localhost and the machine's own.
    """

    def check(scope: Scope) -> Response | None:
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        right = scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), (token or "").encode())
        if token is None or right or scope["path"] == "/health":
            return None
        return ApiError(401, "the token is missing or wrong", None, "invalid_api_key").response()

    async def explain(request: Request, error: Exception) -> Response:
        """The answer that tells of an error of the application, or of routing."""
        if isinstance(error, ApiError):
            return error.response()
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        asked = f"{request.method[:20]} {request.url.path[:80]!r}"
        said = {
            404: (f"there is no {asked}: see /v1/models, /v1/completions, /v1/chat/completions", "unknown_url"),
            405: (f"{asked} is not possible: the method is wrong", "method_not_allowed"),
            413: (f"the body is longer than {max_body:,} bytes", None),
            500: ("the server failed; its log says why", "internal_error"),
        }
        status = getattr(error, "status_code", 500)
        return ApiError(status, said[status][0], None, said[status][1]).response()

    def seen(path: str, status: int) -> None:
        front.statistics.responded(path if path in PATHS else "other", status)

    api = Api(front, model)
    routes = [
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.one_model),
        Route("/v1/completions", partial(api.generate, CompletionRequest), methods=["POST"]),
        Route("/v1/chat/completions", partial(api.generate, ChatRequest), methods=["POST"]),
    ]
    handlers = dict.fromkeys((HTTPException, ClientDisconnect, Exception), explain)
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(app, api_error, hosts, max_body, check, seen=seen)
