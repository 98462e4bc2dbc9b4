"""A page of one or several runs: `mpi4dl report runs/a runs/b --out report.html` needs no MPI.

It is one file without scripts or network access: you can mail it, and read it on a phone.
"""

from collections.abc import Sequence
from pathlib import Path

from mpi4dl._commands import one_message, typed
from mpi4dl.options.declare import CommandParser

DESCRIPTION = "Write an HTML page of runs: options, curves, metrics, images, speed and memory. No MPI needed."


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page that the command line `argv` asks for; whatever is wrong with it ends in one message."""
    with one_message():
        command(argv)


def command(argv: Sequence[str] | None) -> None:
    """Write the page that a command line asks for. Raises ValueError and OSError."""
    parser = CommandParser(prog=typed("report"), description=DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="a run's folder; several are shown together")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("report.html"), help="default: %(default)s")
    where = "where pictures of images are, if not below the current folder or beside the runs"
    parser.add_argument("--images", metavar="FOLDER", type=Path, help=where)
    options = parser.parse_args(argv)
    for line in report(options.runs, options.out, options.images):
        print(line)


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


if __name__ == "__main__":
    main()
