"""What is refused, in words, and in the form in which OpenAI's clients expect it."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

RETRY_SECONDS = 1

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that gets no answer but `message`, with an HTTP status; `param` names the field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """{"error": ...} as OpenAI's clients read it."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def busy(message: str, status: int = 429, code: str | None = "queue_full") -> ApiError:
    """What may be asked again soon."""
    return ApiError(status, message, None, code, {"Retry-After": str(RETRY_SECONDS)})


def as_json(value: object) -> bytes:
    """In ASCII: what is quoted of a request may not even be Unicode."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, media_type="application/json")


def quoted(text: str, most: int = 80) -> str:
    """Text of a request, for an error about it, of bounded length."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def explain_errors(app: FastAPI) -> None:
    """Let all errors of `app` have this form, its own and those of routing."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> Response:
        asked = f"{request.method[:20]} {quoted(request.url.path)}"
        said = {
            404: (f"there is no {asked}: see /v1/models, /v1/completions, /v1/chat/completions", "unknown_url"),
            405: (f"{asked} is not possible: the method is wrong", "method_not_allowed"),
        }
        message, code = said.get(error.status_code, (str(error.detail), None))
        return ApiError(error.status_code, message, None, code, error.headers).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server failed; its log says why", None, "internal_error").response()
