"""The frame of a command: its options, its help, and the function that it runs, under mpirun on all ranks.

A page such as `mpi4dl.evaluate` declares the options, and one function that this makes into a command.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpi4dl._commands import one_message, typed
from mpi4dl._compiler import defer_compiler
from mpi4dl._memory import within_limits
from mpi4dl.comm import Refusal, failure
from mpi4dl.options.declare import HELP, ConfigError, asked_topic, facts, options_of, parse_options, speaking, spelling

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

T = TypeVar("T")


@dataclass(frozen=True)
class CommandLine(Generic[T]):
    """A parsed command line. `source`: what its first word names, of commands about something that is there."""

    config: T
    source: str
    argv: list[str]
    spell: Callable[[str], str] = field(repr=False)  # spells options in messages as flags


@dataclass(eq=False)
class Command(Generic[T]):
    """`main()` is the command; called with a communicator and a command line, it is the same inside an MPI job.

    `words`: what follows its name in the line on usage. `source`: what the first word must name; empty: all are flags.
    `name`: what starts it after mpi4dl; empty: the name of the function.
    `patience`: the seconds that a command line lets the ranks wait for each other.
    """

    act: Callable[["Communicator", CommandLine[T]], None]
    config: type[T]
    words: str
    description: str
    source: str = ""
    patience: Callable[[Sequence[str]], float] = lambda _: failure.START_SECONDS
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.act.__name__
        functools.update_wrapper(self, self.act)

    @property
    def usage(self) -> str:
        """The line on usage, with the command as the user started it."""
        return f"mpirun -n RANKS {typed(self.name)} {self.words}"

    def __reduce__(self) -> str:
        return self.act.__qualname__  # a command is pickled by its name, as functions are

    def __call__(self, comm: "Communicator", argv: Sequence[str]) -> None:
        """Do what `argv` asks for. Collective; raises Refusal on all ranks, in the words of the command."""
        spell = spelling(self.config)
        with speaking(spell):
            with comm.together((ConfigError,)):
                asked = self._read(list(argv), spell)
            comm.agree(None, source=asked.source, **facts(asked.config))
            within_limits(lambda: self.act(comm, asked), comm.rank)

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Start MPI, and do what `argv` asks for, or the program's own command line, on all ranks of the job."""
        arguments = list(sys.argv[1:] if argv is None else argv)
        if asked_topic(arguments) is not None:
            with one_message():
                parse_options(self.config, arguments, self.usage, self.description)

        def begin() -> None:
            spell = spelling(self.config)
            refuse_together(lambda: self._read(arguments, spell), spell)
            defer_compiler()
            from mpi4dl.comm import world

            self(world(), arguments)

        failure.run(begin, self.patience(arguments))

    def _read(self, argv: list[str], spell: Callable[[str], str]) -> CommandLine[T]:
        source, flags = "", argv
        if self.source:
            if not argv or argv[0].startswith("-"):
                raise ConfigError(f"name {self.source} first: {self.usage}")
            source, *flags = argv
        return CommandLine(parse_options(self.config, flags, self.usage, self.description), source, argv, spell)


def refuse_together(read: Callable[[], object], spell: Callable[[str], str]) -> None:
    """Refuse a command line that is wrong on all ranks, before torch is imported, which takes seconds. Collective."""
    problem = None
    try:
        with speaking(spell):
            read()
    except ConfigError as error:
        problem = str(error)
    if failure.start().alike(problem is not None):
        raise Refusal(problem)


@dataclass(frozen=True)
class LocalCommand(Generic[T]):
    """A command without MPI, of one process. `main()` is the command; called with a command line, it raises ValueError.

    `act(asked, *paths)`: what it does. `words`: what follows its name in the line on usage: a word for each path,
    `...` behind the last if there may be more, and the flags in brackets.
    """

    name: str
    act: Callable[..., None]
    config: type[T]
    words: str
    description: str

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Do what `argv` asks for, or the program's own command line. Whatever is wrong ends in one message."""
        with one_message():
            self(sys.argv[1:] if argv is None else argv)

    def __call__(self, argv: Sequence[str]) -> None:
        """Do what `argv` asks for. Raises ValueError, in the words of the command, and OSError."""
        spell, usage = spelling(self.config), f"{typed(self.name)} {self.words}"
        named, several, _ = self.words.partition("[")[0].partition("...")
        wanted = named.split()
        paths, flags = self._apart(argv) if wanted else ([], [*argv])
        missing, more = wanted[len(paths) :], [] if several else paths[len(wanted) :]
        with speaking(spell):
            config = parse_options(self.config, flags, usage, self.description)
            if missing:
                raise ConfigError(f"name {' and '.join(missing)}: {usage}")
            if more:
                raise ConfigError(f"the argument {more[0]!r} is one too many: {usage}")
            self.act(CommandLine(config, "", [*argv], spell), *map(Path, paths))

    def _apart(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """The paths and the flags of a command line: the word behind a flag is its value, unless it is a switch."""
        switches = {flag for item in options_of(self.config).values() if item.kind.switch for flag in item.flags}
        paths, flags, words = list[str](), list[str](), iter(argv)
        for word in words:
            if not word.startswith("-"):
                paths.append(word)
            else:
                flags += [word] if word in {*switches, *HELP} or "=" in word else [word, *islice(words, 1)]
        return paths, flags


def command(
    config: type[T], words: str, description: str, source: str = "", **more: Any
) -> Callable[[Callable[["Communicator", CommandLine[T]], None]], Command[T]]:
    """Make a function of a communicator and what is asked for into a `Command`, of which `more` are other fields."""
    return lambda act: Command(act, config, words, description, source, **more)
