"""Says how a run goes, from rank 0: to the reader, to TensorBoard, and to metrics.jsonl, with the same numbers."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl._palette import LOADS
from mpi4dl._progress import ProgressBar
from mpi4dl._wording import counted, duration
from mpi4dl.comm.node import Node
from mpi4dl.engine import Engine
from mpi4dl.engine.precision import kernels_chosen
from mpi4dl.options.build import TrainingSpec, title_of
from mpi4dl.options.kinds import part_name
from mpi4dl.options.sections.optimizer import Optimizer
from mpi4dl.options.sections.parallel import Parallel
from mpi4dl.options.sections.training import Training
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.results.formats import Lines, as_line
from mpi4dl.results.names import METRICS
from mpi4dl.runs.folder import LOGGER_NAME, RunFolder
from mpi4dl.tasks.task import Task
from mpi4dl.training.tensorboard import confusion_picture

if TYPE_CHECKING:
    from mpi4dl.models.experts import Router
    from mpi4dl.parallel.costs.cost_model import StageCosts


# The first lines of a run.


def title(spec: TrainingSpec, engine: Engine) -> str:
    """The title of a training, in one line."""
    told = title_of(spec.name, engine.stages.num_parameters, engine.plan, spec.batch, spec.source.described)
    return f"{told}, {engine.device.type}" + (f" ({kernels_chosen()})" if engine.device.type == "cuda" else "")


def goal(chosen: Optimizer, training: Training, engine: Engine, task: Task, num_steps: int) -> str:
    """The task, its loss, the optimizer, the steps and how many parameters are trained, in one line."""
    stages = engine.stages
    optimizer = part_name(chosen.optimizer) + "".join(f", {name} {x}" for name, x in chosen.optimizer_options.items())
    rate = f"learning rate {chosen.lr:g}"
    if chosen.scheduler or chosen.lr_schedule != "constant":
        rate += f" by {chosen.scheduler or chosen.lr_schedule}"
    if chosen.warmup:
        share = isinstance(chosen.warmup, float)
        rate += f" after a warm-up of {f'{100 * chosen.warmup:g} %' if share else counted(int(chosen.warmup), 'step')}"
    trained = sum(math.prod(stages.shapes[name][0]) for name in stages.trained if name in stages.shapes)
    loss = part_name(training.loss or task.default_loss)
    parts = [f"task {task.name}, loss {loss}, {optimizer}, {rate}, {counted(num_steps, 'step')}"]
    if training.max_steps is None:
        parts.append(f" in {counted(training.epochs, 'epoch')}")
    if trained != stages.num_parameters:
        parts.append(f"; {trained:,} of {stages.num_parameters:,} parameters are trained")
    return "".join(parts)


def without_effect(chosen: Parallel, engine: Engine) -> list[str]:
    """Remarks on given options that have no effect here."""
    plan = engine.plan
    shared = any(len(plan.holders(stage)) > 1 for stage in range(plan.num_stages))
    found = []
    if engine.device.type == "cpu" and (chosen.deterministic or chosen.tf32 != Parallel.tf32):
        found.append(
            "`deterministic` and `tf32` have no effect on CPUs: they have no TF32, and leave no bits to chance"
        )
    if chosen.offload == "cpu" and engine.device.type == "cpu":
        found.append("`offload` cpu has no effect: the model is on the CPU itself; `offload` disk saves memory there")
    if chosen.zero and not shared:
        found.append(
            f"`zero` {chosen.zero} has no effect: no two ranks hold the same weights; `data` and `tiles` make such"
        )
    return found


# Its steps and validations.

MEBIBYTE = 2**20
FLUSH_SECONDS = 10
QUIET_SECONDS = 60  # after which a step that is under way is heard of


@dataclass(frozen=True)
class StepReport:
    """The training steps since the last report: plain numbers, of all ranks together.

    `data_wait` and `comm_wait` are the shares of the interval's time, 0 to 1, that were spent waiting for images and
    for other ranks; `peak_memory_bytes` is that of the rank that used most. Of text speed is in tokens. Under fp16,
    `skipped_steps` of these steps were not made, because their gradients overflowed; `loss_scale` is the present one.
    With experts there are three numbers, as in `ExpertUse`. `learning_rate` is that of each of the optimizer's
    groups in the last of the steps.
    """

    step: int
    epoch: int
    loss: float
    images_per_second: float | None
    data_wait: float
    comm_wait: float
    peak_memory_bytes: int
    tokens_per_second: float | None = None
    skipped_steps: int | None = None
    loss_scale: float | None = None
    expert_imbalance: float | None = None
    dropped_tokens: float | None = None
    router_entropy: float | None = None
    learning_rate: tuple[float, ...] | None = None

    def line(self, num_steps: int | None = None, left: str = "", noun: str = "image") -> str:
        """`num_steps` are those of the whole run, `left` is how long it still takes, a `noun` is a sample."""
        rate, what = self.images_per_second, f"{noun}s/s"
        if rate is None:
            rate, what = self.tokens_per_second or 0.0, "tokens/s"
        more = [] if self.loss_scale is None else [f"skipped {self.skipped_steps}", f"scale {self.loss_scale:g}"]
        if self.expert_imbalance is not None:
            dropped = 100 * (self.dropped_tokens or 0.0)
            more += [f"fullest expert {self.expert_imbalance:.2f}", f"dropped {dropped:.1f} %"]
        return "  ".join(
            (
                f"step {self.step}" if num_steps is None else f"step {self.step} of {num_steps}",
                f"epoch {self.epoch}",
                f"loss {self.loss:#.4g}",
                f"{rate:{'.3g' if rate < 1 else '.1f'}} {what}",  # huge images take long
                f"data wait {100 * self.data_wait:.1f} %",
                f"comm wait {100 * self.comm_wait:.1f} %",
                f"peak memory {self.peak_memory_bytes / MEBIBYTE:.0f} MiB",
                *more,
                *([left] if left else []),
            )
        )


@dataclass(frozen=True)
class ValidationReport:
    """One pass over what validates; `accuracy` is the share, 0 to 1, that was classified correctly, if anything was.

    The loss of text that is predicted token by token is in bits per byte too. `metrics` are others by name; the line
    shows those that are one number. `best`: no validation before was as good.
    """

    step: int
    epoch: int
    loss: float
    accuracy: float | None
    bits_per_byte: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    best: bool = False

    def line(self) -> str:
        bits = () if self.bits_per_byte is None else (f"{self.bits_per_byte:.3f} bits per byte",)
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        measured = {**accuracy, **self.metrics}
        more = [f"{name.replace('_', ' ')} {x:#.4g}" for name, x in measured.items() if isinstance(x, float)]
        said = (
            f"step {self.step}",
            f"epoch {self.epoch}",
            f"validation loss {self.loss:#.4g}",
            *bits,
            *more,
        )
        return "  ".join((*said, "best so far") if self.best else said)


class LogInterval:
    """The steps since the last report; `losses` are those of a run that resumes in the middle of an interval.

    Samples of text have so many tokens.
    """

    def __init__(
        self, engine: Engine, loader: Any, losses: Iterable[float] = (), tokens_in_sample: int | None = None
    ) -> None:
        self.engine, self.loader, self.tokens_in_sample = engine, loader, tokens_in_sample
        self.began = time.perf_counter()
        self.data_wait = loader.wait_seconds
        self.comm_wait = engine.comm.node.wait_seconds
        self.num_skipped = engine.scaler.num_skipped
        self.losses = list(losses)
        self.num_samples = 0
        self.learning_rates: tuple[float, ...] | None = None

    def add(self, loss: float, num_samples: int) -> None:
        """A step was made, after which the schedule has not yet changed anything."""
        self.losses.append(loss)
        self.num_samples += num_samples
        self.learning_rates = tuple(float(group["lr"]) for group in self.engine.optimizer.param_groups if "lr" in group)

    def report(self, epoch: int, peak_bytes: int) -> StepReport | None:
        """Means over ranks of what was waited for, and the memory of the rank that used most. Collective.

        None if there was no step.
        """
        if not self.losses:
            return None
        comm, seconds = self.engine.comm, time.perf_counter() - self.began
        waits = [self.loader.wait_seconds - self.data_wait, comm.node.wait_seconds - self.comm_wait]
        data_wait, comm_wait = comm.all_reduce(torch.tensor(waits, dtype=torch.float64)).tolist()
        memory = int(comm.all_reduce(torch.tensor([peak_bytes]), "max"))
        total = seconds * comm.size
        loss, rate = sum(self.losses) / len(self.losses), self.num_samples / seconds
        found = StepReport(self.engine.num_steps, epoch, loss, rate, data_wait / total, comm_wait / total, memory)
        found = replace(found, learning_rate=self.learning_rates or None)
        if self.tokens_in_sample is not None:
            found = replace(found, images_per_second=None, tokens_per_second=rate * self.tokens_in_sample)
        scaler = self.engine.scaler
        if scaler.enabled:
            found = replace(found, skipped_steps=scaler.num_skipped - self.num_skipped, loss_scale=scaler.scale)
        return found


def summary(evaluation: Any, monitor: str, num_steps: int, earlier: int, seconds: float, num_unreadable: int) -> str:
    """The result of a run in one line: of the last `evaluation` the accuracy, else `monitor`, else the loss.

    Of `num_steps` an earlier start took `earlier`, and `seconds` are those of the others.
    """
    if evaluation is None:
        result = ""
    elif evaluation.accuracy is not None:
        result = f"validation accuracy {evaluation.accuracy:#.4g}, "
    elif isinstance(evaluation.metrics.get(monitor), float):
        result = f"validation {monitor.replace('_', ' ')} {evaluation.metrics[monitor]:#.4g}, "
    else:
        result = f"validation loss {evaluation.loss:#.4g}, "
    skipped = f", {counted(num_unreadable, 'unreadable image')} skipped" if num_unreadable else ""
    after = f" after {earlier} of an earlier start" if earlier else ""
    return f"{result}{counted(num_steps - earlier, 'step')} in {seconds:.0f} s{after}{skipped}"


class Reporter(AbstractContextManager["Reporter"]):
    """Where the reports of a run go; make one on rank 0 only, and close it, best by `with`.

    Every report is one line on standard output and in rank 0's log. If standard error is a terminal, a progress bar
    stands below the lines; else they say how much time is left. Reports of steps after `first_step` that TensorBoard's
    files hold already are hidden. Pictures of confusion matrices have the names of `classes`. A sample is a `noun`.
    """

    def __init__(
        self,
        folder: RunFolder,
        total_steps: int,
        first_step: int = 0,
        tensorboard: bool = True,
        classes: Sequence[str] = (),
        noun: str = "image",
    ) -> None:
        self._metrics, self._noun = Lines(folder.path / METRICS), noun
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purged = first_step + 1 if first_step else None
            self._writer = SummaryWriter(str(folder.path), flush_secs=FLUSH_SECONDS, purge_step=purged)
        self._bar = ProgressBar(total_steps, "step", first_step, seconds=QUIET_SECONDS)
        self._total_steps, self._classes = total_steps, classes
        self._first: tuple[int, float] | None = None  # the first step that was finished, and when

    @property
    def has_pictures(self) -> bool:
        """Whether anybody sees them."""
        return self._writer is not None

    def advance(self, step: int) -> None:
        """Move the progress bar, if there is one, to `step` finished steps; call it after every step."""
        if self._first is None:
            self._first = step, time.monotonic()
        self._bar.to(step)

    def working(self, doing: str) -> None:
        """Say what a step is doing: beside the progress bar, or in a line now and then."""
        if self._bar.bar is not None:
            self._bar.bar.set_postfix_str(doing)
        elif self._bar.is_due:
            self.say(doing)

    def step(self, report: StepReport) -> None:
        self._report("train", report, report.line(self._total_steps, self._left(report.step), self._noun))

    def validation(self, report: ValidationReport) -> None:
        self._report("validation", report, report.line())

    def _left(self, step: int) -> str:
        """How long the steps after this one take, with validations and checkpoints as up to now; the first one, in
        which much is prepared, does not count.
        """
        if self._bar.bar is not None or self._first is None or not self._first[0] < step < self._total_steps:
            return ""
        first, began = self._first
        return duration((time.monotonic() - began) / (step - first) * (self._total_steps - step)) + " left"

    def images(self, name: str, images_N3HW: Tensor, step: int) -> None:
        """Show a few images, with values from 0 to 1, in TensorBoard; make them small first."""
        if self._writer is not None:
            self._writer.add_images(name, images_N3HW.detach().float().cpu().clamp(0, 1), step)

    def figure(self, name: str, image_HW3: Any, step: int) -> None:
        """Show a picture, an array of bytes as `pictures` makes them, in TensorBoard; None is no picture."""
        if self._writer is not None and image_HW3 is not None:
            self._writer.add_image(name, image_HW3, step, dataformats="HWC")

    def text(self, name: str, text: str, step: int = 0) -> None:
        """Show text in TensorBoard as it is, line by line."""
        if self._writer is not None:
            self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def rows(self, name: str, head: Sequence[str], rows: Sequence[Sequence[Any]], step: int = 0) -> None:
        """Show a table in TensorBoard."""
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
        lines = [f"| {' | '.join(row)} |" for row in cells]
        if self._writer is not None:
            self._writer.add_text(name, "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]), step)

    def say(self, line: str) -> None:
        """Print a line above the progress bar, and log it."""
        logging.getLogger(LOGGER_NAME).info(line)
        self._bar.say(line)

    def close(self) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()
        self._metrics.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _report(self, phase: str, report: StepReport | ValidationReport, line: str) -> None:
        values = {name: value for name, value in asdict(report).items() if value is not None}
        values |= values.pop("metrics", {})
        if not values.get("best", True):
            del values["best"]
        rates = values.pop("learning_rate", ())
        values |= {"learning_rate" if len(rates) == 1 else f"learning_rate/{i}": rate for i, rate in enumerate(rates)}
        self._metrics.append(as_line({"phase": phase} | values))
        if self._writer is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self._writer.add_scalar(f"{phase}/{name}", value, report.step)
                elif isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
                    self.figure(f"{phase}/{name}", confusion_picture(value, self._classes), report.step)
        self.say(line)


# How the experts of a model are used in the last microbatch of a step, for each layer.

CELL_PIXELS = 16
BRIGHTEST = 2.0  # times the even share


@dataclass(frozen=True)
class ExpertUse:
    """Of each layer, by its path: the load (E,) of experts as a multiple of the even share, which is 1.

    `imbalance` is the largest load of any; `dropped` the share, 0 to 1, of choices that found an expert full;
    `entropy` the mean of that of tokens' scores, in nats: log E if they are even.
    """

    loads: Mapping[str, Tensor]
    dropped: float
    entropy: float

    @property
    def imbalance(self) -> float:
        return max(float(load.max()) for load in self.loads.values())

    def picture(self) -> Tensor:
        """(1, 3, H, W), from 0 to 1: a row for each layer, in the order of the model, and a column for each expert.

        Dark experts got no tokens, light ones twice their even share, or more.
        """
        widest = max(len(load) for load in self.loads.values())
        rows = [torch.nn.functional.pad(load, (0, widest - len(load))) for load in self.loads.values()]
        place = (torch.stack(rows) / BRIGHTEST).clamp(0, 1) * (len(LOADS) - 1)
        colours = torch.tensor(LOADS)
        below = place.floor().long().clamp_max(len(LOADS) - 2)
        part = (place - below)[..., None]
        cells = (colours[below] * (1 - part) + colours[below + 1] * part).permute(2, 0, 1)
        return cells.repeat_interleave(CELL_PIXELS, 1).repeat_interleave(CELL_PIXELS, 2)[None]


def expert_use(engine: Engine) -> ExpertUse | None:
    """How experts were used in the last microbatch; None for a model that has none of ours. Collective."""
    from mpi4dl.models.experts import Router

    modules = [pair for module in engine.stages.modules_of.values() for pair in module.named_modules()]
    own = {name: _counts(each) for name, each in modules if isinstance(each, Router) and each.last is not None}
    found: dict[str, Tensor] = {}
    for each in engine.comm.all_gather_object(own):
        for name, counts in each.items():
            found[name] = found[name] + counts if name in found else counts
    if not found:
        return None
    order = [name.removesuffix(".weight") for name in engine.stages.shapes]
    loads, dropped, entropy = {}, 0.0, 0.0
    for name in sorted(found, key=order.index):
        *load, missed, surprise, tokens = found[name].tolist()
        chosen = sum(load)
        loads[name] = torch.tensor(load) * len(load) / max(chosen, 1.0)
        dropped += missed / max(chosen + missed, 1.0) / len(found)
        entropy += surprise / max(tokens, 1.0) / len(found)
    return ExpertUse(loads, dropped, entropy)


def _counts(router: "Router") -> Tensor:
    """This rank's part of the sums: tokens of each expert, choices without one, entropy, and tokens."""
    assert router.last is not None
    chosen, scores = router.last
    alike = 1  # ranks that have the same tokens
    if isinstance(chosen, SpatialTensor):
        sides = zip(chosen.layout.dims, chosen.layout.grid.shape, strict=True)
        alike = chosen.layout.grid.size // math.prod(parts for dim, parts in sides if dim is not None)
        chosen, scores = chosen.local, scores.local if isinstance(scores, SpatialTensor) else scores
    counts = torch.bincount(chosen.flatten().cpu(), minlength=router.num_experts + 1).double()
    scores = scores.double().cpu()
    surprise = -torch.special.xlogy(scores, scores).sum()
    tokens = float(scores.numel() // router.num_experts)
    return torch.cat([counts, torch.tensor([float(surprise), tokens], dtype=torch.float64)]) / alike


# A step as estimated beside the step as measured: the work of each rank, its share of all, and its idle time.
#
# predicted    the costs of the units of its stages, through the table of the plan
# measured     seconds for which a rank's thread was on a core in its steps, but for those in which it only waited

FAR_OFF = 0.15  # of what was measured


def shares(seconds: Sequence[float]) -> tuple[float, ...]:
    """Of each the share of the sum."""
    total = sum(seconds) or 1.0
    return tuple(each / total for each in seconds)


@dataclass(frozen=True)
class Forecast:
    """Of each rank of a replica, in one step: the share of all work that it does, and of the time that it idles."""

    work: tuple[float, ...]
    idle: tuple[float, ...]

    @classmethod
    def of(cls, plan: Plan, costs: "StageCosts", counts: Sequence[int]) -> "Forecast":
        found = costs.simulated(plan, counts)
        busy = [sum(span.end_seconds - span.start_seconds for span in row) for row in found.rows]
        return cls(shares(busy), found.bubbles)


class Worked(NamedTuple):
    """How long a rank worked in its steps, and how long those took."""

    work_seconds: float
    seconds: float


class WorkMeter:
    """Within `with meter:`, how long this rank works, and how long that takes."""

    def __init__(self, node: Node, clock: Callable[[], float] = time.perf_counter) -> None:
        self._node, self._clock = node, clock
        self._begun = Worked(0.0, 0.0)
        self.worked = Worked(0.0, 0.0)

    def __enter__(self) -> None:
        self._begun = Worked(self._node.work_seconds(), self._clock())

    def __exit__(self, *_: object) -> None:
        now = Worked(self._node.work_seconds(), self._clock())
        self.worked = Worked(*(a + b - c for a, b, c in zip(self.worked, now, self._begun, strict=True)))


def compared(forecast: Forecast, of_ranks: Sequence[Worked], crowded: bool) -> list[str]:
    """Lines that say, for each rank of a replica, the estimate and the measurement.

    `of_ranks` are those of all ranks, replicas one after the other, of which sums are taken. `crowded`: there are more
    ranks than cores, so ranks also wait for a core, which no estimate includes.
    """
    number = len(forecast.work)
    ranks = [Worked(*map(sum, zip(*of_ranks[rank::number], strict=True))) for rank in range(number)]
    measured = shares([rank.work_seconds for rank in ranks])
    idle = [max(0.0, 1 - rank.work_seconds / rank.seconds) if rank.seconds else 0.0 for rank in ranks]
    why = "; with more ranks than cores, ranks also wait for a core" if crowded else ""
    lines = [f"each rank's share of the work, and how long it idled, as predicted and as measured{why}:"]
    for rank in range(number):
        work = f"work {100 * forecast.work[rank]:.1f} % and {100 * measured[rank]:.1f} %"
        lines.append(f"  rank {rank}: {work}, idle {100 * forecast.idle[rank]:.0f} % and {100 * idle[rank]:.0f} %")
    off = [abs(guess / found - 1) if found else 0.0 for guess, found in zip(forecast.work, measured, strict=True)]
    worst = max(off)
    if worst > FAR_OFF:
        lines.append(
            f"the prediction of rank {off.index(worst)}'s work is off by {100 * worst:.0f} %: `balance` measured cuts "
            "by what the ranks themselves take"
        )
    return lines
