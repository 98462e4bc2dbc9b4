"""A page of one or several runs: `mpi4dl report runs/a runs/b --out report.html` needs no MPI.

It is one file without scripts or network access: you can mail it, and read it on a phone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpi4dl.options.command import CommandLine, LocalCommand
from mpi4dl.options.declare import option
from mpi4dl.options.kinds import NAME, optional

USAGE = "RUN ... [--out FILE] [--images FOLDER]"
DESCRIPTION = "Write an HTML page of runs or folds: options, curves, metrics, images, speed and memory. No MPI needed."


@dataclass(frozen=True)
class Page:
    """The file of the page, and the images that it shows."""

    out: str = option("report.html", "the HTML file that is written", NAME)
    images: str | None = option(
        None,
        "folder of the images that the page shows; none: looks below the current folder and beside the runs",
        optional(NAME),
    )


@dataclass(frozen=True)
class ReportConfig:
    page: Page = field(default_factory=Page)


def report(runs: Sequence[Path], out: Path, images: Path | None = None) -> list[str]:
    """Write the page of these runs. Returns what there is to say. Raises ValueError for what is no run, and OSError."""
    from mpi4dl.reports import write

    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; make it first")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file in it, such as {out / 'report.html'}")
    if images is not None and not images.is_dir():
        raise ValueError(f"--images {images}: no such folder; name the one that the names of images begin in")
    return write(runs, out, images)


def _report(asked: CommandLine[ReportConfig], *runs: Path) -> None:
    page = asked.config.page
    for line in report(runs, Path(page.out), None if page.images is None else Path(page.images)):
        print(line)


main = LocalCommand("report", _report, ReportConfig, USAGE, DESCRIPTION).main

if __name__ == "__main__":
    main()
