"""Published results of others beside our estimates, of which each table is fitted in one point.

    python -m benchmarks run published

The layers' seconds follow from counted FLOPs, bytes and operators by the rates of the device's data sheet. One factor
on all of them is fitted to the first row of a table; all other rows then follow from the plan alone.

    torchgpipe, AmoebaNet-D (18, 256)    Kim et al., "torchgpipe: on-the-fly pipeline parallelism for training giant
                                         models" (2020), and the benchmarks of its repository
    torchgpipe, ResNet-101               the same
    Megatron-LM, GPT of 1.7 to 1,008 billion parameters
                                         Narayanan et al., "Efficient large-scale language model training on GPU
                                         clusters using Megatron-LM" (SC 2021), table 1: on 32 to 3,072 A100
    Hy-Fi                                Jain et al., "Hy-Fi: Hybrid five-dimensional parallel DNN training on
                                         high-performance GPU clusters" (ISC 2022): speedups in its abstract
    GEMS                                 Jain et al., "GEMS: GPU-enabled memory-aware model-parallelism system for
                                         distributed DNN training" (SC 2020): efficiency in its abstract
    MPI4DL                               benchmark_resnet_sp_inference.log among the examples of its repository

Abstracts give neither the plan nor the batch of their numbers, nor the size of the images: these are our choice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import NAME, publish
from benchmarks.common.results import Column, table
from mpi4dl._palette import CURVES
from mpi4dl.options.kinds import TEXT

if TYPE_CHECKING:
    from torch import nn

    from mpi4dl.parallel.costs.machine import Machine
    from mpi4dl.parallel.plan import Plan

OPTIONS = (Option("--tables", listed(TEXT), "amoebanetd,resnet101,megatron,hyfi,gems,mpi4dl", "published tables"),)
QUICK = {"tables": "resnet101"}
COLUMNS = (
    NAME,
    Column("published", "published", 1),
    Column("estimated", "estimated", 1),
    Column("ratio", "ratio", 2),
    Column("bubble %", "bubble", 0),
)
PIXELS, CLASSES = 224, 1000
FEW_TABLES = 3  # up to which the panels are in one column


class Cell(NamedTuple):
    """A published number: samples a second of a plan. `balance` are layers of each stage; None: cut by our costs.

    `recomputed` is the share of microbatches whose forward pass runs again. `microbatches` 0: without pipeline.
    """

    name: str
    published: float
    stages: int
    microbatches: int
    batch_size: int
    recomputed: float
    balance: tuple[int, ...] | None = None


class Published(NamedTuple):
    """A table of images a second, of a model on a machine."""

    title: str
    build: "Callable[[], nn.Module]"
    machine: "Machine"
    cells: tuple[Cell, ...]
    unit: str = "images/s"

    def forecaster(self) -> "Forecaster":
        return Forecaster(self)


class Transformer(NamedTuple):
    """A published number: teraFLOP/s of a GPU, of a GPT on so many ranks of tensor and pipeline parallelism."""

    name: str
    published: float
    layers: int
    hidden: int
    heads: int
    tensor: int
    stages: int
    gpus: int
    batch_size: int


class PublishedTransformers(NamedTuple):
    """A table of teraFLOP/s of a GPU."""

    title: str
    machine: "Machine"
    cells: tuple[Transformer, ...]
    unit: str = "TFLOP/s of a GPU"

    def forecaster(self) -> "TransformerForecaster":
        return TransformerForecaster(self)


class Configuration(NamedTuple):
    """A published number of a plan, whose arguments are those of `Plan.of`."""

    name: str
    published: float
    plan: dict[str, Any]
    batch_size: int
    size: int = 1024  # of the images, in pixels


class Configurations(NamedTuple):
    """A table of plans. `unit` says of what the numbers are.

    relative     times as fast as the first row of the same image size, or with `each_rank` for each rank
    otherwise    images a second, in training or, without `trains`, forward only, through halves of the layers
    """

    title: str
    build: "Callable[[], nn.Module]"
    machine: "Machine"
    cells: tuple[Configuration, ...]
    unit: str
    relative: bool = True
    each_rank: bool = False
    trains: bool = True

    def forecaster(self) -> "ConfigurationForecaster":
        return ConfigurationForecaster(self)


def p40() -> "Machine":
    """Eight Tesla P40 in a server: 11.8 TFLOP/s and 346 GB/s by the data sheet, PCI Express 3.0 between them."""
    from mpi4dl.parallel.costs.machine import LinkLevel, Machine

    link = LinkLevel("PCI Express 3.0", 2e-5, 1.1e10)
    return Machine(
        "8 Tesla P40", 1, 8, (link,), 24 << 30, "Tesla P40", 9e12, 2.8e11, operator_seconds=1e-5, message_seconds=5e-5
    )


def amoebanetd() -> Published:
    from mpi4dl import models

    two, four, eight = (9, 15), (3, 6, 7, 8), (2, 2, 2, 3, 3, 4, 4, 4)

    def share(microbatches: int) -> float:
        """All but the last microbatch run again; a single one does, too."""
        return 1.0 if microbatches == 1 else 1 - 1 / microbatches

    numbers = [
        (2, 1, 96, 26.733, (7, 17)),
        (2, 4, 256, 41.133, two),
        (2, 32, 1280, 47.386, two),
        (4, 1, 160, 26.827, (3, 4, 5, 12)),
        (4, 4, 360, 44.543, four),
        (4, 32, 1152, 72.412, four),
        (8, 1, 196, 24.918, (2, 2, 2, 2, 2, 3, 4, 7)),
        (8, 4, 480, 70.065, eight),
        (8, 32, 1280, 132.413, eight),
    ]
    cells = (Cell(f"n={n}, m={m}", speed, n, m, batch, share(m), cut) for n, m, batch, speed, cut in numbers)
    build = partial(models.build, "amoebanetd", CLASSES, num_layers=18, num_filters=256)
    return Published("torchgpipe, AmoebaNet-D (18, 256), 8 Tesla P40", build, p40(), tuple(cells))


def resnet101() -> Published:
    from mpi4dl import models

    cells = (
        Cell("one GPU", 95.862, 1, 1, 118, 0.0),
        Cell("pipeline-1", 81.796, 1, 2, 220, 0.5),
        Cell("pipeline-2", 135.539, 2, 1667, 25000, 1.0),
        Cell("pipeline-4", 265.958, 4, 256, 5632, 1.0),
        Cell("pipeline-8", 411.662, 8, 150, 5400, 1.0),
    )
    return Published("torchgpipe, ResNet-101, 8 Tesla P40", partial(models.build, "resnet101", CLASSES), p40(), cells)


def megatron() -> PublishedTransformers:
    from dataclasses import replace

    from mpi4dl.estimate.machine_file import load_machine

    # Kernels are fused there: operators beside the products touch about a third of the bytes, and start sooner.
    selene = replace(load_machine(SELENE), bytes_per_second=4.8e12, operator_seconds=3e-6, flops_per_second=2e14)
    cells = (
        Transformer("1.7 B", 137, 24, 2304, 24, 1, 1, 32, 512),
        Transformer("3.6 B", 138, 30, 3072, 32, 2, 1, 64, 512),
        Transformer("7.5 B", 142, 36, 4096, 32, 4, 1, 128, 512),
        Transformer("18.4 B", 135, 40, 6144, 48, 8, 1, 256, 1024),
        Transformer("39.1 B", 138, 48, 8192, 64, 8, 2, 512, 1536),
        Transformer("76.1 B", 140, 60, 10240, 80, 8, 4, 1024, 1792),
        Transformer("145.6 B", 148, 80, 12288, 96, 8, 8, 1536, 2304),
        Transformer("310.1 B", 155, 96, 16384, 128, 8, 16, 1920, 2160),
        Transformer("529.6 B", 163, 105, 20480, 128, 8, 35, 2520, 2520),
        Transformer("1008 B", 163, 128, 25600, 160, 8, 64, 3072, 3072),
    )
    return PublishedTransformers("Megatron-LM, GPT, 32 to 3,072 A100", selene, cells)


def hyfi() -> Configurations:
    """Its abstract has the speedups over layer and pipeline parallelism, "up to" which these are, at no image size.

    If both are of one configuration, pipeline is 2.67 / 1.68 times as fast as layer parallelism. Model, filters, stages
    and tiles are those of MPI4DL's examples, and so are the two smaller images. The batch is ours.
    """
    from mpi4dl import models
    from mpi4dl.estimate.machine_file import load_machine

    stages = {"stages": 4, "tiles": [(1, 1)]}
    spatial = {"stages": 2, "tiles": [(2, 2), (1, 1)]}
    cells = []
    for size in (1024, 2048, 4096, 8192):
        pipeline = {"microbatches": 4, "schedule": "gpipe"}
        cells += [
            Configuration(f"{size} px, layer", 1.0, {**stages, "microbatches": 1}, 4, size),
            Configuration(f"{size} px, pipeline", 2.67 / 1.68, {**stages, **pipeline}, 4, size),
            Configuration(f"{size} px, + tiles", 2.67, {**spatial, **pipeline}, 4, size),
        ]
    build = partial(models.build, "amoebanetd", CLASSES, num_layers=18, num_filters=416)
    return Configurations(
        "Hy-Fi, AmoebaNet-D (18, 416), 4 and 5 V100",
        build,
        load_machine(LASSEN),
        tuple(cells),
        "times layer parallelism",
    )


def gems() -> Configurations:
    """Its abstract has the efficiency of model and data parallelism on 1,024 V100 for ResNet-1001.

    Each node has a replica of four stages, which are a layer parallel model. Batch and image size are ours.
    """
    from mpi4dl import models
    from mpi4dl.estimate.machine_file import load_machine

    own = {"stages": 4, "tiles": [(1, 1)], "microbatches": 1}
    cells = (
        Configuration("4 GPUs", 1.0, own, 1),
        Configuration("1,024 GPUs", 0.9732, {**own, "data": 256, "local_batches": True}, 256),
    )
    return Configurations(
        "GEMS, ResNet-1001 v2, 1,024 px, V100",
        partial(models.build, "resnet1001_v2", 2),
        load_machine(LASSEN),
        cells,
        "efficiency",
        each_rank=True,
    )


def mpi4dl_log() -> Configurations:
    """Medians of a log in its repository: forward passes in float16, half of the layers on vertical tiles.

    The nodes have two A100 of 40 GB, of which each rank uses one. Links are those of Selene between nodes.
    """
    from dataclasses import replace

    from mpi4dl import models
    from mpi4dl.estimate.machine_file import load_machine

    selene = load_machine(SELENE)
    machine = replace(selene, nodes=5, ranks_per_node=1, links=(replace(selene.links[-1], ranks=0),))
    cells = (
        Configuration("2 tiles, then 1", 12.94, {"stages": 2, "tiles": [(1, 2), (1, 1)]}, 1),
        Configuration("4 tiles, then 1", 13.09, {"stages": 2, "tiles": [(1, 4), (1, 1)]}, 1),
    )
    return Configurations(
        "MPI4DL, ResNet-110 v2, 1,024 px, inference, A100",
        partial(models.build, "resnet110_v2", 10),
        machine,
        cells,
        "images/s",
        relative=False,
        trains=False,
    )


LASSEN, SELENE = "examples/machines/lassen.toml", "examples/machines/selene.toml"
CONTEXT, VOCABULARY = 2048, 51200
TABLES = {
    "amoebanetd": amoebanetd,
    "resnet101": resnet101,
    "megatron": megatron,
    "hyfi": hyfi,
    "gems": gems,
    "mpi4dl": mpi4dl_log,
}
MOST_SIMULATED = 64  # microbatches; of more the rest is a steady state


def check(options: Options) -> str | None:
    unknown = [name for name in options.tables if name not in TABLES]
    return f"--tables {unknown[0]}: choose of {', '.join(TABLES)}" if unknown else None


class Forecaster:
    """Step times of a published table, by rates and one factor."""

    def __init__(self, told: Published) -> None:

        from mpi4dl.parallel.costs.cost_model import Profiler
        from mpi4dl.parallel.pipeline.split import Cuttable, outline

        self.told, self.factor = told, 1.0
        self.cuttable = Cuttable(outline(told.build).train())
        self.profiler = Profiler(machine=told.machine, small=True)

    def of(self, cell: Cell) -> tuple[float, float]:
        """Samples a second, and the share of time in which ranks are idle."""
        import torch

        from mpi4dl.estimate.step_time import StepTime
        from mpi4dl.parallel.costs.cost_model import StageCosts, stages_on
        from mpi4dl.parallel.costs.sites import sites_of
        from mpi4dl.parallel.cut import partition
        from mpi4dl.parallel.plan import Plan

        simulated = min(cell.microbatches, MOST_SIMULATED)
        plan = Plan.of(stages=cell.stages, microbatches=simulated, schedule="gpipe")
        samples = max(1, round(cell.batch_size / cell.microbatches))
        column = self.profiler.costs(
            self.cuttable, sites_of(self.cuttable, plan, (samples, 3, PIXELS, PIXELS))[0], torch.device("cpu")
        )
        column = tuple(
            unit._replace(
                forward_seconds=self.factor * unit.forward_seconds,
                backward_seconds=self.factor * (unit.backward_seconds + cell.recomputed * unit.forward_seconds),
            )
            for unit in column
        )
        costs = StageCosts((column,) * cell.stages, stages_on(self.told.machine, plan), "", timed=False)
        counts = partition(costs.matrix) if cell.balance is None else self.units(cell.balance)
        time = StepTime(
            plan, self.told.machine, costs.of_stages(counts), costs.messages(counts), (0,) * cell.stages, ()
        )
        seconds = time.seconds
        if cell.microbatches > simulated:  # each further one takes as long as on the slowest stage
            seconds += (cell.microbatches - simulated) * max(sum(stage.both) for stage in time.stages)
        busy = cell.microbatches * sum(sum(stage.both) for stage in time.stages) / cell.stages
        return cell.batch_size / seconds, 1 - busy / seconds

    def units(self, balance: Sequence[int]) -> tuple[int, ...]:
        """How many units so many layers of the model are, stage by stage."""
        layers = [len(list(own)) for _, own in groupby(name.split(".")[0] for name in self.cuttable.names)]
        assert sum(balance) == len(layers), (balance, len(layers))
        ends = [sum(balance[: i + 1]) for i in range(len(balance))]
        return tuple(sum(layers[start:stop]) for start, stop in zip([0, *ends], ends, strict=False))


class TransformerForecaster:
    """Step times of a table of transformers, whose layers are alike: counted for three, and repeated."""

    def __init__(self, told: PublishedTransformers) -> None:
        self.told, self.factor = told, 1.0

    def of(self, cell: Transformer) -> tuple[float, float]:
        """TeraFLOP/s of a GPU by the formula of the publication, and the share of time in which ranks are idle.

        Activations are recomputed, and a microbatch is one sample, as far as the publication tells.
        """
        import torch

        from mpi4dl import models
        from mpi4dl.estimate.memory import StateBytes
        from mpi4dl.estimate.step_time import StepTime
        from mpi4dl.parallel.costs.cost_model import Profiler, StageCosts, stages_on
        from mpi4dl.parallel.costs.sites import sites_of
        from mpi4dl.parallel.cut import partition
        from mpi4dl.parallel.pipeline.split import Cuttable, outline
        from mpi4dl.parallel.plan import Plan

        sizes = {"num_layers": 3, "hidden": cell.hidden, "num_heads": cell.heads}
        build = partial(models.build, "gpt", vocabulary=VOCABULARY, context=CONTEXT, **sizes)
        cuttable = Cuttable(outline(build).train().bfloat16())
        data = cell.gpus // (cell.tensor * cell.stages)
        plan = Plan(((1,),) * cell.stages, tensor=cell.tensor, data=data, microbatches=cell.batch_size // data)
        profiler = Profiler(machine=self.told.machine, small=True)
        site = sites_of(cuttable, plan, (data, CONTEXT))[0]
        embedding, _, layer, _, *head = (
            unit._replace(
                forward_seconds=self.factor * unit.forward_seconds,
                backward_seconds=self.factor * (unit.backward_seconds + unit.forward_seconds),
                back=(*unit.there, *unit.back),
            )
            for unit in profiler.costs(cuttable, site, torch.device("cpu"))
        )
        column = (embedding, *[layer] * cell.layers, *head)
        costs = StageCosts((column,) * cell.stages, stages_on(self.told.machine, plan), "", timed=False)
        counts = partition(costs.matrix)
        layers = 12 * cell.layers * cell.hidden**2
        of_rank = (layers + (VOCABULARY + CONTEXT) * cell.hidden) // (cell.tensor * cell.stages)
        state = StateBytes(4 * of_rank, 12 * of_rank, 0, 32 << 20, ("features",) if cell.tensor > 1 else ())
        time = StepTime(
            plan,
            self.told.machine,
            costs.of_stages(counts),
            costs.messages(counts),
            (0,) * cell.stages,
            ((state,),) * cell.stages,
        )
        more = CONTEXT / (6 * cell.hidden) + VOCABULARY / (16 * cell.layers * cell.hidden)
        flops = 96 * cell.batch_size * CONTEXT * cell.layers * cell.hidden**2 * (1 + more)
        return flops / time.seconds / cell.gpus / 1e12, time.parts.idle / time.seconds


class ConfigurationForecaster:
    """Speeds of plans, with tiles and mirrored copies too."""

    def __init__(self, told: Configurations) -> None:
        import torch

        from mpi4dl.estimate.plan_estimate import Estimator
        from mpi4dl.parallel.costs.cost_model import Profiler
        from mpi4dl.parallel.pipeline.split import Cuttable, outline

        self.told, self.factor = told, 1.0
        self._first: dict[int, float] = {}
        whole = outline(told.build).train()
        self.cuttable = Cuttable(whole if told.trains else whole.half())
        self.estimator = Estimator(
            self.cuttable,
            (1, 3, told.cells[0].size, told.cells[0].size),
            Profiler.of_user(machine=told.machine, small=True),
            torch.device("cpu"),
            partial(torch.optim.SGD, lr=0.01),
            streams=False,
        )

    def of(self, cell: Configuration) -> tuple[float, float]:
        """The number that is published, and the share of time in which ranks are idle."""
        from mpi4dl.parallel.plan import Plan

        plan = Plan.of(**cell.plan)
        self.estimator.image = (cell.batch_size, 3, cell.size, cell.size)
        if not self.told.trains:
            return 1 / self._forward(plan), 0.0
        estimate = self.estimator.estimate(plan, float("inf"))
        assert estimate.time is not None
        speed = estimate.samples_per_second / (plan.num_ranks if self.told.each_rank else 1)
        if self.told.relative:
            speed /= self._first.setdefault(cell.size, speed)
        return speed, estimate.time.parts.idle / estimate.time.seconds

    def _forward(self, plan: "Plan") -> float:
        """The seconds of a forward pass from stage to stage, each of as many units as the others."""
        costs = self.estimator.costs(plan)
        each, more = divmod(len(self.cuttable), plan.num_stages)
        counts = [each + (stage < more) for stage in range(plan.num_stages)]
        stages = costs.of_stages(counts)
        return sum(self.factor * stage.forward + sum(stage.there) for stage in stages) + sum(costs.messages(counts))


def run(options: Options) -> None:
    rows: list[dict[str, Any]] = []
    for name in options.tables:
        told: Published | PublishedTransformers | Configurations = TABLES[name]()
        forecaster: Any = told.forecaster()
        first = told.cells[0]
        if not getattr(told, "relative", False):
            forecaster.factor = forecaster.of(first)[0] / first.published
        for cell in told.cells:
            estimated, bubble = forecaster.of(cell)
            rows.append(
                {
                    "name": f"{told.title}: {cell.name}",
                    "table": told.title,
                    "cell": cell.name,
                    "published": cell.published,
                    "unit": told.unit,
                    "estimated": estimated,
                    "ratio": estimated / cell.published,
                    "bubble": 100 * bubble,
                    "factor": forecaster.factor,
                    "fitted": cell is first,
                }
            )
    title = "published, and estimated from the first row of each table"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Published and estimated numbers side by side."""
    from matplotlib.figure import Figure

    tables = list(dict.fromkeys(row["table"] for row in rows))
    columns = 2 if len(tables) > FEW_TABLES else 1
    lines = -(-len(tables) // columns)
    figure = Figure((8.5 * columns, 3.4 * lines))
    for panel, name in enumerate(tables, 1):
        own = [row for row in rows if row["table"] == name]
        axes = figure.add_subplot(lines, columns, panel)
        for shift, (key, color) in enumerate(zip(("published", "estimated"), CURVES, strict=False)):
            places = [i + 0.4 * shift - 0.2 for i in range(len(own))]
            axes.bar(places, [row[key] for row in own], 0.38, color=color, label=key)
        axes.set_xticks(range(len(own)), [row["cell"].replace(", ", ",\n") for row in own], fontsize=8)
        axes.set_ylim(0, 1.25 * max(row[key] for row in own for key in ("published", "estimated")))
        axes.set_ylabel(own[0]["unit"])
        axes.set_title(name)
        axes.legend(loc="upper center", ncols=2, frameon=False)
    figure.suptitle(title)
    return figure
