"""Slides with their predictions and maps in a browser: `mpi4dl view predicted` needs no MPI.

It serves a page to this machine: a list of slides, deep zoom, maps over slides, annotations. It works offline.
"""

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mpi4dl._commands import one_message, typed
from mpi4dl._wording import counted, to_install
from mpi4dl.options.declare import CommandParser

DESCRIPTION = "Show slides with their predictions and maps in a browser. No MPI needed."


def main(argv: Sequence[str] | None = None) -> None:
    """Serve what the command line `argv` asks for; whatever is wrong with it ends in one message."""
    with one_message():
        command(argv)


def command(argv: Sequence[str] | None) -> None:
    """Serve what a command line asks for, until a signal. Raises ValueError and OSError."""
    options = _parser().parse_args(argv)
    try:
        from mpi4dl._http import Limits, bind, is_loopback, url_of
        from mpi4dl.viewer.app import make_app, server_of
    except ImportError as error:
        needed = to_install("starlette", "uvicorn")
        raise ValueError(f"the viewer needs packages that are not installed ({error}); run {needed}") from None
    from mpi4dl.viewer.results import read_results

    results = read_results(options.folder, options.slides, options.slides_folder, options.assume_mpp)
    app = make_app(results, (options.host, *options.allowed_hosts.split(",")))
    if not is_loopback(options.host):
        print(f"mpi4dl: everybody who reaches {options.host} can see these slides", file=sys.stderr)
    try:
        listener = bind(options.host, options.port)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(
            f"cannot listen on {options.host}:{options.port}: {why}: choose another --port, or 0"
        ) from None
    with listener:
        for remark in results.remarks:
            print(remark)
        for number in (signal.SIGINT, signal.SIGTERM):  # also as uvicorn raises them again when it has stopped
            signal.signal(number, lambda *_: sys.exit(0))
        listener.listen()  # so that a browser may ask as soon as it knows the address
        print(f"{counted(len(results.slides), 'slide')} of {options.folder} at {url_of(listener)}", flush=True)
        asyncio.run(server_of(app, Limits()).serve([listener]))


def _parser() -> CommandParser:
    parser = CommandParser(prog=typed("view"), description=DESCRIPTION)
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="what predict or evaluate wrote by --out, or the folder of a run"
    )
    parser.add_argument("--slides", metavar="TABLE", type=Path, help="the table or folder of slides, if it has moved")
    parser.add_argument(
        "--slides-folder", metavar="FOLDER", type=Path, help="the folder of the slides, if it has moved"
    )
    parser.add_argument(
        "--assume-mpp", metavar="UM", type=_mpp, help="microns per pixel of level 0 of slides that do not say it"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, for this machine only")
    parser.add_argument("--port", type=_port, default=8080, help="default: %(default)s; 0: any free port")
    parser.add_argument("--allowed-hosts", metavar="NAMES", default="", help="host names that browsers may use")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")
    return int(text)


def _mpp(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of microns per pixel")
    return found


if __name__ == "__main__":
    main()
