"""Tensor against expert parallelism of one layer of experts: bytes that travel for each token, and seconds of a pass.

    python -m benchmarks.moe --ranks 2,4,8

    tensor          ranks have the same tokens and a part of each expert; what they make is all-reduced
    whole experts   ranks have the same tokens and some experts each; what they make is all-reduced
    experts         ranks have their own tokens and some experts each; tokens travel there and back (all-to-all)

The same tokens, parameters and choices everywhere, forward and backward, on one thread a rank; all must make the same.
Bytes are counted as they are sent, over all ranks, and compared with what d features of 4 bytes should take:

    tensor, whole   2 (N - 1) d for each token forward, in a ring, and as much backward: it grows with the ranks
    experts         2 messages of d forward and 2 backward for each token and other rank that has experts for it, which
                    are at most the k that it chose; beside them k weights there and back, and k numbers of experts
"""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import between, error_bars, publish, pyplot, spread, table
from benchmarks.turns import Contestant, answer_turns, numbers, ratios, take_turns

if TYPE_CHECKING:
    import torch

    from mpi4dl.comm import Communicator

TENSOR, WHOLE, EXPERTS = "tensor", "whole experts", "experts"
COLOURS = {TENSOR: "tab:orange", WHOLE: "tan", EXPERTS: "tab:blue"}
STYLES = {"experts": "experts", "experts.up": "column", "experts.output": "row"}
KIB = 1024
ITEM_BYTES = 4  # of a feature, a weight, and a number of an expert
COUNT_BYTES = 8


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks")
    parser.add_argument("--tokens", type=int, default=2048, help="of a pass, over all ranks")
    parser.add_argument("--hidden", type=int, default=256, help="features of a token")
    parser.add_argument("--ff-dim", type=int, default=512, help="width of an expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token")
    parser.add_argument("--steps", type=int, default=3, help="passes of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--out", type=Path, default=Path("results/moe"), help="where to write .json and .png")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("tokens", "hidden", "ff_dim", "experts", "top_k", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least 1")
    try:
        fewest = min(numbers(options.ranks))
    except ValueError:
        parser.error(f"--ranks {options.ranks}: write them as 1,2,4")
    if fewest < 1:
        parser.error(f"--ranks {options.ranks}: each is at least 1")
    most = max(numbers(options.ranks))
    if options.experts < max(most, options.top_k) or options.tokens % most or options.ff_dim < most:
        parser.error(
            f"{most} ranks share {options.experts} experts of width {options.ff_dim}, and {options.tokens} tokens: it "
            f"takes as many of each, a multiple of tokens, and at least --top-k {options.top_k} experts"
        )
    return options


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """One process, and for each number of ranks each way."""
    flags = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in FLAGS]
    found = [Contestant(EXPERTS, 1, ["-m", "benchmarks.moe", *flags, "--worker", EXPERTS])]
    for ranks in numbers(options.ranks):
        for way in (TENSOR, WHOLE, EXPERTS):
            if ranks > 1:
                found.append(Contestant(way, ranks, ["-m", "benchmarks.moe", *flags, "--worker", way]))
    return found


FLAGS = ("ranks", "tokens", "hidden", "ff-dim", "experts", "top-k", "steps")


class Traffic:
    """The bytes that this process sends, over whatever communicator; an all-reduce as a ring sends it."""

    def __init__(self) -> None:
        from mpi4dl.comm import Communicator

        self.sent, self._inside = 0.0, False
        exchange, reduce = Communicator.iexchange, Communicator.ireduce
        traffic = self

        def iexchange(self: Any, sends: Any, *args: Any, **kwargs: Any) -> Any:
            if not traffic._inside:
                traffic.sent += sum(tensor.nbytes for peer, tensor in sends if peer != self.rank)
            return exchange(self, sends, *args, **kwargs)

        def ireduce(self: Any, tensor: "torch.Tensor", *args: Any, **kwargs: Any) -> Any:
            traffic.sent += tensor.nbytes * 2 * (self.size - 1) / self.size
            traffic._inside = True
            try:
                return reduce(self, tensor, *args, **kwargs)
            finally:
                traffic._inside = False

        Communicator.iexchange, Communicator.ireduce = iexchange, ireduce  # type: ignore[method-assign, assignment]


class Layer:
    """The layer on these ranks; a pass returns what its outputs come to, and leaves gradients."""

    def __init__(self, options: argparse.Namespace, comm: "Communicator", way: str) -> None:
        import torch
        from torch import nn

        from mpi4dl.models.experts import Experts
        from mpi4dl.parallel.plan import Plan
        from mpi4dl.parallel.tensor.cutting import cut_parameters
        from mpi4dl.parallel.tensor.styles import cutting_of

        torch.manual_seed(0)
        self.options, self.comm = options, comm
        self.model = nn.Module()
        self.model.experts = Experts(options.experts, options.hidden, options.ff_dim)
        of_tokens = way == EXPERTS
        number = {"experts": comm.size} if of_tokens else {"tensor": comm.size}
        plan = Plan(((1,),), moe="tensor" if way == TENSOR else "expert", **number)
        self.grid, self.own = plan.grid(comm), of_tokens
        if comm.size > 1:
            cut_parameters(self.model, cutting_of(self.model, STYLES, plan.degrees), self.grid)
        self.x = torch.randn(options.tokens, options.hidden)
        scores = torch.randn(options.tokens, options.experts)
        self.chosen = scores.topk(options.top_k).indices
        self.weights = scores.gather(1, self.chosen).softmax(1)

    def _part(self, x: "torch.Tensor") -> "torch.Tensor":
        from mpi4dl.geometry import BATCH
        from mpi4dl.parallel.spatial.sharding import even_layout
        from mpi4dl.parallel.spatial.tensor import wrap

        own, number = x, self.options.tokens
        layout = even_layout(self.grid, (number, 1))
        layout = layout.with_dims(dim if axis == BATCH else None for axis, dim in enumerate(layout.dims))
        if layout.dims[BATCH] is not None:
            own = x[slice(*layout.owned[BATCH])]
        return wrap(own.detach().requires_grad_(x.is_floating_point()), layout)

    def __call__(self) -> float:
        import torch

        for p in self.model.parameters():
            p.grad = None
        y = self.model.experts(*map(self._part, (self.x, self.chosen, self.weights)))
        local = getattr(y, "local", y)
        objective = local.square().sum() / (1 if self.own else self.comm.size)
        objective.backward()
        return float(self.comm.all_reduce(torch.tensor(objective.item(), dtype=torch.float64)))

    def formula(self, way: str) -> float:
        """The bytes that all ranks should send in a pass."""
        options, ranks = self.options, self.comm.size
        if way != EXPERTS:
            return 2 * 2 * (ranks - 1) * options.tokens * options.hidden * ITEM_BYTES
        leave = self.rows_leaving()
        each = 4 * options.hidden + 2 * options.top_k + options.top_k
        return leave * each * ITEM_BYTES + ranks * (ranks - 1) * COUNT_BYTES

    def rows_leaving(self) -> int:
        """For each token the ranks that have experts of it, but for its own, added up."""
        from mpi4dl.geometry import even_cuts

        ranks, options = self.comm.size, self.options
        share = options.tokens // ranks
        cuts = even_cuts(options.experts, ranks)
        owners = [next(r for r in range(ranks) if cuts[r] <= e < cuts[r + 1]) for e in range(options.experts)]
        choices = self.chosen.tolist()
        return sum(len({owners[e] for e in chosen} - {i // share}) for i, chosen in enumerate(choices))


def worker(options: argparse.Namespace) -> None:
    """An answer has seconds and CPU seconds of a pass, its bytes and what they should be, and what came out."""
    import torch

    from mpi4dl._memory import keep_freed_memory
    from mpi4dl.comm import world

    keep_freed_memory()
    comm = world()
    torch.set_num_threads(1)
    layer, traffic = Layer(options, comm, options.worker), Traffic()

    def work() -> dict[str, Any]:
        comm.barrier()
        came, sent, steps = 0.0, 0.0, options.steps
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            before = traffic.sent
            came = layer()
            sent += traffic.sent - before
        own = torch.tensor([time.process_time() - cpu, sent], dtype=torch.float64)
        seconds = time.perf_counter() - start
        total = comm.all_reduce(own) / steps
        answer = {"seconds": seconds / steps, "cpu": float(total[0]), "bytes": float(total[1]), "came": came}
        # What a pass adds up at its end, to compare, is no part of it.
        answer["bytes"] -= COUNT_BYTES * 2 * (comm.size - 1)
        return answer | {"formula": layer.formula(options.worker), "leaving": layer.rows_leaving()}

    answer_turns(work, comm)


def summarise(options: argparse.Namespace, found: list[Contestant]) -> list[dict[str, Any]]:
    """Medians of each; ratios are to tensor parallelism on as many ranks, turn by turn. Raises SystemExit if unlike."""
    rows = []
    came = found[0].answers[0]["came"]
    for each in found:
        if abs(each.answers[0]["came"] - came) > 1e-4 * abs(came):
            raise SystemExit(f"{each.label} on {each.ranks} ranks made {each.answers[0]['came']}, one process {came}")
        tensor = next((o for o in found if o.name == TENSOR and o.ranks == each.ranks), each)
        last = each.answers[-1]
        row: dict[str, Any] = {"name": each.name, "ranks": each.ranks, "bytes": last["bytes"] / options.tokens}
        row |= {"formula": last["formula"] / options.tokens, "leaving": last["leaving"] / options.tokens}
        row |= spread("milliseconds", [1e3 * answer["seconds"] for answer in each.answers])
        row |= spread("cpu", [1e3 * answer["cpu"] for answer in each.answers])
        rows.append(row | spread("over_tensor", ratios(each, tensor, "seconds")))
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    head = ["", "ranks", "bytes a token", "formula", "ms a pass", "(min-max)", "over tensor", "(min-max)", "CPU ms"]
    cells = [
        [
            row["name"] if row["ranks"] > 1 else "one process",
            str(row["ranks"]),
            f"{row['bytes']:.0f}",
            f"{row['formula']:.0f}",
            f"{row['milliseconds']:.1f}",
            between(row, "milliseconds"),
            f"{row['over_tensor']:.2f}",
            between(row, "over_tensor"),
            f"{row['cpu']:.1f}",
        ]
        for row in rows
    ]
    return table([head, *cells])


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Bytes of a token, with the formulas dashed, and milliseconds of a pass, against the number of ranks."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9.5, 3.8))
    names = list(dict.fromkeys(row["name"] for row in rows))
    for name in names:
        own = [row for row in rows if row["name"] == name and row["ranks"] > 1]
        colour = COLOURS[name]
        ranks = [row["ranks"] for row in own]
        left.plot(ranks, [row["bytes"] / KIB for row in own], "o", color=colour, label=f"{name}, counted")
        left.plot(ranks, [row["formula"] / KIB for row in own], "-", color=colour, lw=1)
        times, bars = [row["milliseconds"] for row in own], error_bars(own, "milliseconds")
        right.errorbar(ranks, times, yerr=bars, fmt="o-", color=colour, capsize=3, label=name)
    left.set_ylabel("KiB sent for each token, all ranks")
    right.set_ylabel("ms of a pass, forward and backward")
    for plot in (left, right):
        plot.set_xticks(sorted({row["ranks"] for row in rows if row["ranks"] > 1}))
        plot.set_xlabel("ranks")
        plot.set_ylim(bottom=0)
        plot.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker is not None:
        worker(options)
        return
    found = contestants(options)
    take_turns(found, options.rounds)
    rows = summarise(options, found)
    title = (
        f"{options.experts} experts of {options.hidden} x {options.ff_dim}, {options.top_k} a token, "
        f"{options.tokens} tokens; lines on the left are the formulas"
    )
    print(f"{title}\n{as_table(rows)}")
    publish(options, {"contestants": rows}, draw(rows, title))


if __name__ == "__main__":
    main()
