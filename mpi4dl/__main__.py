"""The command `mpi4dl`, which runs all others: `mpirun -n 4 mpi4dl train --tiles 2x2`, or `python -m mpi4dl train`."""

import importlib
import sys
from collections.abc import Sequence

from mpi4dl._commands import REMOVED, USER_ERROR, command_names, front_door, is_first, one_message, run_command
from mpi4dl._wording import aligned

HELP = ("help", "-h", "--help")
SIMILAR = 0.6  # of 1 for equal names


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first word names. Without one, list all commands."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) > 1 and words[0] in HELP:
        words = [words[1], "--help", *words[2:]]
    name, arguments = (words[0], words[1:]) if words else ("", [])
    if name in command_names():
        run_command(name, arguments)
        return
    with one_message():
        if name in ("", *HELP):
            print(overview() if is_first() else "", end="")
        elif name == "--version":
            print(f"mpi4dl {importlib.import_module('mpi4dl').__version__}")
        else:
            if is_first():
                print(f"mpi4dl: {unknown(name)}", file=sys.stderr)
            sys.exit(USER_ERROR)


def overview() -> str:
    """All commands, with one line each, as their modules describe themselves."""
    door = front_door() or "mpi4dl"
    described = {name: importlib.import_module(f"mpi4dl.{name}").DESCRIPTION for name in command_names()}
    lines = [f"usage: {door} COMMAND [--FLAG VALUE ...], on several ranks: mpirun -n RANKS {door} COMMAND ...", ""]
    lines += ["commands:", *(f"  {line}" for line in aligned([*described.items()]))]
    return "\n".join([*lines, "", f"{door} COMMAND --help shows the options of a command."]) + "\n"


def unknown(name: str) -> str:
    """The error about an unknown command."""
    import difflib

    known = command_names()
    if name.startswith("-"):
        return f"name a command before {name}: {', '.join(known)}"
    if name in REMOVED:
        now = f"{front_door() or 'mpi4dl'} {REMOVED[name]}"
        return f"there is no command {name} any more; write {now} and the flags of the training"
    close = difflib.get_close_matches(name, known, n=1, cutoff=SIMILAR)
    hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(known)}"
    return f"there is no command {name}; {hint}"


if __name__ == "__main__":
    main()
