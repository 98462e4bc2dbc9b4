"""Pipelines and replicas against torch.distributed's own: images/s, CPU time, work and memory of the same training.

    python -m benchmarks.peers --models amoebanetd,transformer --ranks 2,4

    plain PyTorch            one process, a loop over the microbatches
    gpipe, 1f1b, interleaved, zero-bubble
                             torch.distributed.pipelining over gloo and over our backend, and the engine's schedules
    DDP, FSDP2               DistributedDataParallel and fully_shard on each layer, over gloo and over our backend, with
                             gradients added up over microbatches; the engine's replicas, and its ZeRO 3

All have the same layers, cut at the same places, weights, batch, microbatches, SGD and one thread a process.
Zero-bubble is ZB-H1 of ours, and InterleavedZeroBubble (ZB1P) with one stage a rank. The engine takes batch norm over
all replicas, torch.distributed over each one's samples alone: each is held to a plain loop over what it normalises.
Whose losses are not those of plain PyTorch is said to compute something else, and is compared with nobody.

Every contestant is a job of its own, and they take turns. `sweeps.meter` says what CPU seconds, work, idle time and
memory are. The engine also takes the gradient's norm and stops all ranks at one that is not finite; its peers do not.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.allocators import use, with_each
from benchmarks.peers_charts import as_table, plot
from benchmarks.peers_options import (
    ENGINE,
    GLOO,
    PIPELINES,
    PLAIN,
    Case,
    Contest,
    cases,
    contests,
    model_options,
    num_stages,
    parse,
    title,
)
from benchmarks.report import save_figure, save_json, settings, spread
from benchmarks.turns import Contestant, answer_turns, measure_once, median, ratios, take_turns

if TYPE_CHECKING:
    from benchmarks.peers_variants import Task

REFERENCE = Contest("", "reference")
CHECKED_STEPS = 3
TOLERANCE = 2e-3  # float32 through steps of AmoebaNet; another loss, or other samples, differ by far more
COMPARED = ("images_per_second", "cpu_seconds", "work_seconds", "peak_bytes")


def task_of(options: argparse.Namespace, case: Case) -> "Task":
    from benchmarks.peers_variants import Task

    sizes = (options.size, options.batch_size, options.microbatches)
    return Task(case.model, model_options(options, case.model), *sizes)


def reference_of(contest: Contest, case: Case, num_microbatches: int) -> int:
    """Over how many microbatches the plain loop goes that a contestant is to equal."""
    whole = contest.side == ENGINE and contest.method not in PIPELINES
    return num_microbatches // case.ranks if whole else num_microbatches


def worker(options: argparse.Namespace) -> None:
    """One contestant."""
    import torch

    model, ranks, name = options.worker
    case, contest = Case(model, int(ranks)), Contest(*json.loads(name))
    use(options.allocator)
    torch.set_num_threads(1)
    if contest == REFERENCE:
        answer_turns(lambda: references(options, case))
        return
    from benchmarks.peers_variants import join
    from mpi4dl.comm import world
    from mpi4dl.sweeps.meter import Meter

    comm = None if contest == PLAIN else world()
    meter, task = Meter(torch.device("cpu"), comm), task_of(options, case)
    counts = json.loads(options.counts)[str(num_stages(contest, case.ranks))]
    joined = join(task, contest, counts, comm)
    shares: list[float] = []

    with joined.group:
        step = joined.make()

        def recorded() -> None:
            loss = step()
            if len(shares) < CHECKED_STEPS:
                shares.append(loss)

        for _ in range(options.age):
            recorded()

        def turn() -> dict[str, Any]:
            found = meter.measure(recorded, options.steps)
            found["images_per_second"] = options.batch_size * options.steps / found["seconds"]
            return found | {"losses": [sum(some) for some in zip(*meter.of_ranks(shares), strict=True)]}

        answer_turns(turn, comm)


def references(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """The losses of plain loops, by their number of microbatches, and the layers of stages, by the number of these."""
    from dataclasses import replace

    from benchmarks.peers_variants import plain

    task, losses = task_of(options, case), {}
    for number in {reference_of(contest, case, options.microbatches) for contest in contests(options)}:
        step = plain(replace(task, num_microbatches=number))
        losses[number] = [step() for _ in range(CHECKED_STEPS)]
    stages = {num_stages(contest, case.ranks) for contest in contests(options)}
    return {"losses": losses, "counts": {number: task.counts(number) if number > 1 else (0,) for number in stages}}


def compete(case: Case, options: argparse.Namespace) -> tuple[dict[str, list[float]], list[Contestant]]:
    """The losses of plain loops, and all contestants after their turns."""
    arguments = ["-m", "benchmarks.peers", *sys.argv[1:]]

    def words(contest: Contest, counts: Any = None) -> list[str]:
        return [
            *arguments,
            f"--counts={json.dumps(counts)}",
            "--worker",
            case.model,
            str(case.ranks),
            json.dumps(contest),
        ]

    reference = Contestant(str(REFERENCE), 1, words(REFERENCE))
    found = measure_once(reference)
    contestants = with_each(
        (
            Contestant(str(contest), 1 if contest == PLAIN else case.ranks, words(contest, found["counts"]))
            for contest in contests(options)
        ),
        options.allocators,
    )
    print(f"{case.model}, {case.ranks} ranks: {len(contestants)} contestants", file=sys.stderr)
    take_turns(contestants, options.rounds)
    return found["losses"], contestants


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    results: list[dict[str, Any]] = []
    problems: list[str] = []
    for case in cases(options):
        try:
            losses, contestants = compete(case, options)
        except SystemExit as problem:
            problems.append(f"{case.model} on {case.ranks} ranks: {problem}")
            print(problems[-1], file=sys.stderr)
        else:
            found = summarise(case, losses, contestants, options)
            results += found
            print(f"\n{title(options, case)}\n{as_table(found)}", flush=True)
            for row in found:
                if row["wrong"]:
                    print(f"{row['name']} computes something else: {row['wrong']}")
        if results:
            save(results, problems, options)
    if problems:
        raise SystemExit("\n".join(["not measured:", *problems]))


def difference(losses: Sequence[float], expected: Sequence[float]) -> str | None:
    """The first loss that is not what it should be; None if all are."""
    for number, (found, wanted) in enumerate(zip(losses, expected, strict=False)):
        if not math.isclose(found, wanted, rel_tol=TOLERANCE):
            return f"the loss of step {number} is {found:.6f} instead of {wanted:.6f}"
    return None


def summarise(
    case: Case, losses: dict[str, list[float]], contestants: list[Contestant], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Medians over the rounds, and ratios to plain PyTorch and to the same over gloo in the same round."""
    of = {str(contest): contest for contest in contests(options)}
    results = []
    for contestant in contestants:
        contest, alike = of[contestant.name], {c.name: c for c in contestants if c.allocator == contestant.allocator}
        answers = contestant.answers
        expected = losses[str(reference_of(contest, case, options.microbatches))]
        wrong = difference(answers[-1]["losses"], expected)
        row: dict[str, Any] = {
            "model": case.model,
            "job_ranks": case.ranks,
            "name": contestant.label,
            "method": contest.method,
            "side": contest.side,
            "allocator": contestant.allocator or options.allocators,
            "ranks": contestant.ranks,
            "wrong": wrong,
            "losses": answers[-1]["losses"],
            "expected_losses": expected,
            **{key: median([answer[key] for answer in answers]) for key in (*COMPARED, "idle_seconds")},
            **spread("images_per_second", [answer["images_per_second"] for answer in answers]),
            "peak_bytes_of_ranks": answers[-1]["peak_bytes_of_ranks"],
            "peer": None,
        }
        for key in ("cpu_seconds", "work_seconds", "idle_seconds"):
            row[key] /= options.steps
        rivals, peer = {"over_plain": alike[str(PLAIN)]}, alike.get(f"{contest.method}, {GLOO}")
        if peer is not None and contest.side != GLOO and wrong is None:
            row["peer"], rivals["over_peer"] = peer.label, peer
        for name, rival in rivals.items():
            for key in COMPARED:
                row |= spread(f"{name}_{key}", ratios(contestant, rival, key))
        results.append(row)
    return results


def save(results: list[dict[str, Any]], problems: list[str], options: argparse.Namespace) -> None:
    """What there is so far: a sweep that is broken off keeps what it has measured."""
    what = {"settings": settings(options), "problems": problems, "measurements": results}
    save_json(Path(f"{options.out}.json"), what)
    paths = [f"{options.out}.json"]
    for case in cases(options):
        its = [row for row in results if (row["model"], row["job_ranks"]) == case]
        if its:
            paths.append(f"{options.out}_{case.model}_{case.ranks}.png")
            save_figure(plot(its, title(options, case)), Path(paths[-1]))
    print("saved " + ", ".join(paths))


if __name__ == "__main__":
    main()
