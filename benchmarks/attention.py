"""Attention over spread tokens: memory and seconds of a rank by the ring, by gathering, and of plain PyTorch.

    python -m benchmarks.attention --tokens 1024,4096,16384 --ranks 4

    ring      keys and values go round the ranks, a few heads at a time          each rank has tokens / ranks queries
    gather    a rank has all keys and values, once in forward, once in backward
    plain     one process with all tokens, on one thread

A turn is forward and backward of one sequence, float32. Memory is what a process has resident at most beyond what it
had with its inputs, after one turn to warm up. Each contestant is a job of its own; they take turns.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import between, publish, pyplot, spread, table
from benchmarks.turns import Contestant, answer_turns, numbers, ratios, take_turns

WAYS = ("ring", "gather", "plain")
MIB = 2**20


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384,32768", help="lengths of sequences")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share the tokens")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--features", type=int, default=64, help="of each head")
    parser.add_argument("--causal", action="store_true", help="queries ask earlier tokens only")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("results/attention"), help="where to write .json and .png")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("heads", "features", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, but must be at least 1")
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: tokens are shared by two ranks or more")
    try:
        lengths = numbers(options.tokens)
    except ValueError:
        parser.error(f"--tokens {options.tokens}: write them as 1024,4096")
    if min(lengths) < options.ranks:
        parser.error(f"--tokens {options.tokens}: each of {options.ranks} ranks needs one token at least")
    return options


def worker(options: argparse.Namespace) -> None:
    import torch
    from torch.nn import functional as F

    from mpi4dl._memory import MemoryMeter, keep_freed_memory
    from mpi4dl.comm import world
    from mpi4dl.parallel import spatial

    comm = world() if options.worker != "plain" else None
    keep_freed_memory(False)  # what is resident is then what is in use
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    own = options.length if comm is None else len(range(comm.rank, options.length, comm.size))
    shape = (1, options.heads, own, options.features)
    inputs = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
    weights = torch.randn(shape, device=device)
    spread_as = None
    if comm is not None:
        grid = spatial.Grid(comm, tokens=comm.size)
        grid.attention = options.worker
        lengths = [len(range(rank, options.length, comm.size)) for rank in range(comm.size)]
        spread_as = spatial.Layout(grid, tiling_of(lengths), (None, 2))

    def turn() -> dict[str, Any]:
        meter = MemoryMeter(device)
        if comm is not None:
            comm.barrier()
        began = time.perf_counter()
        q, k, v = inputs if spread_as is None else [spatial.SpatialTensor(x, spread_as) for x in inputs]
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
    """Tokens in pieces of these lengths, of one sequence."""
    from mpi4dl.geometry import GridShape, Split, Tiling

    cuts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return Tiling.even(GridShape(1, len(lengths)), (1, cuts[-1])).replace(1, Split.at(cuts))


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    rows = []
    for length in numbers(options.tokens):
        arguments = ["-m", "benchmarks.attention", *sys.argv[1:], "--length", str(length), "--worker"]
        contestants = [Contestant(way, 1 if way == "plain" else options.ranks, [*arguments, way]) for way in WAYS]
        take_turns(contestants, options.rounds)
        rows.append(summarise(length, contestants))
    print(as_table(rows))
    publish(options, {"results": rows}, draw(rows, options.ranks))


def summarise(length: int, contestants: list[Contestant]) -> dict[str, Any]:
    """Medians of each, and the ring's memory over that by gathering, turn by turn."""
    row: dict[str, Any] = {"tokens": length}
    for way in contestants:
        for key in ("seconds", "mebibytes"):
            row |= spread(f"{way.name}_{key}", [answer[key] for answer in way.answers])
    ring, gathered, _ = contestants
    return row | spread("ratio", ratios(ring, gathered, "mebibytes"))


def as_table(rows: list[dict[str, Any]]) -> str:
    head = ["tokens", *(f"{way} MiB" for way in WAYS), "ring / gather", "(min-max)", *(f"{way} s" for way in WAYS)]
    return table(
        [head]
        + [
            [
                str(row["tokens"]),
                *(f"{row[f'{way}_mebibytes']:.1f}" for way in WAYS),
                f"{row['ratio']:.2f}",
                between(row, "ratio"),
                *(f"{row[f'{way}_seconds']:.2f}" for way in WAYS),
            ]
            for row in rows
        ]
    )


def draw(rows: list[dict[str, Any]], ranks: int) -> Any:
    figure, plots = pyplot().subplots(1, 2, figsize=(9, 3.6))
    names = {"ring": f"ring of {ranks}", "gather": f"gathered, {ranks} ranks", "plain": "plain PyTorch, 1 process"}
    for plot, key, label in zip(plots, ("mebibytes", "seconds"), ("MiB of a rank", "seconds"), strict=True):
        for way, name in names.items():
            plot.plot([row["tokens"] for row in rows], [row[f"{way}_{key}"] for row in rows], "o-", label=name)
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        plot.set_xlabel("tokens")
        plot.set_ylabel(label)
    plots[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
