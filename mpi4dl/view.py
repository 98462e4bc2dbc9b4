"""Slides with their predictions and maps in a browser: `mpi4dl view predicted` needs no MPI.

It serves a page to this machine: a list of slides, deep zoom, maps over slides, annotations. It works offline.
"""

import asyncio
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mpi4dl._wording import counted, to_install
from mpi4dl.inference.options import LabelledColumns
from mpi4dl.options.command import CommandLine, LocalCommand
from mpi4dl.options.config import Slides
from mpi4dl.options.declare import like, option
from mpi4dl.options.kinds import NAME, PORT, optional
from mpi4dl.options.sections.address import Address

USAGE = "FOLDER [--FLAG VALUE ...]"
DESCRIPTION = "Show slides with their predictions and maps in a browser. No MPI needed."


@dataclass(frozen=True)
class Viewing:
    """The slides, if they have moved, and the address of the page."""

    slides: str | None = option(None, "the table or folder of slides; none: as predict had it", optional(NAME))
    slides_folder: str | None = like(Slides, "slides_folder")
    assume_mpp: float | None = like(Slides, "assume_mpp")
    host: str = like(Address, "host")
    port: int = option(8080, "port to listen on; 0: any free port, which is printed", PORT)
    allowed_hosts: tuple[str, ...] | None = like(Address, "allowed_hosts")


@dataclass(frozen=True)
class ViewConfig:
    viewing: Viewing = field(default_factory=Viewing)
    columns: LabelledColumns = field(default_factory=LabelledColumns)


def view(asked: CommandLine[ViewConfig], folder: Path) -> None:
    """Serve the predictions in a folder until a signal. Raises ValueError and OSError."""
    options, columns = asked.config.viewing, asked.config.columns
    try:
        from mpi4dl._http import Limits, bind, is_loopback, url_of
        from mpi4dl.viewer.app import make_app, server_of
    except ImportError as error:
        needed = to_install("starlette", "uvicorn")
        raise ValueError(f"the viewer needs packages that are not installed ({error}); run {needed}") from None
    from mpi4dl.options.sources import named_columns
    from mpi4dl.viewer.results import read_results

    table, slides_folder = (None if each is None else Path(each) for each in (options.slides, options.slides_folder))
    named = named_columns(columns), columns.label_columns
    results = read_results(folder, table, slides_folder, options.assume_mpp, *named)
    app = make_app(results, (options.host, *(options.allowed_hosts or ())))
    if not is_loopback(options.host):
        print(f"mpi4dl: everybody who reaches {options.host} can see these slides", file=sys.stderr)
    with bind(options.host, options.port) as listener:
        for remark in results.remarks:
            print(asked.spell(remark))
        for number in (signal.SIGINT, signal.SIGTERM):  # also as uvicorn raises them again when it has stopped
            signal.signal(number, lambda *_: sys.exit(0))
        listener.listen()  # so that a browser may ask as soon as it knows the address
        print(f"{counted(len(results.slides), 'slide')} of {folder} at {url_of(listener)}", flush=True)
        asyncio.run(server_of(app, Limits()).serve([listener]))


main = LocalCommand("view", view, ViewConfig, USAGE, DESCRIPTION).main

if __name__ == "__main__":
    main()
