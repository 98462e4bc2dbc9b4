"""ZeRO against torch.distributed over gloo: bytes per parameter, peak memory and time of a step of a transformer.

    python -m benchmarks.zero --features 512 --layers 8 --ranks 2

    plain PyTorch              one process, the whole batch
    ZeRO-0, 1, 2, 3            the engine; it also takes the norm of the gradient and sees to it that it is finite
    DDP                        DistributedDataParallel, its gradients being views of its buckets
    ZeroRedundancyOptimizer    the same, with an optimizer that shares out its state: views of buckets too
    FSDP2                      fully_shard on each encoder layer; "-kept" gathers once for forward and backward

All train an encoder by Adam in float32 on few tokens, so that the optimizer and communication take most of the time, as
they do of large models. Their losses must agree to 1e-4, or nothing is measured. They take turns: plain PyTorch in one
process, all others on the same ranks, burst by burst.

Memory is measured in a job of its own for each: the tensors that are alive while the optimizer works and after it, as
Python sees them, and the peak of the process without interpreter and libraries, of the largest rank.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bursts import burst_seconds, first_losses, gloo, must_agree
from benchmarks.report import between, error_bars, publish, pyplot, spread, table
from benchmarks.turns import Contestant, answer_turns, measure_once, median, take_turns

if TYPE_CHECKING:
    from benchmarks.live import LiveTensors
    from benchmarks.zero_variants import Task, Trained
    from mpi4dl.comm import Communicator

PLAIN = "plain PyTorch"
NAMES = ("ZeRO-0", "DDP", "ZeRO-1", "ZeroRedundancyOptimizer", "ZeRO-2", "FSDP2-kept", "ZeRO-3", "FSDP2")
TIMES, MEMORY = "times", "memory"
CHECKED_STEPS = 3
TOLERANCE = 1e-4


def parse(argv: list[str]) -> argparse.Namespace:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description=description)
    parser.add_argument("--features", type=int, default=512, help="of a token, in 8 heads")
    parser.add_argument("--layers", type=int, default=8, help="of the encoder")
    parser.add_argument("--batch-size", type=int, default=1, help="images of each rank in a step")
    parser.add_argument("--image-size", type=int, default=32, help="in pixels; a token is a patch of 16 x 16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--variants", default=",".join(NAMES), help="who takes part besides plain PyTorch")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--steps", type=int, default=3, help="training steps of a contestant in a turn")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contestant")
    parser.add_argument("--out", type=Path, default=Path("results/zero"), help="where to write .json and .png")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("features", "layers", "batch_size", "image_size", "threads", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least 1")
    if options.ranks < 2:
        parser.error(f"--ranks is {options.ranks}, but ZeRO shares out what at least 2 ranks have")
    if options.features % 8 or options.image_size % 16:
        parser.error(
            f"--features {options.features} --image-size {options.image_size}: 8 must divide the one, 16 the other"
        )
    unknown = [name for name in options.variants.split(",") if name not in NAMES]
    if unknown:
        parser.error(f"--variants {','.join(unknown)}: choose of {', '.join(NAMES)}")
    return options


def task_of(options: argparse.Namespace) -> "Task":
    from benchmarks.zero_variants import Task

    return Task(options.features, options.layers, options.batch_size, options.image_size, options.ranks)


def worker(options: argparse.Namespace) -> None:
    import torch

    from mpi4dl.comm import world

    what, names = options.worker
    comm = world()
    torch.set_num_threads(options.threads)
    with gloo(comm):
        if what == TIMES:
            time_steps(options, comm, names.split(","))
        else:
            measure_memory(options, comm, names)


def time_steps(options: argparse.Namespace, comm: "Communicator", names: list[str]) -> None:
    """An answer has the seconds of a step by contestant.

    Raises `Refusal` on all ranks if losses differ from those of plain PyTorch.
    """
    import torch

    from benchmarks.zero_variants import VARIANTS, plain
    from mpi4dl._memory import keep_freed_memory

    keep_freed_memory()
    task, expected = task_of(options), []
    if comm.rank == 0:
        alone = plain(task, comm)
        expected = [alone.step() for _ in range(CHECKED_STEPS)]
        del alone
    expected = comm.broadcast_object(expected)
    steps = {name: VARIANTS[name].make(task, comm).step for name in names}
    for name, step in steps.items():
        must_agree(comm, name, first_losses(comm, step, CHECKED_STEPS), expected, TOLERANCE)
    cpu = torch.device("cpu")
    answer_turns(
        lambda: {"seconds": {name: burst_seconds(comm, step, options.steps, cpu) for name, step in steps.items()}}, comm
    )


def measure_memory(options: argparse.Namespace, comm: "Communicator", name: str) -> None:
    """An answer has the bytes of the rank that has most."""
    import torch

    from benchmarks.live import LiveTensors
    from benchmarks.zero_variants import VARIANTS, Task
    from mpi4dl._memory import MemoryMeter

    variant = VARIANTS[name]
    variant.make(Task(8, 1, 1, 16, comm.size), comm).step()  # PyTorch loads what it needs
    task, meter, live = task_of(options), MemoryMeter("cpu"), LiveTensors()

    def turn() -> dict[str, Any]:
        trained = variant.make(task, comm)
        trained.step()
        trained.step()
        found = [meter.peak_bytes(), *count_bytes(trained, live)]
        peak, most, after = comm.all_reduce(torch.tensor(found), "max").tolist()
        return {"peak_bytes": peak, "live_bytes": max(most, after)}

    answer_turns(turn, comm)


def count_bytes(trained: "Trained", live: "LiveTensors") -> tuple[int, int]:
    """Of live tensors: at most while the optimizer works, and after the step."""
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(live.num_bytes(p.grad for p in trained.parameters))

    handle = trained.optimizer.register_step_pre_hook(look)
    trained.step()
    handle.remove()
    look()
    return max(seen[:-1]), seen[-1]


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    arguments = ["-m", "benchmarks.zero", *sys.argv[1:], "--worker"]
    names = options.variants.split(",")
    alone = Contestant(PLAIN, 1, [*arguments, TIMES, PLAIN])
    together = Contestant(f"{options.ranks} ranks", options.ranks, [*arguments, TIMES, options.variants])
    take_turns([alone, together], options.rounds)
    memory = [Contestant(name, 1 if name == PLAIN else options.ranks, [*arguments, MEMORY, name]) for name in names]
    memory.insert(0, Contestant(PLAIN, 1, [*arguments, MEMORY, PLAIN]))
    for contestant in memory:
        measure_once(contestant)
    turns = [a["seconds"] | b["seconds"] for a, b in zip(alone.answers, together.answers, strict=True)]
    num_parameters = task_of(options).num_parameters
    results = summarise(turns, {each.name: each.answers[0] for each in memory}, options.ranks, num_parameters)
    batch = f"{options.batch_size} image{'s' if options.batch_size > 1 else ''} of {options.image_size} px a rank"
    title = f"encoder of {num_parameters / 1e6:.1f} M parameters, Adam, float32, {options.ranks} ranks, {batch}"
    print(f"{title}\n{as_table(results)}")
    publish(options, {"num_parameters": num_parameters, "contestants": results}, plot(results, title))


def summarise(
    turns: list[dict[str, float]], memory: dict[str, dict[str, int]], num_ranks: int, num_parameters: int
) -> list[dict[str, Any]]:
    """Medians of the seconds, and medians of the ratios to plain PyTorch and to the peer in the same turn."""
    from benchmarks.zero_variants import VARIANTS

    results = []
    for name in turns[0]:
        variant = VARIANTS[name]
        row: dict[str, Any] = {
            "name": name,
            "median_seconds": median([turn[name] for turn in turns]),
            **spread("over_plain", [turn[name] / turn[PLAIN] for turn in turns]),
            "peer": variant.peer if variant.peer in turns[0] else None,
            "bytes_per_parameter": memory[name]["live_bytes"] / num_parameters,
            "bytes_per_parameter_by_formula": variant.formula(num_ranks),
            "peak_bytes": memory[name]["peak_bytes"],
        }
        if row["peer"]:
            row |= spread("over_peer", [turn[name] / turn[row["peer"]] for turn in turns])
        results.append(row)
    return results


def as_table(results: list[dict[str, Any]]) -> str:
    head = ("", "step ms", "over plain", "over its peer", "(min-max)", "bytes per parameter", "formula", "peak MiB")
    rows = [head]
    for r in results:
        peer = ("-", "-")
        if r["peer"]:
            peer = (f"{r['over_peer']:.2f}", between(r, "over_peer"))
        found, formula = r["bytes_per_parameter"], r["bytes_per_parameter_by_formula"]
        times = (f"{1e3 * r['median_seconds']:.0f}", f"{r['over_plain']:.2f}", *peer)
        rows.append((r["name"], *times, f"{found:.2f}", f"{formula:.2f}", f"{r['peak_bytes'] / 2**20:.0f}"))
    return table(rows)


def plot(results: list[dict[str, Any]], title: str) -> Any:
    """Bytes per parameter with the formula's value, peak memory, and time of a step over plain PyTorch's."""
    figure, axes = pyplot().subplots(1, 3, figsize=(11, 0.42 * len(results) + 1.5), sharey=True)
    places = list(range(len(results)))
    colors = ["0.6" if r["name"] == PLAIN else "tab:blue" if "ZeRO-" in r["name"] else "tab:orange" for r in results]
    bars = axes[0].barh(places, [r["bytes_per_parameter"] for r in results], color=colors)
    axes[0].bar_label(bars, fmt="%.1f", label_type="center", color="white")
    for place, r in zip(places, results, strict=True):
        value = r["bytes_per_parameter_by_formula"]
        marked = axes[0].vlines(value, place - 0.45, place + 0.45, color="black", linewidth=2)
    marked.set_label("formula")
    axes[0].legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), frameon=False)
    axes[0].set_xlabel("bytes per parameter")
    bars = axes[1].barh(places, [r["peak_bytes"] / 2**20 for r in results], color=colors)
    axes[1].bar_label(bars, fmt="%.0f", label_type="center", color="white")
    axes[1].set_xlabel("peak memory of a rank (MiB)")
    style = {"error_kw": {"ecolor": "0.3"}, "capsize": 3, "color": colors}
    axes[2].barh(places, [r["over_plain"] for r in results], xerr=error_bars(results, "over_plain"), **style)
    axes[2].set_xlim(0, 1.2 * max(r["over_plain_max"] for r in results))
    for place, r in zip(places, results, strict=True):
        value, end = f"  {r['over_plain']:.2f}", max(1.0, r["over_plain_max"])
        axes[2].text(end, place, value, verticalalignment="center")
    axes[2].axvline(1.0, color="0.3", linewidth=0.8, linestyle="--")
    axes[2].set_xlabel("time of a step, plain PyTorch = 1\n(median of turns, min-max)")
    axes[0].set_yticks(places, [r["name"] for r in results])
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    return figure


if __name__ == "__main__":
    main()
