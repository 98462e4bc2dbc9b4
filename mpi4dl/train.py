"""The training command: `mpirun -n 4 python -m mpi4dl.train --tiles 2x2 --images data/slides`.

It reads top to bottom: `main` starts MPI, `train` builds what the configuration names, `Run` goes through the epochs.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4dl.runtime.config import Config, ConfigError, parse, shared_options, to_toml

if TYPE_CHECKING:
    from torch import Tensor

    from mpi4dl.comm import Communicator
    from mpi4dl.datasets import Batch
    from mpi4dl.engine import Evaluation
    from mpi4dl.geometry import Box

SAMPLE_IMAGES = 4
SAMPLE_IMAGE_PX = 256


def main(argv: Sequence[str] | None = None) -> None:
    """Train by the command line `argv`, on all ranks of the MPI job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        parse(["--help"])
    from mpi4dl.comm import guard, world

    comm = world()
    guard.run(comm, lambda: train(comm, arguments))


def configure(comm: "Communicator", argv: Sequence[str]) -> Config:
    """The configuration, which all ranks were started with; else all raise the same Refusal."""
    config = Config()
    with comm.together((ConfigError,)):
        config = parse(argv)
    comm.agree(None, **shared_options(config))
    return config


def train(comm: "Communicator", argv: Sequence[str]) -> None:
    """Build everything that the configuration names, each rank its part, and train."""
    config = configure(comm, argv)
    if config.run.print_config:
        if comm.rank == 0:
            print(to_toml(config), end="")
        return

    from mpi4dl.comm import Refusal
    from mpi4dl.comm.guard import Watchdog
    from mpi4dl.datasets import DatasetError
    from mpi4dl.engine import Engine
    from mpi4dl.parallel.spatial import NoRule
    from mpi4dl.runtime import build
    from mpi4dl.runtime.folder import RunFolder, default_path
    from mpi4dl.runtime.memory import MemoryMeter, keep_freed_memory

    with comm.together((ValueError,)):
        plan = build.build_plan(config)
    comm.agree(plan.problem(comm.size, config.data.image_size, config.data.batch_size))
    comm.node.share_cores()
    keep_freed_memory()
    watchdog = Watchdog(config.parallel.hang_timeout)
    with comm.together():
        device = comm.node.device(config.parallel.device)
    if device.type == "cuda":
        comm.choose_gpu_wire(config.parallel.gpu_wire)
    meter = MemoryMeter(device)
    with comm.together((DatasetError, OSError)):
        images = build.build_datasets(config)
    with comm.together((ValueError, TypeError)):
        num_classes = build.number_of_classes(config, images[0].classes)
        model = build.hold_model(config, plan, num_classes, images[0].channels, comm, device)
    with comm.together((ValueError, TypeError)):
        optimizer = build.build_optimizer(config, model)
        schedule = build.build_schedule(config, optimizer)
    engine = Engine(
        model,
        plan,
        optimizer,
        build.classification_loss,
        comm=comm,
        precision=config.training.precision,
        recompute=config.training.recompute,
        clip_norm=config.optimizer.clip_norm,
    )
    with comm.together((ValueError,)):
        run = Run(config, engine, schedule, images, num_classes, watchdog, meter)
    if config.run.dry_run:
        run.explain()
        return
    with ExitStack() as closing:
        folder = None
        with comm.together((ConfigError,)):
            if comm.rank == 0:
                folder = RunFolder.create(config.run.run_folder or default_path(config.model.model, datetime.now()))
                folder.write_config(to_toml(config))
                folder.write_versions(comm.mpi_library, ["python", "-m", "mpi4dl.train", *argv])
        folder = RunFolder(comm.broadcast_object(folder.path if folder else None))
        closing.enter_context(folder.rank_log(comm.rank))
        run.open(folder, closing)
        try:
            run.all_epochs()
        except Refusal:
            raise
        except (NoRule, ValueError) as problem:  # of an operator, on all ranks alike: shapes are those of the whole
            raise Refusal(f"--model {config.model.model}: {problem}") from problem
    watchdog.stop()


class Run:
    """A run of the training command: loaders, epochs, validation and reports around one engine."""

    def __init__(
        self, config: Config, engine: Any, schedule: Any, images: Any, num_classes: int, watchdog: Any, meter: Any
    ) -> None:
        from mpi4dl.datasets import Loader
        from mpi4dl.runtime.bad_images import BadImages
        from mpi4dl.runtime.build import build_views

        self.config, self.engine, self.schedule = config, engine, schedule
        self.num_classes, self.watchdog, self.meter = num_classes, watchdog, meter
        self.comm, self.size, self.channels = engine.comm, config.data.image_size, images[0].channels
        self.bad_images = BadImages(engine.comm, config.data.on_bad_image)
        views = build_views(config, self.channels)
        common: dict[str, Any] = {"seed": config.training.seed, "num_workers": config.data.num_workers}
        batch_size = config.data.batch_size
        self.training = Loader(images[0], views[0], batch_size, self.boxes, shuffle=True, drop_last=True, **common)
        self.validation = Loader(images[1], views[1], batch_size, partial(self.boxes, training=False), **common)
        limit = config.training.max_steps
        steps = config.training.epochs * len(self.training)
        self.num_steps = steps if limit is None else min(steps, limit)
        if schedule.num_steps is not None and schedule.num_steps < self.num_steps:
            raise ValueError(f"--scheduler is for {schedule.num_steps} steps, but there will be {self.num_steps}")
        self.reporter: Any = None
        self.folder: Any = None
        self.evaluation: Evaluation | None = None

    def boxes(self, num_samples: int, training: bool = True) -> list["Box"]:
        """Which boxes this rank reads of a batch."""
        return [read.box for read in self.engine.reads(num_samples, self.size, training)]

    def open(self, folder: Any, closing: ExitStack) -> None:
        """Report to this folder, from rank 0."""
        from mpi4dl.runtime.report import Reporter

        self.folder = folder
        if self.comm.rank == 0:
            tensorboard = self.config.run.tensorboard
            self.reporter = closing.enter_context(Reporter(folder, self.num_steps, tensorboard=tensorboard))
        self.say(self.title())

    def say(self, line: str) -> None:
        if self.reporter is not None:
            self.reporter.say(line)

    def title(self) -> str:
        height, width = self.size
        engine, batch_size = self.engine, self.config.data.batch_size
        return (
            f"{self.config.model.model}, {engine.held.num_parameters:,} parameters, on {self.comm.size} ranks: "
            f"{engine.plan.describe()}, images of {height} x {width} px, batches of {batch_size}, {engine.device.type}"
        )

    def explain(self) -> None:
        """Say what training would take: parameters, activations, messages, the timeline. Nothing is trained."""
        if self.comm.rank == 0:
            print(self.title())
            print("\n".join(self.by_operator() if self.engine.plan.num_stages == 1 else self.by_stage()))
            print(f"dry run: {self.num_steps} steps were not made")
        self.comm.barrier()

    def by_operator(self) -> Iterator[str]:
        """What each operator of a model in one stage sends, and the memory of a rank."""
        from mpi4dl.parallel import spatial
        from mpi4dl.runtime.build import state_bytes

        model, batch_size = self.engine.held.modules_of[0], self.config.data.batch_size
        found = spatial.explain(
            model.train(), (batch_size, self.channels, *self.size), self.engine.held.parts[0, 0].grid
        )
        weights, states = sum(p.nbytes for p in model.parameters()), state_bytes(self.engine.optimizer)
        yield str(found)
        yield (
            f"memory of a rank: parameters {weights / 2**20:.1f} MiB, gradients {weights / 2**20:.1f} MiB, "
            f"optimizer {states / 2**20:.1f} MiB, activations at most {found.saved_bytes / 2**20:.1f} MiB"
        )

    def by_stage(self) -> Iterator[str]:
        """Who holds which stage and reads which images, and the timeline."""
        from mpi4dl.runtime.build import build_model
        from mpi4dl.runtime.overview import overview

        held = self.engine.held
        found = overview(
            self.config.model.model,
            lambda: build_model(self.config, self.num_classes),
            held.plan,
            (self.config.data.batch_size, self.channels, *self.size),
            balance=held.counts,
        )
        yield from (*found.stages(), *found.images(), *found.ranks())

    def all_epochs(self) -> None:
        """Train, validate, keep the weights."""
        began = time.perf_counter()
        every = self.config.training.eval_every
        epoch = 0
        while self.engine.num_steps < self.num_steps and epoch < self.config.training.epochs:
            self.one_epoch(epoch)
            epoch += 1
            last = self.engine.num_steps >= self.num_steps or epoch == self.config.training.epochs
            validated = every is not None and (epoch % every == 0 or last)
            if validated:
                self.validate(epoch)
            self.schedule.after_epoch(self.evaluation.loss if validated and self.evaluation else None)
        self.save()
        seconds = time.perf_counter() - began
        accuracy = self.evaluation.accuracy if self.evaluation else None
        result = "" if accuracy is None else f"validation accuracy {100 * accuracy:.1f} %, "
        skipped = f", {self.bad_images.skipped} unreadable images skipped" if self.bad_images.skipped else ""
        self.say(f"done: {result}{self.engine.num_steps} steps in {seconds:.0f} s{skipped}; see {self.folder.path}")

    def batches(self, loader: Any, epoch: int, training: bool = True) -> Iterator[tuple["Batch", Any]]:
        """The batches that all ranks can read, and how they are divided; the watchdog is fed between them."""
        for batch in loader.epoch(epoch):
            self.watchdog.feed()
            microbatches = self.engine.plan.divide(len(batch.indices), training)
            held = [box.batch for box in self.boxes(len(batch.indices), training)]
            readable = self.bad_images.agree(batch, microbatches, held)
            if readable is not None:
                yield readable

    def one_epoch(self, epoch: int) -> None:
        interval = Interval(self)
        for batch, microbatches in self.batches(self.training, epoch):
            if self.engine.num_steps == 0:
                self.show_samples(batch.tiles, microbatches[0])
            result = self.engine.step(batch.tiles, batch.labels, self.size, microbatches)
            self.schedule.after_step()
            interval.add(result.loss, len(batch.labels))
            if self.reporter is not None:
                self.reporter.advance(self.engine.num_steps)
            if self.engine.num_steps % self.config.run.log_interval == 0:
                interval.report(epoch + 1)
                interval = Interval(self)
            if self.engine.num_steps >= self.num_steps:
                break
        interval.report(epoch + 1)

    def validate(self, epoch: int) -> None:
        from mpi4dl.runtime.report import ValidationReport

        batches = ((b.tiles, b.labels, divided) for b, divided in self.batches(self.validation, 0, training=False))
        self.evaluation = self.engine.evaluate(batches, self.size)
        if self.reporter is not None:
            found = self.evaluation
            self.reporter.validation(ValidationReport(self.engine.num_steps, epoch, found.loss, found.accuracy or 0.0))

    def show_samples(self, tiles: Sequence["Tensor"], first: Any) -> None:
        """A few images of the first microbatch, small, for TensorBoard."""
        from torch.nn import functional as F

        from mpi4dl.parallel import spatial

        part = self.engine.held.parts.get((0, 0))
        if part is None:
            return
        height, width = (min(pixels, SAMPLE_IMAGE_PX) for pixels in self.size)
        small = F.adaptive_avg_pool2d(self.engine.images(part, tiles[0], first, self.size), (height, width))
        small = spatial.gather(small) if isinstance(small, spatial.SpatialTensor) else small
        if self.reporter is not None and small.shape[1] in (1, 3):
            data = self.config.data
            self.reporter.images("samples", small[:SAMPLE_IMAGES] * data.std + data.mean, self.engine.num_steps)

    def save(self) -> None:
        """Keep the weights as one process would have: under the model's own names."""
        from safetensors.torch import save_file

        held = self.engine.held
        state = held.gather_state()
        if state is not None:
            values = {name: value.contiguous() for name, value in state.items() if name not in held.ties}
            save_file(values, str(self.folder.path / "model.safetensors"), metadata=held.ties)


class Interval:
    """The steps since the last report, and what they waited for."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.began = time.perf_counter()
        self.data_wait = run.training.wait_seconds
        self.comm_wait = run.comm.node.wait_seconds
        self.losses: list[float] = []
        self.num_images = 0

    def add(self, loss: float, num_images: int) -> None:
        self.losses.append(loss)
        self.num_images += num_images

    def report(self, epoch: int) -> None:
        """Collective: waits are means over ranks, memory is that of the rank that used most."""
        import torch

        from mpi4dl.runtime.report import StepReport

        if not self.losses:
            return
        run, seconds = self.run, time.perf_counter() - self.began
        waits = [run.training.wait_seconds - self.data_wait, run.comm.node.wait_seconds - self.comm_wait]
        data_wait, comm_wait = run.comm.all_reduce(torch.tensor(waits, dtype=torch.float64)).tolist()
        memory = int(run.comm.all_reduce(torch.tensor([run.meter.peak_bytes()]), "max"))
        if run.reporter is not None:
            total = seconds * run.comm.size
            loss = sum(self.losses) / len(self.losses)
            rate = self.num_images / seconds
            step = run.engine.num_steps
            run.reporter.step(StepReport(step, epoch, loss, rate, data_wait / total, comm_wait / total, memory))


if __name__ == "__main__":
    main()
