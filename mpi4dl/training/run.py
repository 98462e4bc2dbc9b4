"""A run of the training command: its epochs, and what is reported, saved and resumed on the way."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mpi4dl._wording import counted
from mpi4dl.checkpoints import Checkpoints, load, save_model
from mpi4dl.checkpoints.json_values import put_back
from mpi4dl.checkpoints.manifest import AVERAGE, CHECKPOINTS, MODEL
from mpi4dl.checkpoints.weights import not_finite
from mpi4dl.comm import Refusal
from mpi4dl.comm.node import core_wait_seconds
from mpi4dl.engine import Evaluation, NotFinite
from mpi4dl.options.models import without_rules
from mpi4dl.options.sections.parallel import Parallel
from mpi4dl.options.tasks import directions
from mpi4dl.parallel.inputs import OwnSizes, own_or
from mpi4dl.results.formats import write_object
from mpi4dl.results.names import MEASURES
from mpi4dl.runs.folder import BEST
from mpi4dl.runs.stopping import Stopped, StopSignals
from mpi4dl.training import resuming
from mpi4dl.training.input_pipeline import BadImages, ControlFlags, Divided, OfSamples, Reading, UnreadableImages
from mpi4dl.training.report import (
    Forecast,
    LogInterval,
    Reporter,
    ValidationReport,
    WorkMeter,
    compared,
    expert_use,
    summary,
    title,
)
from mpi4dl.training.resuming import Best, contents_of, options_to_compare
from mpi4dl.training.setup import Setup, command_to_go_on, told_before
from mpi4dl.training.tensorboard import Painter, Showing, remember


def fit(setup: Setup) -> Evaluation | None:
    """Train: all epochs, with validations, checkpoints and reports; or say what that would take, of a dry run.

    Returns the last validation. Collective.
    """
    spec = setup.spec
    with ExitStack() as closing:
        closing.callback(setup.patience.stop)
        with without_rules(spec.parallel):
            told = told_before(setup)
            setup.patience.feed()
            if spec.run.dry_run:
                dry_run(setup, told)
                return None
        run = TrainingRun(setup, told, closing)
        with setup.assembly.running(spec.num_outputs, spec.channels):
            run.all_epochs()
    return run.evaluation


def dry_run(setup: Setup, told: Sequence[str]) -> None:
    """Print what training would take, from rank 0. Collective."""
    from mpi4dl.estimate.dry_run import explain

    engine = setup.engine
    with engine.comm.together((ValueError,)):
        if engine.comm.rank == 0:
            found = [*explain(setup.workload_of_loss(), engine)]
            told = [line for line in told if line not in "\n".join(found).splitlines()]
            lines = (title(setup.spec, engine), *found, *setup.images.remarks, *setup.remarks, *told)
            print(setup.spell("\n".join(lines)))
            print(f"dry run: {counted(setup.num_steps, 'step was', 'steps were')} not made")


CROWDED = 0.15  # of the time that a rank waited for a core in its first steps


class TrainingRun:
    """A run of the training command: loaders, epochs, validation, reports and checkpoints around one engine.

    `epoch` counts those that are complete, `batch` the batches of the present one that were used. `due`: the work after
    an epoch, such as its validation, is still to be done; a resumed run begins with it.
    """

    def __init__(self, setup: Setup, told: Sequence[str], closing: ExitStack) -> None:
        """Choose the run's folder, and the checkpoint to resume from; report to the folder, from rank 0. Collective.

        `told` is what there is to say beside the remarks of `setup`; `closing` ends what must be ended.
        """
        self.closing, self.spell, self.argv, self.callbacks = closing, setup.spell, setup.argv, setup.callbacks
        self.engine, self.schedule, self.images, self.spec = setup.engine, setup.schedule, setup.images, setup.spec
        self.chosen, self.tuning, self.source = self.spec.run, self.spec.tuning, self.spec.source
        engine, comm, run = self.engine, self.engine.comm, self.chosen
        self.comm, self.size = comm, self.source.size
        self.task, self.metrics, self.patience, self.meter = setup.task, setup.metrics, setup.patience, setup.meter
        self.training, self.validation, self.num_steps = setup.training, setup.validation, setup.num_steps
        self.stopping = self.remembered = self.heeds_callbacks = False
        self.unfrozen: set[tuple[int, str]] = set()
        self.best = None if setup.monitor is None else Best(*setup.monitor)
        self.bad_images = BadImages(comm, self.source.data.on_bad_image)
        contents = contents_of(self.images.training, self.images.validation)
        self.options = options_to_compare(setup.options, len(self.images.training), engine.stages.counts) | contents
        self.epoch, self.batch, self.due = 0, 0, False
        self.interval = self.new_interval()
        self.has_experts = any(name.endswith(".router.weight") for name in engine.stages.shapes)
        # Measures the work of stages that was estimated.
        self.work = None if engine.stages.costs is None else WorkMeter(comm.node)
        self.waited_for_cores: float | None = None  # until the first step
        self.began_steps = 0.0
        self.evaluation: Evaluation | None = None
        self.checkpoints: Checkpoints | None = None  # as long as nothing is saved
        self.reporter: Reporter | None = None  # on rank 0, once the folder is there
        self.painter: Painter | None = None
        origin = comm.from_first(lambda: resuming.find_origin(run, self.spec.name, datetime.now()))
        self.folder = origin.folder
        closing.callback(self.folder.unlock)
        if origin.in_place:
            comm.from_first(self.folder.lock)
            self.checkpoints = self.open_checkpoints()
        source, remarks = resuming.choose(comm, origin, self.checkpoints)
        metrics_bytes = 0 if source is None else self.go_on(source, remarks)
        with comm.together((ValueError, OSError)):
            options = setup.toml(self.options, source)
            files = resuming.files_of(setup.assembly.prints, self.tuning.weights)
        resuming.record(origin, engine.num_steps, options, files, comm, self.argv)
        self.images.record(comm, self.folder.path)
        self.about = setup.about().record(comm, self.folder.path)
        if not origin.in_place:
            closing.push(self.discard_if_refused)
        if self.checkpoints is None and run.save_every != "none":
            self.checkpoints = self.open_checkpoints()
        measures = {"higher_is_better": directions(self.task, self.metrics, setup.monitor)}
        comm.from_first(lambda: write_object(self.folder.path / MEASURES, measures))
        closing.enter_context(self.folder.rank_log(comm.rank))
        self.signals = closing.enter_context(StopSignals())
        lines = setup.first_lines()
        if comm.rank == 0:
            if origin.in_place:
                remarks = [*remarks, *self.folder.cut_metrics(metrics_bytes)]
            how = (self.num_steps, engine.num_steps, run.tensorboard, self.images.classes)
            self.reporter = closing.enter_context(Reporter(self.folder, *how, noun=self.source.sample_noun))
            self.painter = Painter(self.reporter, self.folder, options, engine, lines[0], self.num_steps)
            engine.executor.progress = self.progress
        self.showing = Showing(self.reporter, engine, self.source, self.task, self.images.classes)
        comm.barrier()  # so that nobody's first steps count as a wait what rank 0 draws here
        streamed = () if engine.stages.stream is None else (engine.stages.stream.remark,)
        limit = self.spec.parallel.hang_timeout
        if limit not in (0.0, Parallel.hang_timeout):
            remarks = [*remarks, f"a rank without a sign of life for {limit:g} s ends the job: `hang_timeout`"]
        said = (*self.images.remarks, *setup.remarks, *told, *lines[2:], *filter(None, streamed))
        for line in (*lines[:2], *said, *remarks):
            self.say(line)
        self.start_clock = setup.start_clock if run.verbose else None
        setup.start_clock.end("folder")

    def discard_if_refused(self, _: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave no folder of a run that all ranks refused before its first step: the next command may name it again."""
        if isinstance(error, Refusal) and self.engine.num_steps == 0 and self.comm.rank == 0:
            with suppress(OSError):
                self.folder.discard()

    def open_checkpoints(self) -> Checkpoints:
        return self.closing.enter_context(Checkpoints(self.folder.path / CHECKPOINTS, self.comm, self.chosen.keep))

    def go_on(self, source: Path, remarks: list[str]) -> int:
        """Take everything from a checkpoint; returns how much of metrics.jsonl had been written by then."""
        there = resuming.Progress.at(source)
        more = resuming.compare(source, there, self.options)
        self.schedule.require(self.num_steps, there.scheduler)
        resuming.require_fit(source, there, self.schedule.scheduler, len(self.training))
        load(self.engine, source) if self.checkpoints is None else self.checkpoints.load(self.engine, source)
        shards = [(shard.name, shard.value) for shard in self.engine.shards()]
        parameters = {name for name, _ in shards}
        more += not_finite(self.comm, str(source), [*shards, *self.engine.buffers().items()], parameters)
        self.epoch, self.batch, self.due = there.epoch, there.batch, there.due
        self.options |= {name: there.options[name] for name in resuming.FROM_CHECKPOINT if name in there.options}
        self.interval.losses = there.losses
        self.bad_images.known |= set(there.skipped)
        for name, callback in self.named_callbacks("load_state_dict"):
            if name in there.callbacks:
                callback.load_state_dict(there.callbacks[name])
        self.evaluation = there.evaluation
        if self.best is not None:
            more += self.best.go_on(
                there.best, self.comm.from_first(lambda: resuming.unreadable(self.folder.path / BEST))
            )
        if self.schedule.scheduler is not None:
            self.schedule.scheduler.load_state_dict(there.scheduler)
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
            "evaluation": self.evaluation and asdict(replace(self.evaluation, metrics={})),
            "best": self.best and asdict(self.best),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "metrics_bytes": self.folder.metrics_bytes,
            "options": self.options,
            "callbacks": {name: callback.state_dict() for name, callback in self.named_callbacks("state_dict")},
        }

    def save(self) -> None:
        self.patience.begin("saving")
        if self.checkpoints is None:
            self.checkpoints = self.open_checkpoints()
        self.checkpoints.save(self.engine, self.state())

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due that `save_every` counts in steps."""
        every = self.chosen.save_every
        return isinstance(every, int) and step % every == 0

    @property
    def finished(self) -> bool:
        return self.engine.num_steps >= self.num_steps or (self.best is not None and self.best.enough)

    def progress(self, doing: str) -> None:
        """Feed the watchdog; `doing`, if given, describes the work of the step."""
        self.patience.feed()
        if doing and self.reporter is not None:
            self.reporter.working(f"step {self.engine.num_steps + 1}: {doing}")

    def tell(self, event: str, *told: Any) -> None:
        """Call this method of all callbacks that have it."""
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self, *told)

    def named_callbacks(self, method: str) -> Iterator[tuple[str, Any]]:
        """The callbacks that have this method, with names for checkpoints."""
        named = ((f"{number} {type(each).__name__}", each) for number, each in enumerate(self.callbacks))
        return ((name, each) for name, each in named if hasattr(each, method))

    def stop(self) -> None:
        """End the run after this step, with a checkpoint, as a signal would. All ranks should call it."""
        self.stopping = True

    def say(self, line: str) -> None:
        if self.reporter is not None:
            self.reporter.say(self.spell(line))

    def all_epochs(self) -> None:
        """Train, save, validate; keep the weights at the end."""
        began, epochs, earlier = time.perf_counter(), self.spec.training.epochs, self.engine.num_steps
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
        if self.tuning.ema is not None:
            with self.averaged():
                save_model(self.engine, self.folder.path / AVERAGE, self.images.classes, self.about.metadata)
        seconds, skipped = time.perf_counter() - began, self.bad_images.skipped
        found = summary(self.evaluation, self.task.monitor, self.engine.num_steps, earlier, seconds, skipped)
        self.compare()
        self.tell("on_fit_end")
        self.say(f"done: {found}; see {self.folder.path}")

    def compare(self) -> None:
        """Report estimated and measured work of each rank, for a plan of several stages. Collective."""
        stages, plan = self.engine.stages, self.engine.plan
        if self.work is None or stages.costs is None:
            return
        of_ranks = self.comm.all_gather_object(self.work.worked)
        if self.engine.device.type != "cpu" or not any(rank.seconds for rank in of_ranks):
            return  # of a GPU, whose work the host does not wait for, it would say nothing
        forecast = Forecast.of(plan, stages.costs, stages.counts)
        for line in compared(forecast, of_ranks, self.comm.node.oversubscribed):
            self.say(line)

    def reading(self, loader: Any, epoch: int, start: int = 0, training: bool = True) -> Reading:
        """The batches that all ranks can read."""

        def divide(num_samples: int, of_samples: OfSamples) -> Divided:
            self.patience.begin("step" if training else "validation")
            sizes = own_or(of_samples, self.size)
            return self.engine.plan.divide(num_samples, training), self.engine.reads(num_samples, sizes, training)

        return Reading(self.comm, loader, epoch, start, self.bad_images, divide, self.own_news)

    def one_epoch(self) -> None:
        """Train for an epoch, or the rest of it, save, and do the work after it."""
        saves, every, epochs = (
            self.chosen.save_every,
            self.spec.training.eval_every,
            self.spec.training.epochs,
        )
        if not self.due:
            self.unfreeze()
            self.train()
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
        for epoch, pattern in self.tuning.unfreeze:
            if epoch <= self.epoch + 1 and (epoch, pattern) not in self.unfrozen:
                self.unfrozen.add((epoch, pattern))
                names = self.engine.unfreeze(pattern)
                self.say(f"epoch {epoch}: {counted(len(names), 'parameter is', 'parameters are')} trained: {pattern}")

    def averaged(self) -> AbstractContextManager[None]:
        """The context in which the weights are those that are validated."""
        return nullcontext() if self.tuning.ema is None else self.engine.averaged()

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
                learns_shapes = self.engine.num_steps == first
                with nullcontext() if self.work is None or learns_shapes else self.work:
                    result = self.engine.step(
                        batch.tiles, batch.targets, own_or(batch.sizes, self.size), microbatches, tell
                    )
                reading.hear(result.told)
                self.batch = reading.used
                self.interval.add(result.loss, len(batch.labels))
                self.schedule.after_step()
                self.tell("on_step_end", result)
                if self.start_clock is not None:
                    self.start_clock.end("first step")
                    self.say(f"start: {self.start_clock}")
                    self.start_clock = None
                if self.reporter is not None:
                    self.reporter.advance(self.engine.num_steps)
                if self.engine.num_steps % self.chosen.log_interval == 0:
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
            self.remembered = remember(self.painter, self.spec.parallel.offload == "disk", self.engine, self.meter)
            self.look_at_cores()
        found = self.interval.report(self.epoch + 1, self.meter.peak_bytes())
        self.interval = self.new_interval()
        use = expert_use(self.engine) if self.has_experts else None
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
            self.say(
                f"rank {rank} waited {100 * worst:.0f} % of the time for a core: other programs use the cores that its "
                f"{threads} threads are for, and its threads wait for each other in each layer; `threads` 1 may be "
                "faster"
            )

    def new_interval(self, losses: Sequence[float] = ()) -> LogInterval:
        return LogInterval(self.engine, self.training, losses, self.source.tokens)

    def own_news(self, bad_image: bool = False) -> ControlFlags:
        """The flags of this rank."""
        cannot_save = self.checkpoints is not None and self.checkpoints.failed
        return ControlFlags(self.stopping or self.signals.caught is not None, cannot_save, bad_image)

    def heed(self, news: ControlFlags) -> None:
        """Raises Stopped if a signal came to any rank, Refusal if a checkpoint cannot be written; on all ranks."""
        if news.cannot_save and self.checkpoints is not None:
            self.checkpoints.wait()
        if news.stop:
            raise Stopped

    @contextmanager
    def saved_if_refused(self) -> Iterator[None]:
        """Save before the run ends by what all ranks find together: then it costs nothing."""
        try:
            yield
        except (NotFinite, UnreadableImages):
            if self.engine.num_steps and self.chosen.save_every != "none":
                self.say(f"saved at step {self.save_now()}")
            raise

    def save_now(self) -> str:
        """Save, and return when that is done: after which step, and how to resume."""
        self.save()
        assert self.checkpoints is not None
        self.checkpoints.wait()
        command = command_to_go_on(self.comm.size, self.argv, self.folder.path)
        return f"{self.engine.num_steps} of {self.num_steps}; resume with: {command}"

    def validate(self, epoch: int) -> None:
        """Measure the model on the validation images. If that is broken off, it is as if it had not begun."""

        def batches() -> Iterator[tuple[Any, ...]]:
            for batch, microbatches in (reading := self.reading(self.validation, 0, training=False)):
                self.heed(reading.news)
                self.showing.watch(batch.tiles, microbatches[0])
                own = () if batch.sizes is None else (OwnSizes(batch.sizes),)
                yield batch.tiles, batch.labels, microbatches, *own

        if self.checkpoints is not None:
            self.checkpoints.wait()  # whatever happens here, the epoch is on disk
        with self.saved_if_refused(), self.averaged(), put_back(self.engine.executor):
            found = self.engine.evaluate(batches(), self.size, self.metrics, self.showing.measuring(self.metrics))
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
