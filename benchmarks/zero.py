"""ZeRO against torch.distributed over gloo: bytes per parameter, peak memory and time of a step of a transformer.

    python -m benchmarks run zero --features 512 --layers 8 --ranks 2

    plain PyTorch              one process, the whole batch
    ZeRO-0, 1, 2, 3            the engine; it also takes the norm of the gradient and checks that it is finite
    DDP                        DistributedDataParallel, its gradients being views of its buckets
    ZeroRedundancyOptimizer    the same, with an optimizer that shards its state: views of buckets too
    FSDP2                      fully_shard on each encoder layer; "-kept" gathers once for forward and backward

All train an encoder by Adam in float32 on few tokens, so that the optimizer and communication take most of the time, as
they do of large models. Their losses must agree to 1e-4, or nothing is measured. They take turns: plain PyTorch in one
process, all others on the same ranks, burst by burst.

Memory is measured in a job of its own for each: the tensors that are alive while the optimizer works and after it, as
Python sees them, and the peak of the process without interpreter and libraries, of the largest rank.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import options as declared
from benchmarks.common.charts import OTHERS, PEERS, Bars, bars
from benchmarks.common.charts import PLAIN as GREY
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import NAME, publish
from benchmarks.common.results import Column, mebibytes, spread, table
from benchmarks.common.turns import answer_turns, measure_once, take_turns
from benchmarks.peers import TRANSFORMER, Task
from mpi4dl._wording import counted
from mpi4dl.options.kinds import choice

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from benchmarks.common.ranks import Step
    from mpi4dl.comm import Communicator

PLAIN = "plain PyTorch"
NAMES = ("ZeRO-0", "DDP", "ZeRO-1", "ZeroRedundancyOptimizer", "ZeRO-2", "FSDP2-kept", "ZeRO-3", "FSDP2")
LEARNING_RATE = 1e-4
CHECKED_STEPS = 3
TOLERANCE = 1e-4
OPTIONS = (
    declared.count("--features", 512, "of a token, in 8 heads"),
    declared.count("--layers", 8, "of the encoder"),
    declared.batch_size(1, "images of each rank in a step"),
    declared.count("--image-size", 32, "in pixels; a token is a patch of 16 x 16"),
    declared.ranks("2"),
    Option("--variants", listed(choice(*NAMES)), ",".join(NAMES), "who takes part besides plain PyTorch"),
    declared.THREADS,
    declared.steps(3),
    declared.rounds(10),
)
QUICK = {"features": 32, "layers": 1, "steps": 1, "rounds": 1, "variants": "ZeRO-1,ZeroRedundancyOptimizer"}
COLUMNS = (
    NAME,
    Column("ranks", "job_ranks"),
    Column("step ms", "median_seconds", 0, 1e3),
    Column("over plain", "over_plain", 2),
    Column("over its peer", "over_peer", 2, ends=True),
    Column("bytes per parameter", "bytes_per_parameter", 2),
    Column("formula", "bytes_per_parameter_by_formula", 2),
    mebibytes("peak MiB", "peak_bytes"),
)


def check(options: Options) -> str | None:
    if min(options.ranks) < 2:
        return "--ranks: ZeRO shards what at least 2 ranks have"
    if options.features % 8 or options.image_size % 16:
        return "--features, --image-size: 8 must divide the one, 16 the other"
    return None


def task_of(features: int, num_layers: int, size_px: int, num_images: int) -> Task:
    """An encoder, trained on so many images of all ranks."""
    return Task(TRANSFORMER, {"features": features, "num_layers": num_layers}, size_px, num_images, 1)


def num_parameters(task: Task) -> int:
    import torch

    with torch.device("meta"):
        return sum(p.numel() for p in task.layers().parameters())


class Trained(NamedTuple):
    """A step, which returns the loss of this rank's samples (of all of them from our engine), and its optimizer.

    `parameters` are those whose gradients only PyTorch keeps; ours lie in buckets, which Python knows.
    """

    step: "Step"
    optimizer: "torch.optim.Optimizer"
    parameters: "Sequence[Tensor]"


Make = Callable[[Task, "Communicator"], Trained]


def adam(parameters: Any) -> "torch.optim.Adam":
    import torch

    return torch.optim.Adam(parameters, lr=LEARNING_RATE)


def trained(model: "nn.Module", optimizer: "torch.optim.Optimizer", batch: "tuple[Tensor, Tensor]") -> Trained:
    from benchmarks.common.ranks import loop

    return Trained(loop(model, optimizer, batch), optimizer, list(model.parameters()))


def plain(task: Task, comm: "Communicator") -> Trained:
    model = task.layers()
    return trained(model, adam(model.parameters()), task.batch())


def ours(zero: int) -> Make:
    def make(task: Task, comm: "Communicator") -> Trained:
        from torch.nn import functional as F

        from mpi4dl.engine import Engine
        from mpi4dl.parallel.plan import Plan

        model = task.layers()
        optimizer = adam(model.parameters())
        engine = Engine(model, Plan(data=comm.size, zero=zero), optimizer, F.cross_entropy, comm=comm)
        images, labels = task.share(comm.rank, comm.size)[0], task.batch()[1]
        size = (task.size_px, task.size_px)
        return Trained(lambda: engine.step(images, labels, size).loss, optimizer, [])

    return make


def ddp(task: Task, comm: "Communicator") -> Trained:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(task.layers(), gradient_as_bucket_view=True)
    return trained(model, adam(model.parameters()), task.share(comm.rank, comm.size))


def redundancy(task: Task, comm: "Communicator") -> Trained:
    import torch

    with warnings.catch_warnings():  # of its own use of torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(task.layers(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=LEARNING_RATE
    )
    return trained(model, optimizer, task.share(comm.rank, comm.size))


def fully_sharded(reshard: bool) -> Make:
    """FSDP2, each encoder layer on its own as its documentation advises.

    Without `reshard`, parameters stay from forward to backward, which is as much communication as ZeRO 2 makes.
    """

    def make(task: Task, comm: "Communicator") -> Trained:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = task.layers()
        mesh = init_device_mesh("cpu", (comm.size,))
        for layer in list(model)[1:-1]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return trained(model, adam(model.parameters()), task.share(comm.rank, comm.size))

    return make


class Variant(NamedTuple):
    """A contestant, its peer of torch.distributed, and the bytes that it shards over the ranks.

    `whole` and `shared` are the bytes per parameter that a rank has of all parameters and of its part of them, while
    the optimizer works: 4 for a parameter, 4 for its gradient, 8 for Adam's state.
    """

    make: Make
    peer: str | None
    whole: int
    shared: int

    def formula(self, num_ranks: int) -> float:
        return self.whole + self.shared / num_ranks


VARIANTS = {
    PLAIN: Variant(plain, None, 16, 0),
    "ZeRO-0": Variant(ours(0), "DDP", 16, 0),
    "DDP": Variant(ddp, None, 16, 0),
    "ZeRO-1": Variant(ours(1), "ZeroRedundancyOptimizer", 8, 8),
    "ZeroRedundancyOptimizer": Variant(redundancy, None, 8, 8),
    "ZeRO-2": Variant(ours(2), "FSDP2-kept", 4, 12),
    "FSDP2-kept": Variant(fully_sharded(reshard=False), None, 0, 16),
    "ZeRO-3": Variant(ours(3), "FSDP2", 0, 16),
    "FSDP2": Variant(fully_sharded(reshard=True), None, 0, 16),
}


class LiveTensors:
    """Counts the storages of tensors that Python knows and that were made after this object."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()

    def num_bytes(self, more: "Iterable[Tensor | None]" = ()) -> int:
        """Each storage counts once. `more` are tensors that Python might not have met yet, such as gradients."""
        from torch import Tensor, nn
        from torch.distributed.tensor import DTensor

        gc.collect()
        known = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
        there = (x for x in more if x is not None)
        local = [x.to_local() if isinstance(x, DTensor) else x for x in there]
        storages = [x.untyped_storage() for x in [*known, *local] if not x.is_meta]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr()}.values())


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


def work(options: Options) -> None:
    """Times of some variants on the ranks of this job, or the memory of one."""
    from benchmarks.common.ranks import begin, gloo

    names, num_images, times = options.worker
    comm = begin(options.threads, keep=True if times else None)
    task = task_of(options.features, options.layers, options.image_size, num_images)
    with gloo(comm):
        if times:
            time_steps(options, task, comm, names)
        else:
            measure_memory(task, comm, VARIANTS[names[0]])


def time_steps(options: Options, task: Task, comm: "Communicator", names: list[str]) -> None:
    """An answer has the seconds of a step by contestant.

    Raises `Refusal` on all ranks if losses differ from those of plain PyTorch.
    """
    import torch

    from benchmarks.common.ranks import burst_seconds, first_losses, must_agree

    expected = []
    if comm.rank == 0:
        alone = plain(task, comm)
        expected = [alone.step() for _ in range(CHECKED_STEPS)]
        del alone
    expected = comm.broadcast_object(expected)
    steps = {name: VARIANTS[name].make(task, comm).step for name in names}
    for name, step in steps.items():
        must_agree(comm, name, first_losses(comm, step, CHECKED_STEPS), expected, TOLERANCE)
    cpu = torch.device("cpu")
    answer_turns(lambda: {name: burst_seconds(comm, step, options.steps, cpu) for name, step in steps.items()}, comm)


def measure_memory(task: Task, comm: "Communicator", variant: Variant) -> None:
    """An answer has the bytes of the rank that has most."""
    import torch

    from mpi4dl._memory import MemoryMeter

    variant.make(task_of(8, 1, 16, comm.size), comm).step()  # PyTorch loads its modules
    meter, live = MemoryMeter("cpu"), LiveTensors()

    def turn() -> dict[str, Any]:
        made = variant.make(task, comm)
        made.step()
        made.step()
        found = [meter.peak_bytes(), *count_bytes(made, live)]
        peak, most, after = comm.all_reduce(torch.tensor(found), "max").tolist()
        return {"peak_bytes": peak, "live_bytes": max(most, after)}

    answer_turns(turn, comm)


def run(options: Options) -> None:
    rows = []
    for ranks in options.ranks:
        images = ranks * options.batch_size
        alone = options.contestant(PLAIN, 1, ([PLAIN], images, True))
        together = options.contestant(f"{ranks} ranks", ranks, (options.variants, images, True))
        take_turns([alone, together], options.rounds)
        turns = [a | b for a, b in zip(alone.answers, together.answers, strict=True)]
        memory = {
            name: measure_once(options.contestant(name, 1 if name == PLAIN else ranks, ([name], images, False)))
            for name in (PLAIN, *options.variants)
        }
        number = num_parameters(task_of(options.features, options.layers, options.image_size, images))
        rows += summarise(turns, memory, ranks, number)
    encoder = f"encoder of {number / 1e6:.1f} M parameters, Adam, float32"
    title = f"{encoder}, {counted(options.batch_size, 'image')} of {options.image_size} px a rank"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows, num_parameters=number)


def summarise(
    turns: list[dict[str, float]], memory: dict[str, dict[str, int]], num_ranks: int, number: int
) -> list[dict[str, Any]]:
    """Medians of the seconds, and medians of the ratios to plain PyTorch and to the peer in the same turn.

    `number`: of parameters.
    """
    rows = []
    for name in turns[0]:
        variant = VARIANTS[name]
        row: dict[str, Any] = {
            "name": name,
            "job_ranks": num_ranks,
            **spread("median_seconds", [turn[name] for turn in turns]),
            **spread("over_plain", [turn[name] / turn[PLAIN] for turn in turns]),
            "peer": variant.peer if variant.peer in turns[0] else None,
            "bytes_per_parameter": memory[name]["live_bytes"] / number,
            "bytes_per_parameter_by_formula": variant.formula(num_ranks),
            "peak_bytes": memory[name]["peak_bytes"],
        }
        if row["peer"]:
            row |= spread("over_peer", [turn[name] / turn[row["peer"]] for turn in turns])
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Bytes per parameter with the formula's value, peak memory, and time of a step over plain PyTorch's."""
    panels = [
        Bars("bytes_per_parameter", "bytes per parameter (line: formula)", mark="bytes_per_parameter_by_formula"),
        Bars("peak_bytes", "peak memory of a rank (MiB)", 1 / 2**20, 0),
        Bars("over_plain", "time of a step, plain PyTorch = 1", baseline=1.0),
    ]
    colors = [GREY if row["name"] == PLAIN else OTHERS if "ZeRO-" in row["name"] else PEERS for row in rows]
    return bars(rows, panels, title, colors, [f"{row['name']}, {row['job_ranks']} ranks" for row in rows])
