"""Options of benchmarks: a module declares them in OPTIONS; common ones have the same name and meaning everywhere."""

import argparse
import importlib
import json
import pkgutil
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import benchmarks
from benchmarks.common.results import Conditions
from benchmarks.common.turns import Contestant
from mpi4dl.options.kinds import COUNT, SIDES, Kind

HIDDEN = ("name", "argv", "conditions", "worker", "out")  # of the values that parse returns: no settings of a result


class Sides(tuple[int, ...]):
    """A number for each axis, with the text 2x2."""

    def __str__(self) -> str:
        return SIDES.raw(self)


GRID = replace(SIDES, check=lambda sides: Sides(SIDES.check(sides)))


def listed(kind: Kind, sign: str = ",") -> Kind:
    """Several of a kind, each once."""
    return Kind(
        f"{kind.wanted}, or several with {sign!r} between them",
        f"{kind.metavar}{sign}...",
        lambda values: tuple(dict.fromkeys(map(kind.check, values))),
        read=lambda text: [kind.read(each) for each in text.split(sign)],
    )


def reader(kind: Kind) -> Callable[[str], Any]:
    """A `type` for argparse, of commands whose flags are no options of a config."""

    def read(text: str) -> Any:
        try:
            return kind.check(kind.read(text))
        except ValueError:
            raise ArgumentTypeError(f"{text} is not {kind.wanted}") from None

    return read


class Option(NamedTuple):
    """One option. `kind` is a `Kind` or a type. A default that is text is read too. `more` is for argparse."""

    flag: str
    kind: Any
    default: Any
    help: str
    more: dict[str, Any] = {}  # noqa: RUF012

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        kind = reader(self.kind) if isinstance(self.kind, Kind) else self.kind
        how = {"action": "store_true"} if kind is bool else {"type": kind}
        named = {} if self.more.get("nargs") else {"default": self.default}
        text = self.help if self.default in (None, False, "") else f"{self.help} (default %(default)s)".lstrip()
        parser.add_argument(self.flag, help=text, **how, **named, **self.more)


def count(flag: str, default: int | None, help: str = "") -> Option:
    """A whole number of at least 1."""
    return Option(flag, COUNT, default, help)


def counts(flag: str, default: str, help: str) -> Option:
    """Several whole numbers of at least 1."""
    return Option(flag, listed(COUNT), default, help)


def ranks(default: str) -> Option:
    return counts("--ranks", default, "numbers of ranks")


def rounds(default: int) -> Option:
    return count("--rounds", default, "turns of each contestant")


def steps(default: int) -> Option:
    return count("--steps", default, "training steps of a contestant in a turn")


def batch_size(default: int, of: str = "images of a step") -> Option:
    return count("--batch-size", default, of)


def grids(default: str) -> Option:
    return Option("--grids", listed(GRID), default, "grids of tiles, such as 1x2,2x2")


DEVICE = Option("--device", str, "cpu", "where tensors lie", {"choices": ("cpu", "cuda")})
CORES = count("--cores", 2, "threads of plain PyTorch; the ranks share as many")
THREADS = count("--threads", 1, "threads of each rank")
HEADS = count("--heads", 8, "heads of attention")
FEATURES = count("--features", 64, "features of each head")
CAUSAL = Option("--causal", bool, False, "queries ask earlier tokens only")


def names() -> list[str]:
    """All benchmarks: the modules of this folder that have OPTIONS and a function `run`."""
    modules = pkgutil.iter_modules(benchmarks.__path__)
    return [module.name for module in modules if not module.ispkg and not module.name.startswith("_")]


def load(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def description(module: ModuleType) -> str:
    return (module.__doc__ or "").split("\n")[0]


class Options(argparse.Namespace):
    """The values of a benchmark's options, and `worker`: what a contestant is told, None in the driver."""

    name: str
    argv: list[str]
    conditions: Conditions
    worker: Any
    out: Path

    def contestant(self, name: str, ranks: int, told: Any = "") -> Contestant:
        """A contestant that this benchmark's `work` is: it gets the same options, and `told` as `options.worker`."""
        arguments = ["-m", "benchmarks", "run", self.name, *self.argv, "--worker", json.dumps(told)]
        return Contestant(name, ranks, arguments)

    def settings(self) -> dict[str, Any]:
        """The options that a result depends on, as a user writes them."""
        return {name: _as_text(value) for name, value in vars(self).items() if name not in HIDDEN}


def _as_text(value: Any) -> Any:
    """A list as text with commas."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return ",".join(map(str, value)) if type(value) in (list, tuple) else str(value)


def parse(name: str, argv: Sequence[str]) -> Options:
    """The options of a command line. A wrong one ends with exit code 2 and its name.

    QUICK of the module has the defaults of --quick. PRESETS has those of other switches, or of several together.
    """
    module = load(name)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks run {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in module.OPTIONS:
        option.add_to(parser)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round, to see that it works")
    out = getattr(module, "OUT", Path("results", name))
    parser.add_argument("--out", type=Path, default=out, help="how names of .json and .png begin")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    first = vars(parser.parse_args(argv))
    for flags, defaults in {"quick": module.QUICK, **getattr(module, "PRESETS", {})}.items():
        if all(first[flag] for flag in flags.split()):
            parser.set_defaults(**defaults)
    options = parser.parse_args(argv, Options(name=name, argv=list(argv), conditions=Conditions()))
    check = getattr(module, "check", None)
    problem = None if check is None or options.worker is not None else check(options)
    if problem is not None:
        parser.error(problem)
    return options
