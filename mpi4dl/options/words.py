"""How messages name options: the library says `batch_size`, as scripts pass it, and commands say --batch-size."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAMED = re.compile(r"`([a-z][a-z0-9_]*)`")


def named(flag: str) -> str:
    """The name of a flag's option, as the library's messages have it; other texts stay as they are."""
    return "`" + flag[2:].replace("-", "_") + "`" if flag.startswith("--") else flag


def as_flags(names: frozenset[str]) -> Callable[[str], str]:
    """What spells those of these options that a message names as flags."""

    def flag(found: re.Match[str]) -> str:
        return "--" + found[1].replace("_", "-") if found[1] in names else found[0]

    return lambda message: NAMED.sub(flag, message)


@contextmanager
def speaking(spell: Callable[[str], str]) -> Iterator[None]:
    """Whatever is refused in here is refused in these words."""
    try:
        yield
    except ValueError as problem:
        if len(problem.args) == 1:
            problem.args = (spell(str(problem)),)
        raise
