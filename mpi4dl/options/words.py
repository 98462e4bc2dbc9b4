"""How messages name options: the library says `batch_size`, as scripts pass it, and commands say --batch-size."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi4dl.options.declare import options_of

NAMED = re.compile(r"`([a-z][a-z0-9_]*)`")


def spelling(config_type: type) -> Callable[[str], str]:
    """What spells those options of a config that a message names as flags."""
    names = frozenset(options_of(config_type))

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
