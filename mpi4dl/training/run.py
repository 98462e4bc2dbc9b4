"""A run of the training command: its epochs, and what is reported, saved and resumed on the way."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mpi4dl._memory import MemoryMeter
from mpi4dl._palette import LOADS
from mpi4dl._wording import counted
from mpi4dl.checkpoints import Checkpoints, load, save_model
from mpi4dl.checkpoints.json_values import put_back
from mpi4dl.checkpoints.manifest import AVERAGE, CHECKPOINTS, MODEL
from mpi4dl.checkpoints.weights import not_finite
from mpi4dl.comm import Refusal
from mpi4dl.comm.node import core_wait_seconds
from mpi4dl.datasets.text import Tokenizer
from mpi4dl.engine import Engine, Evaluation, NotFinite
from mpi4dl.estimate.comparison import Forecast, WorkMeter, compared
from mpi4dl.estimate.dry_run import explain, goal, title, without_effect
from mpi4dl.geometry import Box
from mpi4dl.models.experts import Router
from mpi4dl.options.build import number_of_steps
from mpi4dl.options.config import Config
from mpi4dl.options.optimizers import Schedule
from mpi4dl.options.tasks import Monitor, directions
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.runs.description import Description
from mpi4dl.tasks.directions import write_directions
from mpi4dl.tasks.formulas import main_output
from mpi4dl.tasks.task import Classify, Task
from mpi4dl.training import resuming
from mpi4dl.training.best import BEST, Best
from mpi4dl.training.data import Images, Texts
from mpi4dl.training.input_pipeline import BadImages, ControlFlags, Divided, Reading, UnreadableImages
from mpi4dl.training.report import LogInterval, Reporter, ValidationReport, summary
from mpi4dl.training.resuming import options_to_compare
from mpi4dl.training.stopping import Patience, Stopped, StopSignals
from mpi4dl.training.tensorboard import Painter, Showing, remember

# Text that a model continues, token by token, under any plan, to show what it has learnt.

TEMPERATURE = 0.8


def continued(engine: Engine, tokenizer: Tokenizer, prompt: str, context: int, num_tokens: int, seed: int = 0) -> str:
    """`prompt`, and so many tokens after it, each drawn by softmax(logits / 0.8); it may end before. Collective.

    The model sees the last `context` tokens, as in training. Tokens behind them, which are there to fill the sample,
    are not seen by causal attention.
    """
    tokens = [int(token) for token in tokenizer.encode(prompt)] if prompt else [tokenizer.end]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        shares = (_next_logits(engine, tokens[-context:], context) / TEMPERATURE).softmax(0)
        tokens.append(int(torch.multinomial(shares, 1, generator=generator)))
        if tokens[-1] == tokenizer.end:
            break
    return tokenizer.decode(tokens)


def _next_logits(engine: Engine, tokens: list[int], context: int) -> Tensor:
    """The logits of the token after these, on all ranks."""
    size = (context,)
    sample = torch.tensor([tokens + [0] * (context - len(tokens))])
    tiles = [sample[tuple(slice(*side) for side in read.box)] for read in engine.reads(1, size, training=False)]
    last = len(tokens) - 1
    (outputs,) = engine.predict([(tiles, 1)], size, lambda logits: spatial.gather(main_output(logits))[:, last])
    return engine.comm.broadcast_object(None if outputs.whole is None else outputs.whole[0].double())


# How the experts of a model are used: of each layer the load of every expert, what found them full, the entropy.
#
# A step's last microbatch is looked at. Loads make a picture: a row for each layer, a column for each expert, from dark
# (none of the tokens) to light (twice its even share, or more).

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
        """(1, 3, H, W), from 0 to 1: a row of cells for each layer, in the order of the model."""
        widest = max(len(load) for load in self.loads.values())
        rows = [torch.nn.functional.pad(load, (0, widest - len(load))) for load in self.loads.values()]
        place = (torch.stack(rows) / BRIGHTEST).clamp(0, 1) * (len(LOADS) - 1)
        colours = torch.tensor(LOADS)
        below = place.floor().long().clamp_max(len(LOADS) - 2)
        part = (place - below)[..., None]
        cells = (colours[below] * (1 - part) + colours[below + 1] * part).permute(2, 0, 1)
        return cells.repeat_interleave(CELL_PIXELS, 1).repeat_interleave(CELL_PIXELS, 2)[None]


def expert_use(engine: Engine) -> ExpertUse | None:
    """How experts were used in the last step; None for a model that has none of ours. Collective."""
    own = {name: _counts(router) for name, router in _routers(engine) if router.last is not None}
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
        counted = torch.tensor(load)
        loads[name] = counted * len(load) / max(float(counted.sum()), 1.0)
        dropped += missed / max(float(counted.sum()) + missed, 1.0) / len(found)
        entropy += surprise / max(tokens, 1.0) / len(found)
    return ExpertUse(loads, dropped, entropy)


def _routers(engine: Engine) -> list[tuple[str, Router]]:
    modules = [pair for module in engine.stages.modules_of.values() for pair in module.named_modules()]
    return [(name, module) for name, module in modules if isinstance(module, Router)]


def _counts(router: Router) -> Tensor:
    """This rank's part of the sums: tokens of each expert, choices without one, entropy, and tokens."""
    assert router.last is not None
    chosen, scores = router.last
    alike = 1  # ranks that have the same tokens
    if isinstance(chosen, SpatialTensor):
        sides = zip(chosen.layout.dims, chosen.layout.grid.shape, strict=True)
        alike = chosen.layout.grid.size // prod(parts for dim, parts in sides if dim is not None)
        chosen, scores = chosen.local, scores.local if isinstance(scores, SpatialTensor) else scores
    counts = torch.bincount(chosen.flatten().cpu(), minlength=router.num_experts + 1).double()
    scores = scores.double().cpu()
    surprise = -torch.special.xlogy(scores, scores).sum()
    tokens = float(scores.numel() // router.num_experts)
    return torch.cat([counts, torch.tensor([float(surprise), tokens], dtype=torch.float64)]) / alike


CROWDED = 0.15  # of the time that a rank waited for a core in its first steps


def crowded(rank: int, share: float, threads: int) -> str:
    """The warning about a rank that waited for a core for this share of the time."""
    return (
        f"rank {rank} waited {100 * share:.0f} % of the time for a core: other programs use the cores that its "
        f"{threads} threads are for, and its threads wait for each other in each layer; `threads` 1 may be faster"
    )


class TrainingRun:
    """A run of the training command: loaders, epochs, validation, reports and checkpoints around one engine.

    `epoch` counts those that are complete, `batch` the batches of the present one that were used. `due`: the work after
    an epoch, such as its validation, is still to be done; a resumed run begins with it.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        schedule: Schedule,
        images: Images | Texts,
        num_classes: int,
        patience: Patience,
        meter: MemoryMeter,
        *,
        spell: Callable[[str], str],
        argv: Sequence[str] = (),
    ) -> None:
        self.spell, self.argv = spell, argv
        self.callbacks: tuple[Any, ...] = ()
        self.remarks: tuple[str, ...] = ()
        self.stopping = self.remembered = self.heeds_callbacks = False
        self.unfrozen: set[tuple[int, str]] = set()
        self.task: Task = Classify(num_classes)
        self.metrics: Mapping[str, Any] = {}
        self.best: Best | None = None
        self.directions: Mapping[str, bool | None] = {}
        self.config, self.engine, self.schedule, self.images = config, engine, schedule, images
        self.num_classes, self.patience, self.meter = num_classes, patience, meter
        self.comm, self.size, self.channels = engine.comm, config.data.image_size, images.channels
        self.bad_images = BadImages(engine.comm, config.data.on_bad_image)
        self.training, self.validation = images.loaders(config, self.boxes, partial(self.boxes, training=False))
        self.num_steps = number_of_steps(config, len(self.training))
        schedule.begin(self.num_steps)
        self.options = options_to_compare(config, len(images.training), engine.stages.counts)
        self.epoch, self.batch, self.due = 0, 0, False
        self.interval = self.new_interval()
        self.mixed = any(name.endswith(".router.weight") for name in engine.stages.shapes)
        self.work = WorkMeter(engine.comm.node)
        self.waited_for_cores: float | None = None  # until the first step
        self.began_steps = 0.0
        self.evaluation: Evaluation | None = None
        later: Any = None  # until `open`
        self.reporter = self.painter = self.about = self.folder = self.checkpoints = self.signals = later
        self.showing = self.closing = later

    def watch(self, task: Task, metrics: Mapping[str, Any], monitor: Monitor | None) -> None:
        """The metrics of validation, and the monitor of the best weights."""
        self.task, self.metrics = task, metrics
        self.directions = directions(task, metrics, monitor)
        self.best = None if monitor is None else Best(*monitor, self.config.learning.patience)

    def boxes(self, num_samples: int, training: bool = True) -> list[Box]:
        """Which boxes this rank reads of a batch."""
        return [read.box for read in self.engine.reads(num_samples, self.size, training)]

    def explain(self) -> None:
        """Say what training would take. Nothing is trained."""
        with self.comm.together((ValueError,)):
            if self.comm.rank == 0:
                found = explain(self.config, self.engine, self.num_classes, self.channels)
                print(self.spell("\n".join((*found, *self.images.remarks, *self.remarks))))
                print(f"dry run: {counted(self.num_steps, 'step was', 'steps were')} not made")

    def open(self, closing: ExitStack) -> None:
        """Choose the run's folder, and the checkpoint to resume from; report to the folder, from rank 0."""
        comm, config, self.closing = self.comm, self.config, closing
        origin = resuming.find_origin(comm, config)
        self.folder = origin.folder
        closing.callback(self.folder.unlock)
        if not origin.in_place:
            closing.push(self.discard_if_refused)
        if origin.in_place:
            resuming.lock(comm, origin)
            self.open_checkpoints()
        source, remarks = resuming.choose(comm, origin, self.checkpoints)
        metrics_bytes = 0 if source is None else self.go_on(source, remarks)
        resuming.record(origin, self.engine.num_steps, self.config, comm, self.argv)
        if self.checkpoints is None and config.run.save_every != "none":
            self.open_checkpoints()
        self.images.record(comm, self.folder.path)
        self.about = Description.of(config, self.images, self.num_classes).record(comm, self.folder.path)
        with comm.together((OSError,)):
            if comm.rank == 0:
                write_directions(self.folder.path, self.directions)
        closing.enter_context(self.folder.rank_log(comm.rank))
        self.signals = closing.enter_context(StopSignals())
        if comm.rank == 0:
            if origin.in_place:
                self.folder.cut_metrics(metrics_bytes)
            how = (self.num_steps, self.engine.num_steps, config.run.tensorboard, self.images.classes)
            self.reporter = closing.enter_context(Reporter(self.folder, *how))
            self.painter = Painter(self.reporter, self.folder, config, self.engine, self.num_steps)
            self.engine.executor.progress = self.progress
        self.showing = Showing(self.reporter, self.engine, config, self.task, self.images.classes)
        self.comm.barrier()  # so that nobody's first steps count as a wait what rank 0 draws here
        streamed = () if self.engine.stages.stream is None else (self.engine.stages.stream.remark,)
        said = (*self.images.remarks, *self.remarks, *without_effect(config, self.engine), *filter(None, streamed))
        limit = config.parallel.hang_timeout
        if limit not in (0.0, Config().parallel.hang_timeout):
            remarks = [*remarks, f"a rank without a sign of life for {limit:g} s ends the job: `hang_timeout`"]
        learnt = goal(config, self.engine, self.task, self.num_steps)
        for line in (title(config, self.engine), learnt, *said, *remarks):
            self.say(line)

    def discard_if_refused(self, _: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave no folder of a run that all ranks refused before its first step: the next command may name it again."""
        recorded = self.about is not None  # so the folder is this run's
        if isinstance(error, Refusal) and recorded and self.engine.num_steps == 0 and self.comm.rank == 0:
            with suppress(OSError):
                self.folder.discard()

    def open_checkpoints(self) -> None:
        checkpoints = Checkpoints(self.folder.path / CHECKPOINTS, self.comm, self.config.run.keep)
        self.checkpoints = self.closing.enter_context(checkpoints)

    def go_on(self, source: Path, remarks: list[str]) -> int:
        """Take everything from a checkpoint; returns how much of metrics.jsonl had been written by then."""
        there = resuming.Progress.at(source)
        more = resuming.compare(source, there, self.options)
        self.config = resuming.with_its_own(self.config, source, there)
        resuming.require_fit(source, there, self.schedule.scheduler, len(self.training))
        load(self.engine, source) if self.checkpoints is None else self.checkpoints.load(self.engine, source)
        shards = [(shard.name, shard.value) for shard in self.engine.shards()]
        parameters = {name for name, _ in shards}
        more += not_finite(self.comm, str(source), [*shards, *self.engine.buffers().items()], parameters)
        self.epoch, self.batch, self.due = there.epoch, there.batch, there.due
        self.options |= {name: there.options[name] for name in resuming.FROM_CHECKPOINT if name in there.options}
        self.interval.losses = there.losses
        self.bad_images.known |= set(there.skipped)
        self.evaluation = None if there.evaluation is None else Evaluation(**there.evaluation)
        if self.best is not None:
            self.best.go_on(there.best)
        if self.schedule.scheduler is not None:
            self.schedule.scheduler.load_state_dict(there.scheduler)
        self.schedule.require(self.num_steps)
        remarks += [f"resumes from {source}: step {self.engine.num_steps}, epoch {self.epoch + 1}", *more]
        return there.metrics_bytes

    def state(self) -> dict[str, Any]:
        """The state for `go_on` besides the engine's."""
        scheduler = self.schedule.scheduler
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "due": self.due,
            "losses": self.interval.losses,
            "skipped": sorted(self.bad_images.known),
            "evaluation": self.evaluation and asdict(self.evaluation),
            "best": self.best and self.best.state(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "metrics_bytes": self.folder.metrics_bytes,
            "options": resuming.kept(self.options),
        }

    def save(self) -> None:
        self.patience.begin("saving")
        if self.checkpoints is None:
            self.open_checkpoints()
        self.checkpoints.save(self.engine, self.state())

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due that `save_every` counts in steps."""
        every = self.config.run.save_every
        return isinstance(every, int) and step % every == 0

    @property
    def finished(self) -> bool:
        return self.engine.num_steps >= self.num_steps or (self.best is not None and self.best.enough)

    def progress(self, doing: str) -> None:
        """Feed the watchdog; `doing`, if given, describes the work of the step."""
        self.patience.feed()
        if doing:
            self.reporter.working(f"step {self.engine.num_steps + 1}: {doing}")

    def tell(self, event: str, *told: Any) -> None:
        """Call this method of all callbacks that have it."""
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self, *told)

    def stop(self) -> None:
        """End the run after this step, with a checkpoint, as a signal would. All ranks should call it."""
        self.stopping = True

    def say(self, line: str) -> None:
        if self.reporter is not None:
            self.reporter.say(self.spell(line))

    def all_epochs(self) -> None:
        """Train, save, validate; keep the weights at the end."""
        began, epochs = time.perf_counter(), self.config.training.epochs
        # Ranks may have other callbacks: whether any has steps to look at, all know, so that all ask whether to stop.
        listening = any(hasattr(callback, "on_step_end") for callback in self.callbacks)
        self.waited_for_cores, self.began_steps = core_wait_seconds(), began
        self.heeds_callbacks = bool(self.comm.all_reduce(torch.tensor(int(listening)), "max"))
        self.tell("on_fit_start")
        try:
            while self.due or (self.epoch < epochs and (self.batch or not self.finished)):
                self.one_epoch()
        except Stopped:
            asked = self.comm.all_gather_object(self.signals.caught or ("run.stop()" if self.stopping else None))
            self.say(f"stopped by {next(filter(None, asked), 'a signal')} at step {self.save_now()}")
            return
        self.patience.begin("end")
        if self.checkpoints is not None:
            self.checkpoints.wait()
        save_model(self.engine, self.folder.path / MODEL, self.images.classes, self.about.metadata)
        if self.config.tuning.ema is not None:
            with self.averaged():
                save_model(self.engine, self.folder.path / AVERAGE, self.images.classes, self.about.metadata)
        self.write()
        seconds, skipped = time.perf_counter() - began, self.bad_images.skipped
        found = summary(self.evaluation, self.task.monitor, self.engine.num_steps, seconds, skipped)
        self.compare()
        self.tell("on_fit_end")
        self.say(f"done: {found}; see {self.folder.path}")

    def write(self) -> None:
        """Print a continuation of the prompt, if the run has one. Collective."""
        data = self.config.data
        if isinstance(self.images, Texts) and data.prompt is not None:
            self.patience.begin("writing")
            tokenizer, seed = self.images.tokenizer, self.config.training.seed
            with put_back(self.engine.executor):
                text = continued(self.engine, tokenizer, data.prompt, data.context, data.prompt_tokens, seed)
            self.say(f"the model continues {data.prompt!r}:\n{text}")

    def compare(self) -> None:
        """Report estimated and measured work of each rank, for a plan of several stages. Collective."""
        stages, plan = self.engine.stages, self.engine.plan
        of_ranks = self.comm.all_gather_object(self.work.worked)
        if stages.prices is None or self.engine.device.type != "cpu" or not any(rank.seconds for rank in of_ranks):
            return  # of a GPU, whose work the host does not wait for, it would say nothing
        forecast = Forecast.of(plan, stages.prices, stages.counts)
        for line in compared(forecast, of_ranks, self.comm.node.oversubscribed):
            self.say(line)

    def reading(self, loader: Any, epoch: int, start: int = 0, training: bool = True) -> Reading:
        """The batches that all ranks can read."""

        def divide(num_samples: int) -> Divided:
            self.patience.begin("step" if training else "validation")
            return self.engine.plan.divide(num_samples, training), self.engine.reads(num_samples, self.size, training)

        return Reading(self.comm, loader, epoch, start, self.bad_images, divide, self.own_news)

    def one_epoch(self) -> None:
        """Train for an epoch, or the rest of it, save, and do the work after it."""
        saves, every, epochs = self.config.run.save_every, self.config.training.eval_every, self.config.training.epochs
        if not self.due:
            self.unfreeze()
            self.train()
            if self.config.training.check_replicas:
                self.engine.check_replicas()
            if self.batch == len(self.training) or not self.finished:  # else it may yet go on to more steps
                self.epoch, self.batch, self.due = self.epoch + 1, 0, True
        epoch = self.epoch if self.due else self.epoch + 1
        last = self.finished or epoch == epochs
        if saves == "epoch" or self.saves_at(self.engine.num_steps) or (last and saves != "none"):
            self.save()
        validated = every is not None and (epoch % every == 0 or last)
        if validated:
            self.validate(epoch)
        self.schedule.after_epoch(self.evaluation.loss if validated and self.evaluation else None)
        self.epoch, self.batch, self.due = epoch, 0, False
        self.tell("on_epoch_end", epoch)
        if not last:
            self.heed(ControlFlags.of_all(self.comm, self.own_news()))

    def unfreeze(self) -> None:
        """Train what is frozen no more in this epoch."""
        for epoch, pattern in self.config.tuning.unfreeze:
            if epoch <= self.epoch + 1 and (epoch, pattern) not in self.unfrozen:
                self.unfrozen.add((epoch, pattern))
                names = self.engine.unfreeze(pattern)
                self.say(f"epoch {epoch}: {counted(len(names), 'parameter is', 'parameters are')} trained: {pattern}")

    def averaged(self) -> AbstractContextManager[None]:
        """The context in which the weights are those that are validated."""
        return nullcontext() if self.config.tuning.ema is None else self.engine.averaged()

    def train(self) -> None:
        """Train for the rest of the epoch, or up to the last step."""
        self.interval = self.new_interval(self.interval.losses)
        if self.finished:
            return
        reading, first = self.reading(self.training, self.epoch, self.batch), self.engine.num_steps
        with self.saved_if_refused():
            for batch, microbatches in reading:
                if self.engine.num_steps == 0:
                    self.showing.samples(batch.tiles, microbatches[0])
                tell = reading.tell if self.engine.num_steps + 1 < self.num_steps else self.own_news
                with self.work if self.engine.num_steps > first else nullcontext():  # the first one learns shapes
                    result = self.engine.step(batch.tiles, batch.labels, self.size, microbatches, tell)
                reading.hear(result.told)
                self.batch = reading.used
                self.interval.add(result.loss, len(batch.labels))
                self.schedule.after_step()
                self.tell("on_step_end", result)
                if self.reporter is not None:
                    self.reporter.advance(self.engine.num_steps)
                if self.engine.num_steps % self.config.run.log_interval == 0:
                    self.report()
                if self.finished:
                    break
                asked = self.heeds_callbacks and ControlFlags.of_all(self.comm, self.own_news()).stop
                self.heed(reading.news._replace(stop=reading.news.stop or asked))
                if self.saves_at(self.engine.num_steps) and self.batch < len(self.training):
                    self.save()
        self.report()

    def report(self) -> None:
        """Say how the steps went since the last report."""
        if not self.remembered and self.interval.losses:
            self.remembered = remember(self.painter, self.config, self.engine, self.meter)
            self.look_at_cores()
        found = self.interval.report(self.epoch + 1, self.meter.peak_bytes())
        self.interval = self.new_interval()
        use = expert_use(self.engine) if self.mixed else None
        if self.reporter is not None and found is not None:
            if use is not None:
                found = replace(found, expert_imbalance=use.imbalance, dropped_tokens=use.dropped)
                found = replace(found, router_entropy=use.entropy)
                self.reporter.images("experts/load by layer and expert", use.picture(), found.step)
            self.reporter.step(found)

    def look_at_cores(self) -> None:
        """Say whether ranks had to wait for cores, though they took more threads than one by themselves. Collective."""
        waited, threads = core_wait_seconds(), torch.get_num_threads()
        chose = self.comm.node.chose_threads and threads > 1
        share = 0.0
        if chose and waited is not None and self.waited_for_cores is not None:
            share = (waited - self.waited_for_cores) / (time.perf_counter() - self.began_steps)
        worst, rank = max(zip(self.comm.all_gather_object(share), range(self.comm.size), strict=True))
        if worst > CROWDED:
            self.say(crowded(rank, worst, threads))

    def new_interval(self, losses: Sequence[float] = ()) -> LogInterval:
        data = self.config.data
        return LogInterval(self.engine, self.training, losses, None if data.text is None else data.context)

    def own_news(self, bad_image: bool = False) -> ControlFlags:
        """The flags of this rank."""
        cannot_save = self.checkpoints is not None and self.checkpoints.failed
        return ControlFlags(self.stopping or self.signals.caught is not None, cannot_save, bad_image)

    def heed(self, news: ControlFlags) -> None:
        """Raises Stopped if a signal came to any rank, Refusal if a checkpoint cannot be written; on all ranks."""
        if news.cannot_save:
            self.checkpoints.wait()
        if news.stop:
            raise Stopped

    @contextmanager
    def saved_if_refused(self) -> Iterator[None]:
        """Save before the run ends by what all ranks find together: then it costs nothing."""
        try:
            yield
        except (NotFinite, UnreadableImages):
            if self.engine.num_steps and self.config.run.save_every != "none":
                self.say(f"saved at step {self.save_now()}")
            raise

    def save_now(self) -> str:
        """Save, and return when that is done: after which step, and how to resume."""
        self.save()
        self.checkpoints.wait()
        command = resuming.command_to_go_on(self.comm.size, self.argv, self.folder.path)
        return f"{self.engine.num_steps} of {self.num_steps}; resume with: {command}"

    def validate(self, epoch: int) -> None:
        """Measure the model on the validation images. If that is broken off, it is as if it had not begun."""

        def batches() -> Iterator[tuple[Any, ...]]:
            for batch, microbatches in (reading := self.reading(self.validation, 0, training=False)):
                self.heed(reading.news)
                self.showing.watch(batch.tiles, microbatches[0])
                yield batch.tiles, batch.labels, microbatches

        if self.checkpoints is not None:
            self.checkpoints.wait()  # whatever happens here, the epoch is on disk
        with self.saved_if_refused(), self.averaged(), put_back(self.engine.executor):
            found = self.engine.evaluate(batches(), self.size, self.metrics, self.showing.measured)
            self.evaluation = found
            better = self.best is not None and self.best.see(found, self.engine.num_steps)
            if better:
                save_model(self.engine, self.folder.path / BEST, self.images.classes, self.about.metadata)
        self.tell("on_validation_end", found)
        self.showing.validated()
        if self.reporter is not None:
            bits = self.images.bits_per_byte(found.loss)
            accuracy = found.accuracy or 0.0 if self.task.accuracy else found.accuracy
            told = (found.loss, accuracy, bits, found.metrics, better)
            self.reporter.validation(ValidationReport(self.engine.num_steps, epoch, *told))
        if self.best is not None:
            remark = self.best.undefined(found)
            for line in (*([remark] if remark else []), *([self.best.words()] if self.best.enough else [])):
                self.say(line)
