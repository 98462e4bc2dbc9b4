"""The training command: `mpirun -n 4 python -m mpi4dl.train --tiles 2x2 --images data/slides`.

It reads top to bottom: `main` starts MPI, `train` builds what the configuration names, `Run` goes through the epochs.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4dl.comm import guard

if __name__ == "__main__":
    guard.arm()  # before anything else that may fail on one rank alone

from mpi4dl.runtime.config import Config, ConfigError, hang_timeout, parse, shared_options, to_toml
from mpi4dl.runtime.memory import within_limits
from mpi4dl.runtime.stopping import die_by_ctrl_c
from mpi4dl.runtime.wording import counted

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from mpi4dl.comm import Communicator
    from mpi4dl.datasets import Batch
    from mpi4dl.engine import Evaluation
    from mpi4dl.geometry import Box

SIGNALLED, CANNOT_SAVE = 1, 2  # what ranks tell each other after a step; the largest counts


def main(argv: Sequence[str] | None = None) -> None:
    """Train by the command line `argv`, on all ranks of the MPI job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        parse(["--help"])
    die_by_ctrl_c()
    guard.run(lambda comm: within_limits(lambda: train(comm, arguments), comm.rank), hang_timeout(arguments))


def configure(comm: "Communicator", argv: Sequence[str]) -> Config:
    """The configuration, which all ranks were started with; else all raise the same Refusal."""
    with comm.together((ConfigError,)):
        config = parse(argv)
    comm.agree(None, **shared_options(config))
    return config


def train(comm: "Communicator", argv: Sequence[str]) -> None:
    """Build everything that the configuration names, each rank its part, and train."""
    config = configure(comm, argv)
    if config.run.print_config:
        print(to_toml(config) if comm.rank == 0 else "", end="")
        return

    import torch

    from mpi4dl.engine import Engine
    from mpi4dl.runtime import build
    from mpi4dl.runtime.images import open_images
    from mpi4dl.runtime.memory import MemoryMeter, keep_freed_memory

    with comm.together((ValueError,)):
        plan = build.build_plan(config)
    comm.agree(plan.problem(comm.size, config.data.image_size, config.data.batch_size))
    comm.node.share_cores()
    torch.manual_seed(config.training.seed)
    keep_freed_memory(config.parallel.keep_freed_memory)
    watchdog = guard.Watchdog(config.parallel.hang_timeout)
    with comm.together():
        device = comm.node.device(config.parallel.device)
    if device.type == "cuda":
        comm.choose_gpu_wire(config.parallel.gpu_wire)
    meter = MemoryMeter(device)
    images = open_images(comm, config)
    with comm.together((ValueError, TypeError)):
        num_classes = build.number_of_classes(config, images.training.classes)
        model = build.hold_model(config, plan, num_classes, images.training.channels, comm, device).train()
    with comm.together((ValueError, TypeError)):
        optimizer = build.build_optimizer(config, model.parameters())
        schedule = build.build_schedule(config, optimizer)
    with comm.together((ConfigError, OSError)):
        options = build.engine_options(config)
    engine = Engine(model, plan, optimizer, build.classification_loss, comm=comm, **options)
    with comm.together((ValueError,)):
        run = Run(config, engine, schedule, images, num_classes, watchdog, meter)
    if config.run.dry_run:
        run.explain()
        return
    with ExitStack() as closing:
        run.open(closing, argv)
        with build.blaming_the_model(config, plan, num_classes, images.training.channels):
            run.all_epochs()
    watchdog.stop()


class Run:
    """A run of the training command: loaders, epochs, validation, reports and checkpoints around one engine.

    `epoch` counts those that are complete, `batch` the batches of the present one that were used.
    """

    def __init__(
        self, config: Config, engine: Any, schedule: Any, images: Any, num_classes: int, watchdog: Any, meter: Any
    ) -> None:
        from mpi4dl.runtime.bad_images import BadImages
        from mpi4dl.runtime.build import number_of_steps
        from mpi4dl.runtime.interval import Interval
        from mpi4dl.runtime.resuming import options_to_compare

        self.config, self.engine, self.schedule, self.images = config, engine, schedule, images
        self.num_classes, self.watchdog, self.meter = num_classes, watchdog, meter
        self.comm, self.size, self.channels = engine.comm, config.data.image_size, images.training.channels
        self.bad_images = BadImages(engine.comm, config.data.on_bad_image)
        self.training, self.validation = images.loaders(config, self.boxes, partial(self.boxes, training=False))
        self.num_steps = number_of_steps(config, len(self.training))
        schedule.require(self.num_steps)
        self.options = options_to_compare(config, len(images.training))
        self.epoch, self.batch = 0, 0
        self.interval = Interval(engine, self.training)
        self.evaluation: Evaluation | None = None
        self.reporter: Any = None
        self.folder: Any = None
        self.checkpoints: Any = None
        self.signals: Any = None
        self.closing: Any = None
        self.argv: Sequence[str] = ()

    def boxes(self, num_samples: int, training: bool = True) -> list["Box"]:
        """Which boxes this rank reads of a batch."""
        return [read.box for read in self.engine.reads(num_samples, self.size, training)]

    def explain(self) -> None:
        """Say what training would take. Nothing is trained."""
        from mpi4dl.runtime.dry_run import explain

        with self.comm.together((ValueError,)):
            if self.comm.rank == 0:
                found = explain(self.config, self.engine, self.num_classes, self.channels)
                print("\n".join((*found, *self.images.remarks)))
                print(f"dry run: {counted(self.num_steps, 'step was', 'steps were')} not made")

    def open(self, closing: ExitStack, argv: Sequence[str]) -> None:
        """Choose the run's folder, and the checkpoint to go on from; report to the folder, from rank 0."""
        from mpi4dl.runtime import resuming
        from mpi4dl.runtime.dry_run import title, without_effect
        from mpi4dl.runtime.report import Reporter
        from mpi4dl.runtime.stopping import StopSignals

        comm, config, self.closing, self.argv = self.comm, self.config, closing, argv
        origin = resuming.find_origin(comm, config)
        self.folder = origin.folder
        closing.callback(self.folder.unlock)
        if origin.in_place:
            resuming.lock(comm, origin)
            self.open_checkpoints()
        source, remarks = resuming.choose(comm, origin, self.checkpoints)
        metrics_bytes = 0 if source is None else self.go_on(source, remarks)
        resuming.record(origin, self.engine.num_steps, self.config, comm, argv)
        if self.checkpoints is None and config.run.save_every != "none":
            self.open_checkpoints()
        self.images.record(comm, self.folder.path)
        closing.enter_context(self.folder.rank_log(comm.rank))
        self.signals = closing.enter_context(StopSignals())
        if comm.rank == 0:
            if origin.in_place:
                self.folder.cut_metrics(metrics_bytes)
            first_step, tensorboard = self.engine.num_steps, config.run.tensorboard
            reporter = Reporter(self.folder, self.num_steps, first_step=first_step, tensorboard=tensorboard)
            self.reporter = closing.enter_context(reporter)
        for line in (title(config, self.engine), *self.images.remarks, *without_effect(config, self.engine), *remarks):
            self.say(line)

    def open_checkpoints(self) -> None:
        from mpi4dl.runtime.checkpoint import Checkpoints
        from mpi4dl.runtime.checkpoint.manifest import CHECKPOINTS

        checkpoints = Checkpoints(self.folder.path / CHECKPOINTS, self.comm, self.config.run.keep)
        self.checkpoints = self.closing.enter_context(checkpoints)

    def go_on(self, source: "Path", remarks: list[str]) -> int:
        """Take everything from a checkpoint; returns how much of metrics.jsonl had been written by then."""
        from mpi4dl.engine import Evaluation
        from mpi4dl.runtime import resuming
        from mpi4dl.runtime.checkpoint import load

        there = resuming.Progress.at(source)
        more = resuming.compare(source, there, self.options)
        self.config = resuming.with_its_own(self.config, source, there)
        resuming.require_fit(source, there, self.schedule.scheduler, len(self.training))
        load(self.engine, source) if self.checkpoints is None else self.checkpoints.load(self.engine, source)
        self.epoch, self.batch = there.epoch, there.batch
        self.options |= {name: there.options[name] for name in resuming.FROM_CHECKPOINT}
        self.interval.losses = there.losses
        self.bad_images.known |= set(there.skipped)
        self.evaluation = None if there.evaluation is None else Evaluation(**there.evaluation)
        if self.schedule.scheduler is not None:
            self.schedule.scheduler.load_state_dict(there.scheduler)
        self.schedule.require(self.num_steps)
        remarks += [f"goes on from {source}: step {self.engine.num_steps}, epoch {self.epoch + 1}", *more]
        return there.metrics_bytes

    def state(self) -> dict[str, Any]:
        """What `go_on` needs, beside the engine's state."""
        scheduler = self.schedule.scheduler
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "losses": self.interval.losses,
            "skipped": sorted(self.bad_images.known),
            "evaluation": self.evaluation and asdict(self.evaluation),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "metrics_bytes": self.folder.metrics_bytes,
            "options": self.options,
        }

    def save(self) -> None:
        if self.checkpoints is None:
            self.open_checkpoints()
        self.checkpoints.save(self.engine, self.state())

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due that --save-every counts in steps."""
        every = self.config.run.save_every
        return isinstance(every, int) and step % every == 0

    @property
    def finished(self) -> bool:
        return self.engine.num_steps >= self.num_steps

    def say(self, line: str) -> None:
        if self.reporter is not None:
            self.reporter.say(line)

    def all_epochs(self) -> None:
        """Train, validate, save; keep the weights at the end."""
        from mpi4dl.runtime.checkpoint import save_model

        began, saves = time.perf_counter(), self.config.run.save_every
        epochs, every = self.config.training.epochs, self.config.training.eval_every
        while self.epoch < epochs and (self.batch or not self.finished):
            stopped = self.one_epoch()
            if stopped:
                self.pause()
                return
            if self.finished and self.batch < len(self.training) and saves != "none":
                self.save()  # as it is in the middle of an epoch, for a run that goes on to more steps
            if self.config.training.check_replicas:
                self.engine.check_replicas()
            epoch = self.epoch + 1
            last = self.finished or epoch == epochs
            validated = every is not None and (epoch % every == 0 or last)
            if validated and not self.validate(epoch):
                self.pause()
                return
            self.schedule.after_epoch(self.evaluation.loss if validated and self.evaluation else None)
            self.epoch, self.batch = epoch, 0
            if not last and self.asked_to_stop():
                self.pause()
                return
            if saves == "epoch" or self.saves_at(self.engine.num_steps) or (last and saves != "none"):
                self.save()
        if self.checkpoints is not None:
            self.checkpoints.wait()
        save_model(self.engine, self.folder.path / "model.safetensors", self.images.training.classes)
        seconds = time.perf_counter() - began
        accuracy = self.evaluation.accuracy if self.evaluation else None
        result = "" if accuracy is None else f"validation accuracy {100 * accuracy:.1f} %, "
        unreadable = self.bad_images.skipped
        skipped = f", {counted(unreadable, 'unreadable image')} skipped" if unreadable else ""
        steps = counted(self.engine.num_steps, "step")
        self.say(f"done: {result}{steps} in {seconds:.0f} s{skipped}; see {self.folder.path}")

    def batches(
        self, loader: Any, epoch: int, start: int = 0, training: bool = True
    ) -> Iterator[tuple[int, "Batch", Any]]:
        """The batches that all ranks can read, and how they are divided; the watchdog is fed between them.

        With each comes how many of the epoch's batches are used once it is. Raises Refusal if an epoch has none left.
        """
        from mpi4dl.comm import Refusal

        used = start
        for number, batch in enumerate(loader.epoch(epoch, start), start + 1):
            self.watchdog.feed()
            microbatches = self.engine.plan.divide(len(batch.indices), training)
            reads = self.engine.reads(len(batch.indices), self.size, training)
            readable = self.bad_images.agree(batch, microbatches, reads)
            if readable is not None:
                used = number
                yield used, *readable
        if used == 0:
            raise Refusal(f"no batch is left of an epoch's {len(loader)}: {min(self.bad_images.known)}")

    def one_epoch(self) -> bool:
        """Train for the rest of the epoch, or up to the last step. Whether it was stopped by a signal before."""
        from mpi4dl.runtime.interval import Interval

        self.interval = Interval(self.engine, self.training, self.interval.losses)
        if self.finished:
            return False
        for used, batch, microbatches in self.batches(self.training, self.epoch, self.batch):
            if self.engine.num_steps == 0:
                self.show_samples(batch.tiles, microbatches[0])
            result = self.engine.step(batch.tiles, batch.labels, self.size, microbatches)
            self.batch = used
            self.schedule.after_step()
            self.interval.add(result.loss, len(batch.labels))
            if self.reporter is not None:
                self.reporter.advance(self.engine.num_steps)
            if self.engine.num_steps % self.config.run.log_interval == 0:
                self.report()
            if self.finished:
                break
            if self.asked_to_stop():
                return True
            if self.saves_at(self.engine.num_steps) and self.batch < len(self.training):
                self.save()
        self.report()
        return False

    def report(self) -> None:
        """Say how the steps went since the last report."""
        from mpi4dl.runtime.interval import Interval

        found = self.interval.report(self.epoch + 1, self.meter.peak_bytes())
        self.interval = Interval(self.engine, self.training)
        if self.reporter is not None and found is not None:
            self.reporter.step(found)

    def asked_to_stop(self) -> bool:
        """Whether a signal came to any rank. Collective. Raises Refusal if a checkpoint cannot be written."""
        import torch

        failed = self.checkpoints is not None and self.checkpoints.failed
        mine = CANNOT_SAVE if failed else SIGNALLED if self.signals.caught else 0
        found = int(self.comm.all_reduce(torch.tensor([mine]), "max"))
        if found == CANNOT_SAVE:
            self.checkpoints.wait()
        return found == SIGNALLED

    def pause(self) -> None:
        """Save, and say how to go on."""
        from mpi4dl.runtime import resuming

        self.save()
        self.checkpoints.wait()
        command = resuming.command_to_go_on(self.comm.size, self.argv, self.folder.path)
        signal = self.signals.caught or "a signal"
        self.say(f"stopped by {signal} at step {self.engine.num_steps} of {self.num_steps}; go on with: {command}")

    def validate(self, epoch: int) -> bool:
        """Measure the model on the validation images. If a signal comes, it is as if this had not begun: False."""
        from mpi4dl.runtime.checkpoint.randomness import random_state, set_random_state
        from mpi4dl.runtime.report import ValidationReport

        executor, stopped = self.engine.executor, False
        before = random_state(), executor.num_runs

        def until_stopped() -> Iterator[tuple[Any, ...]]:
            nonlocal stopped
            for _, batch, microbatches in self.batches(self.validation, 0, training=False):
                stopped = self.asked_to_stop()
                if stopped:
                    return
                yield batch.tiles, batch.labels, microbatches

        found = self.engine.evaluate(until_stopped(), self.size)
        if stopped:
            set_random_state(before[0])
            executor.num_runs = before[1]
            return False
        self.evaluation = found
        if self.reporter is not None:
            self.reporter.validation(ValidationReport(self.engine.num_steps, epoch, found.loss, found.accuracy or 0.0))
        return True

    def show_samples(self, tiles: Sequence["Tensor"], first: Any) -> None:
        """A few images of the first microbatch, for TensorBoard."""
        from mpi4dl.runtime.samples import samples

        found = samples(self.engine, tiles, first, self.size)
        if found is not None and self.reporter is not None and self.channels in (1, 3):
            data = self.config.data
            self.reporter.images("samples", found * data.std + data.mean, self.engine.num_steps)


if __name__ == "__main__":
    main()
