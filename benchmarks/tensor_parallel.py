"""Tensor parallelism against torch's parallelize_module: seconds of a step, memory of a rank, and bytes that are added.

    python -m benchmarks run tensor_parallel --ranks 1,2,4 --layers 4 --hidden 256

    ours            the engine, Plan(tensor=N): embedding, attention, feed-forward and logits cut over the ranks
    ours, sequence  norms, dropout and residuals on parts of the tokens, too
    torch           parallelize_module with ColwiseParallel and RowwiseParallel, over gloo and over our own backend
    torch, sequence with SequenceParallel besides

All train the same GPT on the same tokens, with the same loss and optimizer, on one thread a rank; they must have the
same losses. Each is a job of its own, and the jobs take turns. Memory is the peak of a rank above its memory before the
model was made. The bytes that our ranks add up over features are counted as they do it, and compared with

    tokens x hidden x 4 bytes x 2 x (2 layers + 1), forward and backward, and for each token 20 bytes of the loss
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as declared
from benchmarks.common.charts import Bars, bars
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import NAME, RANKS, publish
from benchmarks.common.results import MIB, Column, mebibytes, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns
from mpi4dl.options.kinds import choice

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpi4dl.comm import Communicator

OURS, OURS_SEQUENCE = "ours", "ours, sequence"
GLOO, GLOO_SEQUENCE = "torch, gloo", "torch, sequence, gloo"
OWN, OWN_SEQUENCE = "torch, our backend", "torch, sequence, our backend"
WAYS = (OURS, OURS_SEQUENCE, GLOO, OWN, GLOO_SEQUENCE, OWN_SEQUENCE)
COLORS = dict(zip(WAYS, ("tab:blue", "tab:cyan", "tab:orange", "tab:red", "tan", "salmon"), strict=True))
CHECKED_STEPS = 2
TOLERANCE = 1e-4  # of losses in float32
LOSS_BYTES = 20  # of each token: the largest logit; the sum of exponentials and the target's logit, and their adjoints
OPTIONS = (
    declared.ranks("1,2,4"),
    declared.count("--layers", 4),
    declared.count("--hidden", 256, "features of a token between blocks"),
    declared.HEADS,
    declared.count("--vocabulary", 512, "different tokens"),
    declared.count("--context", 256, "tokens of a sample"),
    declared.batch_size(4, "samples of a step"),
    declared.steps(3),
    declared.rounds(5),
    Option("--ways", listed(choice(*WAYS), ";"), ";".join(WAYS), "which, with semicolons between them"),
)
QUICK: dict[str, Any] = {"layers": 2, "hidden": 8, "heads": 2, "vocabulary": 16, "context": 8, "batch_size": 2}
QUICK |= {"ranks": "2", "steps": 1, "rounds": 1}
COLUMNS = (
    NAME,
    RANKS,
    Column("ms a step", "seconds", 0, 1e3),
    Column("over torch", "over_gloo", 2, ends=True),
    Column("CPU ms", "cpu_seconds", 0, 1e3),
    Column("over torch", "cpu_over_gloo", 2, ends=True),
    Column("MiB of a rank", "mebibytes", 0),
    mebibytes("MiB a rank sends", "sent_bytes", 1),
)


def check(options: Options) -> str | None:
    shared = {"heads": options.heads, "tokens of --context": options.context, "words": options.vocabulary}
    for what, number in shared.items():
        if any(number % ranks for ranks in options.ranks):
            return f"--ranks: torch shares out {number} {what} only evenly"
    return None


def build(options: Options) -> "nn.Module":
    import torch

    from mpi4dl import models

    torch.manual_seed(0)
    sizes = {"num_layers": options.layers, "num_heads": options.heads, "hidden": options.hidden, "tied": False}
    return models.build("gpt", None, vocabulary=options.vocabulary, context=options.context, **sizes)


def batch(options: Options) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(options.vocabulary, (options.batch_size, options.context + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def optimizer_of(model: "nn.Module") -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@contextlib.contextmanager
def summed_bytes(comm: "Communicator") -> Iterator[list[int]]:
    """The bytes of each tensor that is summed over these ranks within this context.

    Of those that share tokens a sum is in two halves, in each of which a rank sends (ranks - 1) / ranks of it.
    """
    found: list[int] = []
    reduce, exchange = comm.ireduce, comm.iexchange

    def counted(tensor: "torch.Tensor", *args: Any, **kwargs: Any) -> Any:
        found.append(tensor.nbytes)
        return reduce(tensor, *args, **kwargs)

    def half(sends: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(sum(tensor.nbytes for _, tensor in sends) * comm.size // (2 * (comm.size - 1)))
        return exchange(sends, *args, **kwargs)

    comm.ireduce, comm.iexchange = counted, half  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del comm.ireduce, comm.iexchange


def formula_bytes(options: Options, ranks: int) -> int:
    """What ranks that share features add up in a step."""
    tokens = options.batch_size * options.context
    return 0 if ranks == 1 else tokens * (options.hidden * 4 * 2 * (2 * options.layers + 1) + LOSS_BYTES)


class Ours:
    """The engine; `step()` is its loss, and `counted` what was added up over features in the last one."""

    def __init__(self, options: Options, comm: "Communicator", sequence: bool) -> None:
        from mpi4dl.engine import Engine
        from mpi4dl.parallel.pipeline.local_stages import LocalStages
        from mpi4dl.parallel.plan import Plan
        from mpi4dl.tasks.losses import token_loss

        more: dict[str, Any] = {"sequence": True} if sequence and comm.size > 1 else {}
        plan = Plan(((1,),), tensor=comm.size, **more)
        held = LocalStages.whole(build(options), plan, comm)
        self.engine = Engine(held, plan, optimizer_of(held), token_loss, comm=comm)
        self.tokens, self.targets = batch(options)
        self.counted = 0
        (part,) = held.parts.values()
        self.features = None if part.grid.features is None else part.grid.along((part.grid.features,))

    def __call__(self) -> float:
        return float(self.engine.step(self.tokens, self.targets, self.tokens.shape[1:]).loss)

    def count(self) -> int:
        """The bytes that ranks add up over features in one step."""
        if self.features is None:
            return 0
        with summed_bytes(self.features) as found:
            self()
        return sum(found)


def parallelized(options: Options, comm: "Communicator", way: str) -> "nn.Module":
    """The same model as torch's parallelize_module has it on these ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = build(options)
    if comm.size == 1:
        return model
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    sequence = way in (GLOO_SEQUENCE, OWN_SEQUENCE)
    between: Any = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        styles["embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        styles["norm"] = SequenceParallel()
    for name in (f"blocks.{i}" for i in range(options.layers)):
        column = (*(f"attention.{part}" for part in ("query", "key", "value")), "feed_forward.up")
        styles |= {f"{name}.{path}": ColwiseParallel() for path in column}
        styles |= {
            f"{name}.{path}.output": RowwiseParallel(output_layouts=between) for path in ("attention", "feed_forward")
        }
        if sequence:
            whole: Any = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            styles |= {f"{name}.norm1": SequenceParallel(), f"{name}.norm2": SequenceParallel()}
            styles[f"{name}.feed_forward"] = PrepareModuleInput(**whole)
            styles[f"{name}.attention"] = PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            )
    return parallelize_module(model, mesh, styles)


def torch_step(options: Options, comm: "Communicator", way: str) -> Callable[[], float]:
    from torch.nn import functional as F

    from benchmarks.common.ranks import loop

    model = parallelized(options, comm, way)
    return loop(
        model,
        optimizer_of(model),
        batch(options),
        loss_of=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    )


def work(options: Options) -> None:
    """An answer has the seconds of a step, the peak of memory, first losses, and the bytes added up over features."""
    import torch

    from benchmarks.common.ranks import begin, gloo, over_mpi
    from mpi4dl._memory import MemoryMeter, load_libraries

    comm, way = begin(), options.worker
    load_libraries("cpu")
    ours = way in (OURS, OURS_SEQUENCE)
    group = contextlib.nullcontext() if ours else gloo(comm) if way in (GLOO, GLOO_SEQUENCE) else over_mpi(comm)
    with group:
        meter = MemoryMeter("cpu")
        step = Ours(options, comm, way == OURS_SEQUENCE) if ours else torch_step(options, comm, way)
        losses = [step() for _ in range(CHECKED_STEPS)]
        counted = step.count() if isinstance(step, Ours) else 0

        def turn() -> dict[str, Any]:
            comm.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                step()
            each = [time.perf_counter() - began, time.process_time() - cpu, meter.peak_bytes()]
            seconds, cpu, peak = comm.all_reduce(torch.tensor(each, dtype=torch.float64), "max").tolist()
            took = {"seconds": seconds / options.steps, "cpu_seconds": cpu / options.steps}
            return {**took, "mebibytes": peak / MIB, "losses": losses, "counted_bytes": counted}

        answer_turns(turn, comm)


def run(options: Options) -> None:
    rows = []
    for ranks in options.ranks:
        ways = options.ways if ranks > 1 else [way for way in options.ways if way in (OURS, GLOO)]
        contestants = [options.contestant(way, ranks, way) for way in ways]
        take_turns(contestants, options.rounds)
        rows += summarise(contestants, options)
    tokens = f"{options.batch_size} x {options.context} tokens a step"
    title = f"GPT of {options.layers} layers of {options.hidden}, {tokens}, 1 thread a rank"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def summarise(contestants: list[Contestant], options: Options) -> list[dict[str, Any]]:
    """Medians over the turns, and of seconds over those of torch over gloo in the same turn.

    Raises SystemExit if losses differ, or the counted bytes are not those of the formula.
    """
    expected = contestants[0].answers[0]["losses"]
    peer = next((each for each in contestants if each.name == GLOO), contestants[0])
    rows = []
    for each in contestants:
        losses, counted = each.answers[0]["losses"], each.answers[0]["counted_bytes"]
        if not all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(losses, expected, strict=True)):
            raise SystemExit(f"{each.name} has the losses {losses}, {contestants[0].name} {expected}")
        if each.name in (OURS, OURS_SEQUENCE) and counted != formula_bytes(options, each.ranks):
            raise SystemExit(f"{counted} bytes were added up, by the formula {formula_bytes(options, each.ranks)}")
        rows.append(
            {
                "name": "plain PyTorch" if each.ranks == 1 and each.name == GLOO else each.name,
                "ranks": each.ranks,
                "counted_bytes": counted or None,
                "sent_bytes": counted * 2 * (each.ranks - 1) // each.ranks or None,
                **each.spreads("seconds", "cpu_seconds", "mebibytes"),
                **each.over(peer, over_gloo="seconds", cpu_over_gloo="cpu_seconds"),
            }
        )
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Seconds of a step, and memory of a rank."""
    panels = [Bars("seconds", "ms of a step", 1e3, 0), Bars("mebibytes", "MiB of a rank", digits=0)]
    return bars(rows, panels, title, [COLORS.get(row["name"], "0.6") for row in rows])
