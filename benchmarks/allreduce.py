"""All-reduce: our algorithms, and the one that is picked, against gloo and raw mpi4py: microseconds by buffer size.

    python -m benchmarks run allreduce --ranks 2,4 --sizes 4,64,1024,16384 --dtypes float32,bfloat16

    library, direct, ring      one algorithm of mpi4dl.comm.allreduce for all sizes
    two-level                  the same, as if half of the ranks were on another node (4 ranks or more)
    picked                     the algorithm that mpi4dl takes for that size
    gloo                       torch.distributed.all_reduce
    raw mpi4py                 a blocking Allreduce in place (not for bfloat16, which MPI does not have)

Each number of ranks is a job, and the jobs take turns. All contestants run on the same ranks of it, burst by burst; a
burst takes as long as on its slowest rank.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as declared
from benchmarks.common.charts import Lines, lines
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import publish
from benchmarks.common.results import Column, spread, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns
from mpi4dl.options.kinds import choice

if TYPE_CHECKING:
    import torch

    from mpi4dl.comm import Communicator

Sum = Callable[["torch.Tensor"], Any]

PICKED, GLOO, RAW = "picked", "gloo", "raw mpi4py"
NAMES = ("library", "direct", "ring", "two-level", PICKED, GLOO, RAW)
DTYPES = ("float32", "bfloat16")
BURST_BYTES = 1 << 24
OPTIONS = (
    declared.ranks("2,4"),
    declared.counts("--sizes", "4,16,64,256,1024,4096,16384,65536", "of the buffers, in KB of 1024"),
    Option("--dtypes", listed(choice(*DTYPES)), "float32,bfloat16", f"of {', '.join(DTYPES)}"),
    declared.count("--iterations", 50, "sums in a burst, fewer of them above 16 MB in all"),
    declared.rounds(7),
)
QUICK = {"ranks": "2,4", "sizes": "4,2048", "iterations": 2, "rounds": 1}


def check(options: Options) -> str | None:
    return "--ranks: a sum takes at least 2 ranks" if min(options.ranks) < 2 else None


def raw(comm: "Communicator") -> Sum:
    """The all-reduce as one writes it by hand, for float32."""
    from mpi4py import MPI

    def run(flat: "torch.Tensor") -> None:
        comm.mpi.Allreduce(MPI.IN_PLACE, [MPI.memory.fromaddress(flat.data_ptr(), flat.nbytes), MPI.FLOAT])

    return run


def contests(comm: "Communicator") -> tuple[dict[str, Sum], Callable[["torch.Tensor"], str]]:
    """Contestants by name, and the algorithm that is picked for a tensor; half of the ranks play another node.

    Collective. Raises `Refusal` on all ranks if one of them sums wrongly.
    """
    import torch.distributed

    from mpi4dl.comm import allreduce

    def finished(all_reduce: allreduce.AllReduce) -> Sum:
        return lambda flat: all_reduce(flat).wait()

    half = comm.rank // (comm.size // 2)
    names = [name for name in allreduce.ALGORITHMS if comm.size >= 4 or name != "two-level"]
    sums = {name: finished(allreduce.pick(comm, name, half if name == "two-level" else None)) for name in names}
    picked = allreduce.pick(comm, "auto")
    sums |= {PICKED: finished(picked), GLOO: torch.distributed.all_reduce, RAW: raw(comm)}
    for name, run in sums.items():
        values = torch.arange(1000.0) + comm.rank
        run(values)
        expected = comm.size * torch.arange(1000.0) + comm.size * (comm.size - 1) // 2
        comm.agree(None if torch.equal(values, expected) else f"{name} sums wrongly: nothing was measured")
    return sums, lambda flat: picked.choice.algorithm(flat.dtype)


def work(options: Options) -> None:
    """All contests on these ranks; an answer has the microseconds by dtype, size in KB and contestant."""
    import torch

    from benchmarks.common.ranks import begin, burst_seconds, gloo

    comm = begin(threads=None)

    def turn() -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for dtype in options.dtypes:
            answer[dtype] = {}
            for size in options.sizes:
                flat = torch.zeros(size << 10, dtype=torch.uint8).view(getattr(torch, dtype))
                iterations = max(1, min(options.iterations, BURST_BYTES // flat.nbytes))
                times = {
                    name: 1e6 * burst_seconds(comm, partial(run, flat), iterations, flat.device)
                    for name, run in sums.items()
                    if name != RAW or dtype == "float32"
                }
                answer[dtype][str(size)] = {**times, "algorithm": algorithm(flat)}
        return answer

    with gloo(comm):
        sums, algorithm = contests(comm)
        answer_turns(turn, comm)


def run(options: Options) -> None:
    contestants = [options.contestant(str(ranks), ranks) for ranks in options.ranks]
    take_turns(contestants, options.rounds)
    rows = summarise(contestants)
    publish(options, "all-reduce", as_tables(rows), draw(rows, "all-reduce"), rows)


def summarise(contestants: list[Contestant]) -> list[dict[str, Any]]:
    """A row for each contestant and buffer: microseconds, and those of the picked algorithm over them, turn by turn."""
    rows = []
    for contestant in contestants:
        for dtype, sizes in contestant.answers[0].items():
            for size in sizes:
                turns = [answer[dtype][size] for answer in contestant.answers]
                for name in (name for name in NAMES if name in turns[0]):
                    row = {"ranks": contestant.ranks, "dtype": dtype, "size_kb": int(size), "name": name}
                    row |= spread("microseconds", [turn[name] for turn in turns])
                    row |= spread("picked_over", [turn[PICKED] / turn[name] for turn in turns])
                    rows.append(row | {"algorithm": turns[0]["algorithm"]})
    return rows


def groups(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each number of ranks and dtype."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(f"{row['ranks']} ranks, {row['dtype']}", []).append(row)
    return found


def as_tables(rows: list[dict[str, Any]]) -> str:
    """A table for each number of ranks and dtype: microseconds, and those of the picked algorithm over peers."""
    parts = []
    for group, its in groups(rows).items():
        lines: dict[int, dict[str, Any]] = {}
        for row in its:
            line = lines.setdefault(row["size_kb"], {"KB": row["size_kb"], "algorithm": row["algorithm"]})
            line |= {row["name"]: row["microseconds"], f"over {row['name']}": row["picked_over"]}
        names = [name for name in NAMES if name in lines[its[0]["size_kb"]]]
        columns = [Column("KB", "KB"), *(Column(name, name, 0) for name in names)]
        columns += [Column(f"picked / {name}", f"over {name}", 2) for name in (GLOO, RAW) if name in names]
        columns.append(Column("picked is", "algorithm"))
        parts.append(f"{group}: microseconds\n{table(list(lines.values()), columns)}")
    return "\n\n".join(parts)


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Microseconds over the size of the buffer: a panel for each number of ranks and dtype."""
    panels = [
        Lines(its, "size_kb", "microseconds", lambda r: r["name"], "KB", "microseconds", group, log="xy")
        for group, its in groups(rows).items()
    ]
    return lines(panels, title)
