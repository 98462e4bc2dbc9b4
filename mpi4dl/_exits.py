"""How a command ends that runs without MPI: with one message, and in silence if nobody reads its output any more."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two as shells count Ctrl-C and a reader that left


@contextlib.contextmanager
def one_message(spell: Callable[[str], str] = str) -> Iterator[None]:
    """Run a command in here. A ValueError or OSError becomes one line, put into words by `spell`, and exit code 2.

    A reader that closes the pipe early, such as `head`, ends the command without a message. `sys.exit` would let the
    guard of an MPI job speak, but nothing that runs in here has started MPI.
    """
    try:
        try:
            yield
        finally:  # also where argparse leaves after printing its help
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (ValueError, OSError) as problem:
        if isinstance(problem, BrokenPipeError) and problem.filename is None:
            _let_go_of_stdout()
            raise SystemExit(BROKEN_PIPE) from None
        print(f"mpi4dl: {spell(str(problem))}", file=sys.stderr)
        raise SystemExit(USER_ERROR) from None


def _let_go_of_stdout() -> None:
    """Send the rest of the output nowhere, so that Python does not complain when it flushes at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
