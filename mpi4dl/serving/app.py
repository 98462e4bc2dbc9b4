"""The routes: completions, chats, models, health and metrics."""

import hmac
import socket
import time
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpi4dl.serving.answers import ChatForm, CompletionForm, streamed_answer, whole_answer
from mpi4dl.serving.errors import ApiError, busy, explain_errors, json_response, quoted
from mpi4dl.serving.front import Front
from mpi4dl.serving.presence import ClientGone, EventStream, while_present
from mpi4dl.serving.reading import read_object
from mpi4dl.serving.schemas import Asked, ChatMessage, ChatRequest, CompletionRequest, checked

OPEN_PATHS = ("/health",)
PATHS = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")
DEFAULT_TOKENS = 16  # of a completion that does not say how many, as OpenAI's
NEXT_TURN = "\nuser:"  # a model that was never taught to chat goes on with the other side
ASK_FOR_TOKEN = {"WWW-Authenticate": "Bearer"}
CLIENT_GONE = 499  # nobody reads it: for the count


class Door:
    """What every request passes: its Host, and the token, if one is asked for; each response is counted.

    A page of any site can let a browser ask this server, once the site's name leads to this machine (DNS rebinding).
    Such a request has that name as its Host. So names are answered that are known; addresses need none.
    """

    def __init__(self, app: ASGIApp, front: Front, token: str | None, hosts: Collection[str]) -> None:
        self._app, self._front = app, front
        self._token = None if token is None else token.encode()
        here = socket.gethostname().lower()
        self._hosts = ("localhost", here, here.partition(".")[0], *(host.lower() for host in hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, headers = scope["path"], dict(scope["headers"])

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._front.statistics.responded(path if path in PATHS else "other", message["status"])
            await send(message)

        host = host_of(headers.get(b"host", b"").decode("latin-1"))
        if host and not self._is_known(host):
            said = f"this server is not known as {quoted(host)}: --allowed-hosts adds names"
            await ApiError(421, said, None, "unknown_host").response()(scope, receive, counted)
        elif path in OPEN_PATHS or self._knows(headers.get(b"authorization", b"")):
            await self._app(scope, receive, counted)
        else:
            refusal = ApiError(401, "the token is missing or wrong", None, "invalid_api_key", ASK_FOR_TOKEN)
            await refusal.response()(scope, receive, counted)

    def _is_known(self, host: str) -> bool:
        try:
            ip_address(host.partition("%")[0])
        except ValueError:
            return any(fnmatchcase(host, known) for known in self._hosts)
        return True

    def _knows(self, authorization: bytes) -> bool:
        if self._token is None:
            return True
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def host_of(header: str) -> str:
    """The name or address in a Host header, without its port."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def chat_prompt(messages: Sequence[ChatMessage]) -> str:
    """The text that a model goes on with as the assistant: "role: content" on a line for each message."""
    return "".join(f"{message.role}: {message.text}\n" for message in messages) + "assistant: "


def make_app(front: Front, model: str, token: str | None = None, hosts: Collection[str] = ()) -> ASGIApp:
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

    return Door(app, front, token, hosts)


def _must_be(name: str, model: str) -> None:
    if name != model:
        raise ApiError(404, f"there is no model {quoted(name)}: this is {model}", "model", "model_not_found")


async def _answer(
    request: Request,
    front: Front,
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


def _tokens_for(front: Front, asked: Asked, prompt_tokens: int, default: int | None) -> int:
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
