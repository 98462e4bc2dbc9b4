"""Tensor parallelism against torch's parallelize_module: seconds of a step, memory of a rank, and bytes that are added.

    python -m benchmarks.tensor_parallel --ranks 1,2,4 --layers 4 --hidden 256

    ours            the engine, Plan(tensor=N): embedding, attention, feed-forward and logits cut over the ranks
    ours, sequence  norms, dropout and residuals on parts of the tokens, too
    torch           parallelize_module with ColwiseParallel and RowwiseParallel, over gloo and over our own backend
    torch, sequence with SequenceParallel besides

All train the same GPT on the same tokens, with the same loss and optimizer, on one thread a rank; they must have the
same losses. Each is a job of its own, and the jobs take turns. Memory is what a rank has resident at most beyond what
it had before the model was made. What our ranks add up over features is counted as they do it, and compared with

    tokens x hidden x 4 bytes x 2 x (2 layers + 1), forward and backward, and for each token 20 bytes of the loss
"""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import between, error_bars, publish, pyplot, spread, table
from benchmarks.turns import Contestant, answer_turns, numbers, ratios, take_turns

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
MIB = 2**20
LOSS_BYTES = 20  # of each token: the largest logit; the sum of exponentials and the target's logit, and their adjoints


def parse(argv: list[str]) -> argparse.Namespace:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=description)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="features of a token between blocks")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=512, help="different tokens")
    parser.add_argument("--context", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=4, help="samples of a step")
    parser.add_argument("--steps", type=int, default=3, help="training steps of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--ways", default=";".join(WAYS), help="which, with semicolons between them")
    parser.add_argument(
        "--out", type=Path, default=Path("results/tensor_parallel"), help="where to write .json and .png"
    )
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("layers", "hidden", "heads", "vocabulary", "context", "batch_size", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least 1")
    try:
        ranks = numbers(options.ranks)
    except ValueError:
        parser.error(f"--ranks {options.ranks}: write them as 1,2,4")
    shared = {"heads": options.heads, "tokens of --context": options.context, "words": options.vocabulary}
    for what, number in shared.items():
        if min(ranks) < 1 or any(number % n for n in ranks):
            parser.error(f"--ranks {options.ranks}: torch shares out {number} {what} evenly alone")
    unknown = [way for way in options.ways.split(";") if way not in WAYS]
    if unknown:
        parser.error(f"--ways {unknown[0]}: choose of {'; '.join(WAYS)}")
    return options


def build(options: argparse.Namespace) -> "nn.Module":
    import torch

    from mpi4dl import models

    torch.manual_seed(0)
    sizes = {"num_layers": options.layers, "num_heads": options.heads, "hidden": options.hidden, "tied": False}
    return models.build("gpt", None, vocabulary=options.vocabulary, context=options.context, **sizes)


def batch(options: argparse.Namespace) -> "tuple[torch.Tensor, torch.Tensor]":
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


def formula_bytes(options: argparse.Namespace, ranks: int) -> int:
    """What ranks that share features add up in a step."""
    tokens = options.batch_size * options.context
    return 0 if ranks == 1 else tokens * (options.hidden * 4 * 2 * (2 * options.layers + 1) + LOSS_BYTES)


class Ours:
    """The engine; `step()` is its loss, and `counted` what was added up over features in the last one."""

    def __init__(self, options: argparse.Namespace, comm: "Communicator", sequence: bool) -> None:
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


def parallelized(options: argparse.Namespace, comm: "Communicator", way: str) -> "nn.Module":
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


def torch_step(options: argparse.Namespace, comm: "Communicator", way: str) -> Callable[[], float]:
    from torch.nn import functional as F

    model = parallelized(options, comm, way)
    optimizer, (tokens, targets) = optimizer_of(model), batch(options)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@contextlib.contextmanager
def process_group(comm: "Communicator", way: str) -> Iterator[None]:
    """Within this context torch.distributed knows the same ranks, if the way needs that. Collective."""
    if way in (OURS, OURS_SEQUENCE):
        yield
    elif way in (GLOO, GLOO_SEQUENCE):
        from benchmarks.bursts import gloo

        with gloo(comm):
            yield
    else:
        import torch.distributed as dist

        import mpi4dl.torch_backend  # noqa: F401

        dist.init_process_group("mpi4dl")
        yield
        comm.barrier()
        dist.destroy_process_group()


def worker(options: argparse.Namespace) -> None:
    """An answer has the seconds of a step, the peak of memory, first losses, and what was added up over features."""
    import torch

    from mpi4dl._memory import MemoryMeter, keep_freed_memory, load_libraries
    from mpi4dl.comm import world

    keep_freed_memory()
    comm, way = world(), options.worker
    torch.set_num_threads(1)
    load_libraries("cpu")
    with process_group(comm, way):
        meter = MemoryMeter("cpu")
        ours = Ours(options, comm, way == OURS_SEQUENCE) if way in (OURS, OURS_SEQUENCE) else None
        step = torch_step(options, comm, way) if ours is None else ours
        losses = [step() for _ in range(CHECKED_STEPS)]
        counted = 0 if ours is None else ours.count()

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


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    ways = options.ways.split(";")
    results = []
    for ranks in numbers(options.ranks):
        own = ways if ranks > 1 else [way for way in ways if way in (OURS, GLOO)]
        arguments = ["-m", "benchmarks.tensor_parallel", *sys.argv[1:], "--worker"]
        contestants = [Contestant(way, ranks, [*arguments, way]) for way in own]
        take_turns(contestants, options.rounds)
        results += summarise(contestants, options)
    title = (
        f"GPT of {options.layers} layers of {options.hidden}, {options.batch_size} x {options.context} tokens a step, "
        "1 thread a rank"
    )
    print(f"{title}\n{as_table(results)}")
    publish(options, {"contestants": results}, plot(results, title))


def summarise(contestants: list[Contestant], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians over the turns, and of seconds over those of torch over gloo in the same turn.

    Raises SystemExit if losses differ, or bytes that were counted are not those of the formula.
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
                "counted_bytes": counted,
                "sent_bytes": counted * 2 * (each.ranks - 1) // each.ranks,
                **spread("seconds", [answer["seconds"] for answer in each.answers]),
                **spread("cpu_seconds", [answer["cpu_seconds"] for answer in each.answers]),
                **spread("mebibytes", [answer["mebibytes"] for answer in each.answers]),
                **spread("over_gloo", ratios(each, peer, "seconds")),
                **spread("cpu_over_gloo", ratios(each, peer, "cpu_seconds")),
            }
        )
    return rows


def as_table(results: list[dict[str, Any]]) -> str:
    head = ("ranks", "ms a step", "over torch", "(min-max)", "CPU ms", "over torch", "(min-max)")
    rows = [("", *head, "MiB of a rank", "MiB a rank sends")]
    for r in results:
        sent = f"{r['sent_bytes'] / MIB:.1f}" if r["counted_bytes"] else "-"
        numbers_of = [
            text
            for key, ratio in (("seconds", "over_gloo"), ("cpu_seconds", "cpu_over_gloo"))
            for text in (f"{1e3 * r[key]:.0f}", f"{r[ratio]:.2f}", between(r, ratio))
        ]
        rows.append((r["name"], str(r["ranks"]), *numbers_of, f"{r['mebibytes']:.0f}", sent))
    return table(rows)


def plot(results: list[dict[str, Any]], title: str) -> Any:
    """Seconds of a step, and memory of a rank: a bar for each contestant."""
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 0.35 * len(results) + 1.6), sharey=True)
    places = list(range(len(results)))
    names = [f"{r['name']}, {r['ranks']} rank{'s' if r['ranks'] > 1 else ''}" for r in results]
    style = {"color": [COLORS.get(r["name"], "0.6") for r in results], "capsize": 3, "error_kw": {"ecolor": "0.3"}}
    for axis, key, label in ((axes[0], "seconds", "seconds of a step"), (axes[1], "mebibytes", "MiB of a rank")):
        axis.barh(places, [r[key] for r in results], xerr=error_bars(results, key), **style)
        axis.set_xlabel(f"{label} (median of turns, min-max)")
    axes[0].set_yticks(places, names)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    return figure


if __name__ == "__main__":
    main()
