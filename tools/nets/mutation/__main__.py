"""Shows mutants to the tests that may notice them, and lists those that no test notices.

    python -m tools.nets.mutation see                        run all default tests, and note which functions each calls
    python -m tools.nets.mutation see tests/geometry          or those that pytest is told to
    python -m tools.nets.mutation run --rooms geometry,replicas --sample 60
    python -m tools.nets.mutation run --modules mpi4dl.geometry.boxes
    python -m tools.nets.mutation again --seconds 300        shows those that survived last time to further tests

A mutant is shown to tests that call its function, the fastest and most particular first, up to --seconds of them. It
is killed if one fails, or takes too long. Tests run in processes that stay (`swap.py` beside this file), with their
pools of ranks. After a mutant that was killed the test that noticed it runs again, without any: if it fails, the
verdict is void, and the pools start anew.

Why not a tool that is there: mutmut selects a mutant by an environment variable that is read at each call, and
cosmic-ray writes it into the source; with both each mutant takes new ranks, whose start takes longer than most tests.
"""

import argparse
import json
import multiprocessing
import os
import pkgutil
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tests.pool.zygote import ROOT
from tools.nets.mutation import seen
from tools.nets.mutation.judge import KILLED, SURVIVED, UNSEEN, VOID, Verdict, judged
from tools.nets.mutation.mutants import Mutant, mutants_of, path_of

FOLDER = ROOT / ".mutation"
VERDICTS = FOLDER / "verdicts.json"
SPATIAL = "mpi4dl.parallel.spatial"
# Modules, or packages with all that is in them.
ROOMS = {
    "geometry": ("mpi4dl.geometry",),
    "exchange": ("mpi4dl.comm.exchange", f"{SPATIAL}.halo", f"{SPATIAL}.redistribution"),
    "rules": (f"{SPATIAL}.rules",),
    "attention": (f"{SPATIAL}.rules.attention",),
    "streaming": ("mpi4dl.parallel.streaming",),
    "replicas": ("mpi4dl.parallel.replicas", "mpi4dl.comm.allreduce"),
    "executor": ("mpi4dl.parallel.pipeline.executor", "mpi4dl.parallel.pipeline.stage_communication"),
    "stages": ("mpi4dl.parallel.pipeline", "mpi4dl.parallel.tables"),
    "tensor": ("mpi4dl.parallel.tensor",),
    "experts": ("mpi4dl.parallel.experts", "mpi4dl.models.experts"),
    "checkpoints": ("mpi4dl.checkpoints",),
    "losses and metrics": ("mpi4dl.tasks",),
    "splits": ("mpi4dl.datasets.split", "mpi4dl.datasets.samples"),
    "engine": ("mpi4dl.engine",),
}


class Seen:
    """Which tests call which functions, by what `see` wrote."""

    def __init__(self) -> None:
        self.tests: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        lines: dict[str, Mapping[str, Any]] = {}
        for path in sorted((FOLDER / "seen").glob("*.jsonl")):
            lines |= {line["test"]: line for line in map(json.loads, path.read_text().splitlines())}
        for test, line in lines.items():
            if "\\" not in test:  # pytest does not find a test by such a name
                for function in line["seen"]:
                    self.tests[function].append((line["seconds"] * len(line["seen"]), line["seconds"], test))
        for found in self.tests.values():
            found.sort()

    def of(self, mutant: Mutant, seconds: float, but: Collection[str] = ()) -> tuple[str, ...]:
        """Tests that call the mutant's function, which take so long together, and one at least.

        The fastest come first, and those that call few other functions: they look at what this one does.
        """
        path = path_of(mutant.module).relative_to(ROOT)
        taken, total = [], 0.0
        for _, own, test in self.tests.get(f"{path}:{mutant.function}", ()):
            if test not in but and not (taken and total + own > seconds):
                taken.append(test)
                total += own
        return tuple(taken)


def see(arguments: argparse.Namespace) -> None:
    folder = FOLDER / "seen"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = ["-q", "-p", seen.__name__, "-n", str(arguments.workers), "--dist", "worksteal", *arguments.more]
    subprocess.run(
        [sys.executable, "-m", "pytest", *words], env={**os.environ, seen.VARIABLE: str(folder)}, cwd=ROOT, check=False
    )


def modules_in(name: str) -> list[str]:
    """A module, and if it is a package all that are in it."""
    found = [name]
    folder = ROOT / name.replace(".", "/")
    if folder.is_dir():
        found += [each.name for each in pkgutil.walk_packages([str(folder)], f"{name}.")]
    return found


def drawn(rooms: Mapping[str, Sequence[str]], sample: int | None, seed: int) -> list[Mutant]:
    """The mutants of some rooms, each once; or of each room so many, by chance."""
    found: dict[Mutant, None] = {}
    for names in rooms.values():
        here = [mutant for name in names for module in modules_in(name) for mutant in mutants_of(module)]
        here = [mutant for mutant in here if mutant not in found]
        if sample is not None:
            here = random.Random(seed).sample(here, min(sample, len(here)))
        found |= dict.fromkeys(here)
    return list(found)


def run(arguments: argparse.Namespace) -> None:
    rooms = {"": arguments.modules} if arguments.modules else {room: ROOMS[room] for room in arguments.rooms}
    found = drawn(rooms, arguments.sample, arguments.seed)
    known = Seen()
    judge_all([(mutant, known.of(mutant, arguments.seconds)) for mutant in found], arguments, [])
    print(f"seed {arguments.seed}")


def again(arguments: argparse.Namespace) -> None:
    """Show those that no test has noticed to tests that they have not been shown to."""
    known, told, judged_before = Seen(), [], []
    for each in json.loads(VERDICTS.read_text()):
        verdict = Verdict(Mutant(*each["mutant"]), each["outcome"], each["seconds"], tuple(each["by"]))
        further = known.of(verdict.mutant, arguments.seconds, verdict.by)
        if verdict.outcome != KILLED and further:
            told.append((verdict.mutant, further))
        else:
            judged_before.append(verdict)
    judge_all(told, arguments, judged_before)


def judge_all(
    told: Sequence[tuple[Mutant, tuple[str, ...]]], arguments: argparse.Namespace, before: list[Verdict]
) -> None:
    """Show mutants to tests, and write verdicts as they come, behind those from `before`."""
    verdicts = [*before]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        words = [(*each, arguments.limit) for each in told]
        for number, verdict in enumerate(pool.imap_unordered(judged, words), 1):
            verdicts.append(verdict)
            VERDICTS.write_text(json.dumps([each._asdict() for each in verdicts], indent=1))
            print(f"{number} of {len(told)}: {verdict.outcome}, {verdict.seconds:.0f} s: {verdict.mutant}", flush=True)
    killers = sorted({verdict.by[-1] for verdict in verdicts if verdict.outcome == KILLED})
    print(f"{len(verdicts)} mutants")
    for outcome in (KILLED, SURVIVED, UNSEEN, VOID):
        print(f"{outcome}: {sum(verdict.outcome == outcome for verdict in verdicts)}")
    print(f"{len(killers)} tests killed mutants")
    for verdict in verdicts:
        if verdict.outcome == SURVIVED:
            print(f"survived {len(verdict.by)} tests: {verdict.mutant}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.nets.mutation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    seeing, running, repeating = (commands.add_parser(name) for name in ("see", "run", "again"))
    for command, function in ((seeing, see), (running, run), (repeating, again)):
        command.set_defaults(function=function)
        command.add_argument("--workers", type=int, default=2)
    running.add_argument("--rooms", type=lambda text: text.split(","), default=[*ROOMS], help=", ".join(ROOMS))
    running.add_argument("--modules", type=lambda text: text.split(","))
    running.add_argument("--sample", type=int, help="so many of each room, by chance; all by default")
    running.add_argument("--seed", type=int, default=0)
    for command in (running, repeating):
        command.add_argument("--seconds", type=float, default=60.0, help="of tests that a mutant is shown to")
        command.add_argument("--limit", type=float, default=60.0, help="seconds of a body; of a test twice as many")
    arguments, more = parser.parse_known_args()
    if more and arguments.function is not see:
        parser.error(f"unknown: {' '.join(more)}")
    arguments.more = more
    arguments.function(arguments)


if __name__ == "__main__":
    main()
