"""The HTTP application of the viewer: files of the page, and slides by their number. It answers GET alone.

/                                         the page
/static/NAME                              its files, of the names in STATIC
/api/slides                               all slides with predictions
/api/slides/N                             the size and resolution of a slide
/api/slides/N/thumbnail
/api/slides/N/tiles/LEVEL/COL_ROW.jpg     or .png, which is exact
/api/slides/N/map                         the grid of patches with values
/api/slides/N/annotations                 polygons, and those of predicted classes:
/api/slides/N/classes

No name or path of a request reaches the file system: slides have numbers, and files of the page are listed.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from mpi4dl._http import Guard, HttpServer, Limits
from mpi4dl._palette import CURVES, LOADS
from mpi4dl.datasets.base import DatasetError, printable
from mpi4dl.viewer.reading import FORMATS, Missing, SlideReader, as_json
from mpi4dl.viewer.results import SlideResults

MOST_THREADS = 4
CLIENT_GONE = 499
LONGEST_PATH = 200
JSON = "application/json"
TOLD = ("patient", "label", "prediction", "probability", "loss", "wrong", "error")  # of each slide
PAGE = "page.html"
STATIC = {
    PAGE: "text/html; charset=utf-8",
    "viewer.css": "text/css; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "openseadragon.min.js": "text/javascript; charset=utf-8",
    "openseadragon.LICENSE.txt": "text/plain; charset=utf-8",
}
STYLE = "sha256-9xTiqzfwFaL2SGb1rmr8gysEwVVjIvqWAgmZgqFqpEE="  # that OpenSeadragon 6.1.1 adds to the page
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'self'; style-src 'self' '{STYLE}'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",  # pictures of patients
}


def _error(status: int, message: str) -> Response:
    return Response(as_json({"error": message}), status, media_type=JSON)


def _refusal(scope: Scope) -> Response | None:
    """The answer to a request that no page can answer."""
    if len(scope["path"]) > LONGEST_PATH:
        return _error(404, "there is no such page")
    if scope["method"] != "GET":
        return _error(405, f"{printable(scope['method'])[:20]} is not answered, but GET")
    return None


def server_of(app: ASGIApp, limits: Limits) -> HttpServer:
    """A server of the application, which ends by a signal."""
    return HttpServer(app, _error, limits, last_words_seconds=1)


def make_app(results: SlideResults, hosts: Collection[str] = ()) -> ASGIApp:
    """The application. `hosts`: names of this machine beside localhost and its own, such as "*.example.org"."""
    reader = SlideReader(results.slides)
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))
    pool, room = ThreadPoolExecutor(threads, "slides"), asyncio.Semaphore(threads)
    thumbnails = asyncio.Semaphore(max(1, threads - 1))  # of a long list, which leave room for tiles
    contents = {name: files(__package__).joinpath("static", name).read_bytes() for name in STATIC}
    listed = as_json(_listing(results, reader.made))

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", PAGE)
        if name not in contents:
            return _error(404, "there is no such page")
        return Response(contents[name], media_type=STATIC[name])

    async def slides(request: Request) -> Response:
        return Response(listed, media_type=JSON)

    async def reading(media_type: str, read: Callable[..., bytes], request: Request, *arguments: Any) -> Response:
        """What a thread reads, unless the client has gone by the time that its turn comes."""
        async with room:
            if await request.is_disconnected():
                return Response(status_code=CLIENT_GONE)
            try:
                found = await asyncio.get_running_loop().run_in_executor(
                    pool, read, request.path_params["number"], *arguments
                )
            except Missing as error:
                return _error(404, str(error))
            except DatasetError as error:
                return _error(422, printable(str(error)))
        return Response(found, media_type=media_type)

    async def thumbnail(request: Request) -> Response:
        async with thumbnails:
            return await reading(FORMATS["jpg"], reader.thumbnail, request)

    async def tile(request: Request) -> Response:
        found = request.path_params
        if found["form"] not in FORMATS:
            return _error(404, "tiles are jpg or png")
        where = found["level"], found["row"], found["col"], found["form"]
        return await reading(FORMATS[found["form"]], reader.tile, request, *where)

    of_slide = "/api/slides/{number:int}"
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", page),
            Route("/api/slides", slides),
            Route(of_slide, partial(reading, JSON, lambda number: as_json(reader.facts(number)))),
            Route(f"{of_slide}/thumbnail", thumbnail),
            Route(f"{of_slide}/tiles/{{level:int}}/{{col:int}}_{{row:int}}.{{form}}", tile),
            Route(f"{of_slide}/map", partial(reading, JSON, reader.map)),
            Route(f"{of_slide}/annotations", partial(reading, JSON, partial(reader.regions, "annotation"))),
            Route(f"{of_slide}/classes", partial(reading, JSON, partial(reader.regions, "classes"))),
        ]
    )
    return Guard(app, _error, hosts, 0, _refusal, HEADERS)


def _listing(results: SlideResults, made: Mapping[int, int]) -> dict[str, Any]:
    slides = [
        {name: getattr(slide, name) for name in TOLD}
        | {"name": printable(slide.name), "made": made.get(number)}
        | {"map": slide.map is not None, "annotations": slide.annotation is not None}
        | {"classes": slide.classes is not None}
        for number, slide in enumerate(results.slides)
    ]
    return {"title": results.title, "remarks": results.remarks, "colours": LOADS, "kinds": CURVES, "slides": slides}
