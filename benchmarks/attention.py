"""Attention over spread tokens: memory and seconds of a rank by the ring, by gathering, and of plain PyTorch.

    python -m benchmarks run attention --tokens 1024,4096,16384 --ranks 4

    ring      keys and values go round the ranks, a few heads at a time          each rank has tokens / ranks queries
    gather    a rank has all keys and values, once in forward, once in backward
    plain     one process with all tokens, on one thread

A turn is forward and backward of one sequence, float32. Memory is the peak of a process above its memory with its
inputs, after one turn to warm up. Each contestant is a job of its own; they take turns.
"""

import time
from typing import Any

from benchmarks.common import options as declared
from benchmarks.common.charts import Lines, lines
from benchmarks.common.options import Options
from benchmarks.common.report import publish
from benchmarks.common.results import MIB, Column, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns

WAYS = ("ring", "gather", "plain")
OPTIONS = (
    declared.counts("--tokens", "1024,2048,4096,8192,16384,32768", "lengths of sequences"),
    declared.ranks("4"),
    declared.HEADS,
    declared.FEATURES,
    declared.CAUSAL,
    declared.rounds(3),
    declared.DEVICE,
)
QUICK = {"tokens": "5,16", "ranks": "2", "heads": 2, "features": 4, "rounds": 1}
COLUMNS = (
    Column("tokens", "tokens"),
    *(Column(head, head) for head in ("ranks", "way")),
    Column("MiB", "mebibytes", 1),
    Column("over gather", "over_gather", 2, ends=True),
    Column("seconds", "seconds", 2, ends=True),
)


def check(options: Options) -> str | None:
    if min(options.ranks) < 2:
        return "--ranks: at least 2 ranks share the tokens"
    if min(options.tokens) < max(options.ranks):
        return f"--tokens: each of {max(options.ranks)} ranks needs at least one"
    return None


def work(options: Options) -> None:
    """One contestant: attention of so many tokens in one way."""
    import torch
    from torch.nn import functional as F

    from mpi4dl._memory import MemoryMeter, keep_freed_memory
    from mpi4dl.comm import world
    from mpi4dl.parallel import spatial

    way, length = options.worker
    comm = world() if way != "plain" else None
    keep_freed_memory(False)  # resident memory is then memory in use
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    own = length if comm is None else len(range(comm.rank, length, comm.size))
    shape = (1, options.heads, own, options.features)
    inputs = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
    weights = torch.randn(shape, device=device)
    layout = None
    if comm is not None:
        grid = spatial.Grid(comm, tokens=comm.size)
        grid.attention = way
        lengths = [len(range(rank, length, comm.size)) for rank in range(comm.size)]
        layout = spatial.Layout(grid, tiling_of(lengths), (None, 2))

    def turn() -> dict[str, Any]:
        meter = MemoryMeter(device)
        if comm is not None:
            comm.barrier()
        began = time.perf_counter()
        q, k, v = inputs if layout is None else [spatial.SpatialTensor(x, layout) for x in inputs]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=options.causal)
        (y.local if isinstance(y, spatial.SpatialTensor) else y).backward(weights)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found = torch.tensor([time.perf_counter() - began, meter.peak_bytes()], dtype=torch.float64)
        for x in inputs:
            x.grad = None
        seconds, peak = found if comm is None else comm.all_reduce(found, "max")
        return {"seconds": float(seconds), "mebibytes": float(peak) / MIB}

    answer_turns(turn, comm)


def tiling_of(lengths: list[int]) -> Any:
    """Tokens of one sequence in parts of these lengths."""
    from mpi4dl.geometry import GridShape, Split, Tiling

    cuts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return Tiling.even(GridShape(1, len(lengths)), (1, cuts[-1])).replace(1, Split.at(cuts))


def run(options: Options) -> None:
    rows = []
    for ranks in options.ranks:
        for length in options.tokens:
            contestants = [options.contestant(way, 1 if way == "plain" else ranks, (way, length)) for way in WAYS]
            take_turns(contestants, options.rounds)
            rows += summarise(length, ranks, contestants)
    title = f"attention of {options.heads} heads of {options.features}, forward and backward"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def summarise(length: int, ranks: int, contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Medians of each, and its memory over that by gathering, turn by turn."""
    gather = contestants[WAYS.index("gather")]
    return [
        {"tokens": length, "ranks": ranks, "way": each.name}
        | each.spreads("mebibytes", "seconds")
        | each.over(gather, over_gather="mebibytes")
        for each in contestants
    ]


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    def named(row: Any) -> str:
        return "plain PyTorch, 1 process" if row["way"] == "plain" else f"{row['way']}, {row['ranks']} ranks"

    kinds = (("mebibytes", "MiB of a rank"), ("seconds", "seconds"))
    return lines([Lines(rows, "tokens", key, named, "tokens", label, log="xy") for key, label in kinds], title)
