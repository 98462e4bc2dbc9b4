"""Tensor against expert parallelism of one layer of experts: bytes that travel for each token, and seconds of a pass.

    python -m benchmarks run moe --ranks 2,4,8

    tensor          ranks have the same tokens and a part of each expert; their outputs are all-reduced
    whole experts   ranks have the same tokens and some experts each; their outputs are all-reduced
    experts         ranks have their own tokens and some experts each; tokens travel there and back (all-to-all)

The same tokens, parameters and choices everywhere, forward and backward, on one thread a rank; all must make the same.
Bytes are counted as they are sent, over all ranks, and compared with a formula for d features of 4 bytes:

    tensor, whole   2 (N - 1) d for each token forward, in a ring, and as much backward: it grows with the ranks
    experts         2 messages of d forward and 2 backward for each token and other rank that has experts for it, which
                    are at most the k that it chose; beside them k weights there and back, and k numbers of experts
"""

import time
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as declared
from benchmarks.common.charts import Lines, lines
from benchmarks.common.options import Options
from benchmarks.common.report import NAME, RANKS, publish
from benchmarks.common.results import Column, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns

if TYPE_CHECKING:
    import torch

    from mpi4dl.comm import Communicator

TENSOR, WHOLE, EXPERTS = "tensor", "whole experts", "experts"
STYLES = {"experts": "experts", "experts.up": "column", "experts.output": "row"}
ITEM_BYTES = 4  # of a feature, a weight, and a number of an expert
COUNT_BYTES = 8
OPTIONS = (
    declared.ranks("2,4,8"),
    declared.count("--tokens", 2048, "of a pass, over all ranks"),
    declared.count("--hidden", 256, "features of a token"),
    declared.count("--ff-dim", 512, "width of an expert"),
    declared.count("--experts", 8),
    declared.count("--top-k", 2, "experts of a token"),
    declared.steps(3),
    declared.rounds(5),
)
QUICK = {"tokens": 12, "ranks": "2,3", "hidden": 4, "ff_dim": 4, "rounds": 1, "steps": 1}
COLUMNS = (
    NAME,
    RANKS,
    Column("bytes a token", "bytes", 0),
    Column("formula", "formula", 0),
    Column("ms a pass", "milliseconds", 1, ends=True),
    Column("over tensor", "over_tensor", 2, ends=True),
    Column("CPU ms", "cpu_milliseconds", 1),
)


def check(options: Options) -> str | None:
    most = max(options.ranks)
    if options.experts < max(most, options.top_k) or options.tokens % most or options.ff_dim < most:
        return (
            f"--ranks: {most} ranks share {options.experts} experts of width {options.ff_dim}, and {options.tokens} "
            f"tokens: it takes as many of each, a multiple of tokens, and at least --top-k {options.top_k} experts"
        )
    return None


def contestants(options: Options) -> list[Contestant]:
    """One process, and for each number of ranks each way."""
    several = [(way, ranks) for ranks in options.ranks if ranks > 1 for way in (TENSOR, WHOLE, EXPERTS)]
    return [options.contestant(way, ranks, way) for way, ranks in [(EXPERTS, 1), *several]]


class Traffic:
    """The bytes that this process sends, over any communicator; an all-reduce as a ring sends it."""

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
    """The layer on these ranks; a pass returns the sum of its squared outputs, and leaves gradients."""

    def __init__(self, options: Options, comm: "Communicator", way: str) -> None:
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


def work(options: Options) -> None:
    """An answer has seconds and CPU seconds of a pass, its bytes and those of the formula, and the sum of outputs."""
    import torch

    from benchmarks.common.ranks import begin

    comm = begin()
    layer, traffic = Layer(options, comm, options.worker), Traffic()

    def turn() -> dict[str, Any]:
        comm.barrier()
        outputs, sent, steps = 0.0, 0.0, options.steps
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            before = traffic.sent
            outputs = layer()
            sent += traffic.sent - before
        own = torch.tensor([time.process_time() - cpu, sent], dtype=torch.float64)
        seconds = time.perf_counter() - start
        cpu_seconds, num_bytes = (comm.all_reduce(own) / steps).tolist()
        return {
            "milliseconds": 1e3 * seconds / steps,
            "cpu_milliseconds": 1e3 * cpu_seconds,
            "bytes": num_bytes - COUNT_BYTES * 2 * (comm.size - 1),  # without the sum of outputs, to compare
            "outputs": outputs,
            "formula": layer.formula(options.worker),
            "leaving": layer.rows_leaving(),
        }

    answer_turns(turn, comm)


def run(options: Options) -> None:
    found = contestants(options)
    take_turns(found, options.rounds)
    rows = summarise(options, found)
    experts = f"{options.experts} experts of {options.hidden} x {options.ff_dim}, {options.top_k} a token"
    title = f"{experts}, {options.tokens} tokens; thin lines are the formulas"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def summarise(options: Options, found: list[Contestant]) -> list[dict[str, Any]]:
    """Medians of each; ratios are to tensor parallelism on as many ranks, turn by turn. Raises SystemExit if unlike."""
    rows = []
    expected = found[0].answers[0]["outputs"]
    for each in found:
        outputs = each.answers[0]["outputs"]
        if abs(outputs - expected) > 1e-4 * abs(expected):
            raise SystemExit(f"{each.name} on {each.ranks} ranks made {outputs}, one process {expected}")
        tensor = next((o for o in found if o.name == TENSOR and o.ranks == each.ranks), each)
        row: dict[str, Any] = {"name": each.name if each.ranks > 1 else "one process", "ranks": each.ranks}
        row |= {key: each.answers[-1][key] / options.tokens for key in ("bytes", "formula", "leaving")}
        row |= each.spreads("milliseconds", "cpu_milliseconds")
        rows.append(row | each.over(tensor, over_tensor="milliseconds"))
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Bytes of a token, with the formulas, and milliseconds of a pass, against the number of ranks."""
    several = [row for row in rows if row["ranks"] > 1]
    sent = Lines(
        several,
        "ranks",
        "bytes",
        lambda r: r["name"],
        "ranks",
        "KiB sent for each token",
        scale=1 / 1024,
        formula="formula",
    )
    seconds = Lines(several, "ranks", "milliseconds", lambda r: r["name"], "ranks", "ms of a pass")
    return lines([sent, seconds], title)
