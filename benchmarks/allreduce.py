"""All-reduce: our algorithms, and what we pick, against gloo and raw mpi4py: microseconds by size of the buffer.

    python -m benchmarks.allreduce --ranks 2,4 --sizes 4,64,1024,16384 --dtypes float32,bfloat16

    library, direct, ring      one algorithm of mpi4dl.comm.allreduce for all sizes
    two-level                  the same, half of the ranks on another node, or as if they were (4 ranks or more)
    picked                     what mpi4dl takes for that size after measuring at its start
    gloo                       torch.distributed.all_reduce
    raw mpi4py                 a blocking Allreduce in place (not for bfloat16, which MPI does not have)

With `--nodes 2` the ranks are on two nodes that root can make of one machine: network namespaces, joined by a
cable, that share no memory. Every number of ranks is a job of its own under mpirun, and the jobs take turns. All
contestants run on the same ranks of it, burst by burst; a burst takes as long as on its slowest rank.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.bursts import burst_seconds, gloo
from benchmarks.nodes import NoNodes, two_nodes
from benchmarks.report import publish, pyplot, table
from benchmarks.turns import Contestant, answer_turns, median, numbers, on_ranks, take_turns

if TYPE_CHECKING:
    import torch

    from mpi4dl.comm import Communicator

Sum = Callable[["torch.Tensor"], Any]

PICKED, GLOO, RAW = "picked", "gloo", "raw mpi4py"
NAMES = ("library", "direct", "ring", "two-level", PICKED, GLOO, RAW)
DTYPES = ("float32", "bfloat16")
BURST_BYTES = 1 << 24
STYLES = {PICKED: ("black", "o-", 2.4), GLOO: ("C3", "s--", 1.4), RAW: ("C7", "^--", 1.4)}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allreduce", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2), help="emulated nodes that share the ranks")
    parser.add_argument("--sizes", default="4,16,64,256,1024,4096,16384,65536", help="of the buffers, in KB of 1024")
    parser.add_argument("--dtypes", default="float32,bfloat16", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--iterations", type=int, default=50, help="sums in a burst, fewer of them above 16 MB in all")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each number of ranks")
    parser.add_argument("--out", type=Path, default=Path("results/allreduce"), help="where to write .json and .png")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("iterations", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, but must be at least 1")
    try:
        smallest, fewest = min(numbers(options.sizes)), min(numbers(options.ranks))
    except ValueError:
        parser.error(f"--sizes {options.sizes} --ranks {options.ranks}: write them as 4,64,1024 and 2,4")
    if smallest < 1 or fewest < 2:
        parser.error(f"--sizes {options.sizes} --ranks {options.ranks}: a sum takes 1 KB and 2 ranks at least")
    if options.nodes == 2 and any(ranks < 4 or ranks % 2 for ranks in numbers(options.ranks)):
        parser.error(f"--ranks {options.ranks} --nodes 2: two nodes take an even number of ranks, and 4 at least")
    for dtype in options.dtypes.split(","):
        if dtype not in DTYPES:
            parser.error(f"--dtypes has {dtype!r}, but may only name {', '.join(DTYPES)}")
    return options


def raw(comm: "Communicator") -> Sum:
    """The all-reduce as one writes it by hand, for float32."""
    from mpi4py import MPI

    def run(flat: "torch.Tensor") -> None:
        comm.mpi.Allreduce(MPI.IN_PLACE, [MPI.memory.fromaddress(flat.data_ptr(), flat.nbytes), MPI.FLOAT])

    return run


def contests(comm: "Communicator", nodes: int = 1) -> tuple[dict[str, Sum], Callable[["torch.Tensor"], str]]:
    """Who sums, by name, and which algorithm is picked for a tensor; on one node half plays another one. Collective.

    Raises `Refusal` on all ranks if one of them sums wrongly.
    """
    import torch.distributed

    from mpi4dl.comm import allreduce

    def finished(all_reduce: allreduce.AllReduce) -> Sum:
        return lambda flat: all_reduce(flat).wait()

    half = comm.rank // (comm.size // 2) if nodes == 1 else None
    several = comm.size >= 4
    names = [name for name in allreduce.ALGORITHMS if several or name != "two-level"]
    sums = {name: finished(allreduce.pick(comm, name, half if name == "two-level" else None)) for name in names}
    picked = allreduce.pick(comm, "auto")
    sums |= {PICKED: finished(picked), GLOO: torch.distributed.all_reduce, RAW: raw(comm)}
    for name, run in sums.items():
        values = torch.arange(1000.0) + comm.rank
        run(values)
        expected = comm.size * torch.arange(1000.0) + comm.size * (comm.size - 1) // 2
        comm.agree(None if torch.equal(values, expected) else f"{name} sums wrongly: nothing was measured")
    return sums, lambda flat: picked.choice.algorithm(flat.dtype)


def worker(options: argparse.Namespace) -> None:
    """All contests on these ranks; an answer has the microseconds by dtype, size in KB and contestant."""
    import torch

    from mpi4dl._memory import keep_freed_memory
    from mpi4dl.comm import world

    keep_freed_memory()
    comm = world()
    comm.node.share_cores()

    def turn() -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for dtype in options.dtypes.split(","):
            answer[dtype] = {}
            for size in numbers(options.sizes):
                flat = torch.zeros(size << 10, dtype=torch.uint8).view(getattr(torch, dtype))
                iterations = max(1, min(options.iterations, BURST_BYTES // flat.nbytes))
                who = {name: run for name, run in sums.items() if name != RAW or dtype == "float32"}
                times = {
                    name: 1e6 * burst_seconds(comm, partial(run, flat), iterations, flat.device)
                    for name, run in who.items()
                }
                answer[dtype][str(size)] = {**times, "algorithm": algorithm(flat)}
        return answer

    with gloo(comm):
        sums, algorithm = contests(comm, options.nodes)
        answer_turns(turn, comm)


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    contestants = on_ranks(options.ranks, ["-m", "benchmarks.allreduce", *sys.argv[1:], "--worker"])
    with ExitStack() as stack:
        if options.nodes == 2:
            try:
                cluster = stack.enter_context(two_nodes(Path(stack.enter_context(TemporaryDirectory()))))
            except NoNodes as none:
                raise SystemExit(f"--nodes 2: {none}") from None
            for contestant in contestants:
                contestant.launch = cluster.launch(contestant.ranks // options.nodes)
        take_turns(contestants, options.rounds)
    results = summarise(contestants)
    if options.nodes == 2:
        print("half of the ranks on either of two nodes")
    print(as_tables(results))
    publish(options, {"measurements": results}, plot(results, options.nodes))


def summarise(contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Medians over the turns, and the medians of what was picked over the others within a turn."""
    results = []
    for contestant in contestants:
        for dtype, sizes in contestant.answers[0].items():
            for size in sizes:
                turns = [answer[dtype][size] for answer in contestant.answers]
                names = [name for name in NAMES if name in turns[0]]
                results.append(
                    {
                        "ranks": contestant.ranks,
                        "dtype": dtype,
                        "size_kb": int(size),
                        "picked": turns[0]["algorithm"],
                        "microseconds": {name: median([turn[name] for turn in turns]) for name in names},
                        "picked_over": {
                            name: median([turn[PICKED] / turn[name] for turn in turns])
                            for name in names
                            if name != PICKED
                        },
                    }
                )
    return results


def groups(results: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """The rows of each number of ranks and dtype, by size."""
    keys = dict.fromkeys((row["ranks"], row["dtype"]) for row in results)
    return {
        key: sorted((r for r in results if (r["ranks"], r["dtype"]) == key), key=lambda r: r["size_kb"]) for key in keys
    }


def as_tables(results: list[dict[str, Any]]) -> str:
    """A table per number of ranks and dtype: microseconds, and what was picked over gloo and raw mpi4py."""
    parts = []
    for (ranks, dtype), rows in groups(results).items():
        names = list(rows[0]["microseconds"])
        others = [name for name in (GLOO, RAW) if name in names]
        lines = [["KB", *names, *(f"picked / {name}" for name in others), "picked is"]]
        for row in rows:
            times = [f"{row['microseconds'][name]:.0f}" for name in names]
            ratios = [f"{row['picked_over'][name]:.2f}" for name in others]
            lines.append([str(row["size_kb"]), *times, *ratios, row["picked"]])
        parts.append(f"{ranks} ranks, {dtype}: microseconds\n{table(lines)}")
    return "\n\n".join(parts)


def plot(results: list[dict[str, Any]], nodes: int = 1) -> Any:
    """Microseconds over the size of the buffer: a panel per number of ranks and dtype."""
    plots = pyplot()
    by_group = groups(results)
    columns = len({dtype for _, dtype in by_group})
    rows_of_panels = -(-len(by_group) // columns)
    size = (1.0 + 4.4 * columns, 1.2 + 3.3 * rows_of_panels)
    figure, axes = plots.subplots(rows_of_panels, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    lines: dict[str, Any] = {}
    for axis, ((ranks, dtype), rows) in zip(axes.flat, by_group.items(), strict=False):
        sizes = [row["size_kb"] for row in rows]
        for number, name in enumerate(name for name in NAMES if name in rows[0]["microseconds"]):
            color, marks, width = STYLES.get(name, (f"C{number}" if number < 3 else "C4", ".-", 1.2))
            style = {"color": color, "linewidth": width, "markersize": 5, "label": name}
            (lines[name],) = axis.plot(sizes, [row["microseconds"][name] for row in rows], marks, **style)
        axis.set_title(f"{ranks} ranks, {dtype}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [f"{kb} KB" if kb < 1024 else f"{kb // 1024} MB" for kb in sizes], rotation=45)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.grid(color="0.9")
    for axis in axes[:, 0]:
        axis.set_ylabel("microseconds")
    for axis in axes[-1]:
        axis.set_xlabel("size of the buffer")
    shown = [lines[name] for name in NAMES if name in lines]
    where = ", on two nodes" if nodes == 2 else ""
    figure.suptitle(
        f"all-reduce{where}: medians of interleaved bursts\n", x=0.02, horizontalalignment="left", fontsize=11
    )
    figure.legend(handles=shown, ncols=len(shown), loc="upper center", bbox_to_anchor=(0.5, 0.965), frameon=False)
    return figure


if __name__ == "__main__":
    main()
