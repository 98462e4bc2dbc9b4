"""The body of a request, read with limits on its size and on how long it may take, before anything looks into it."""

import asyncio
import json
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from mpi4dl.serving.errors import ApiError, quoted

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
