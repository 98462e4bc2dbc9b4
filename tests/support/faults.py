"""A command of mpi4dl in which rank 1 fails alone, right at one of its calls of other ranks; or which lists them.

python -m tests.support.faults list FILE COMMAND FLAGS     rank 1 writes where it calls other ranks, a place a line
python -m tests.support.faults FAULT PLACE COMMAND FLAGS   rank 1 fails when it first comes to this place
"""

import contextlib
import importlib
import inspect
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpi4dl.comm import Communicator, Refusal, failure

# Methods of a communicator that ask no other rank, or that are given what does.
ALONE = ("by_host", "together", "mpi_library", "blocks", "nodes")
CALLS = tuple(
    name
    for name, method in inspect.getmembers(Communicator, inspect.isfunction)
    if not name.startswith("_") and name not in ALONE
)
LUCK = "no such luck"
ANOTHER = "has another value"  # in an agreement, which must notice
NOT_REACHED = "came not to this place"  # some calls are only made where a message is still under way


def leave() -> None:
    raise SystemExit(0)


def failing(kind: type[Exception]) -> Callable[[], None]:
    def fail() -> None:
        raise kind(LUCK)

    return fail


FAULTS = {
    "raises": failing(RuntimeError),
    "has no memory": failing(MemoryError),
    "refuses": failing(Refusal),
    "finds a bad value": failing(ValueError),
    "returns early": leave,
}


class Places:
    """Stands at all calls of other ranks; `at(place)` is called with each that is not made by another of them."""

    def __init__(self, at: Callable[[str], None]) -> None:
        self._at, self._within = at, False
        self.alters = False  # the next agreement that has facts

    def stand(self) -> None:
        for name in CALLS:
            setattr(Communicator, name, self._watched(getattr(Communicator, name), name))
        Communicator.together = self._together(Communicator.together)  # type: ignore[method-assign]

    def _come(self, comm: Communicator, name: str) -> None:
        if comm.size > 1 and not self._within:
            self._at(f"{_caller()} {name}")

    def _watched(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(comm: Communicator, *arguments: Any, **options: Any) -> Any:
            self._come(comm, name)
            if self.alters and name == "agree" and options:
                self.alters, options = False, {**options, next(iter(options)): LUCK}
            outer, self._within = self._within, True
            try:
                return call(comm, *arguments, **options)
            finally:
                self._within = outer

        return watched

    def _together(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def together(comm: Communicator, *arguments: Any) -> Iterator[None]:
            with call(comm, *arguments):
                self._come(comm, "together")
                yield

        return together


def _caller() -> str:
    """The file and line in mpi4dl, outside of comm, that the present call comes from."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if "mpi4dl" in path.parts and "comm" not in path.parts:
            return f"{path.relative_to(Path(__file__).parents[2])}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def main(how: str, place: str, command: str, *flags: str) -> None:
    found: dict[str, None] = {}

    def rank() -> int:
        opened = failure.met()
        return 0 if opened is None else opened.rank

    def note(where: str) -> None:
        found[where] = None

    def fail(where: str) -> None:
        if where == place and rank() == 1 and not found:
            note(where)
            if how == ANOTHER:
                places.alters = True
            else:
                FAULTS[how]()

    os.environ["XDG_CACHE_HOME"] = os.devnull  # what is measured is not remembered, so that all jobs measure
    places = Places(note if how == "list" else fail)
    places.stand()
    sys.argv = [command, *flags]
    try:
        importlib.import_module(f"mpi4dl.{command}").main()
    finally:
        if how == "list" and rank() == 1:
            Path(place).write_text("\n".join(found))
        if how != "list" and rank() == 1 and (not found or places.alters):
            print(NOT_REACHED, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file may become longer: writing beyond fails as it does on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
