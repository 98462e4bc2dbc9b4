"""Says how a run goes, from rank 0: to the reader, to TensorBoard, and to metrics.jsonl, with the same numbers."""

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mpi4dl._wording import counted
from mpi4dl.trainer.folder import LOGGER_NAME, MetricsFile, RunFolder

if TYPE_CHECKING:
    from torch import Tensor

MEBIBYTE = 2**20
FLUSH_SECONDS = 10
QUIET_SECONDS = 60  # after which a step that is under way is heard of


@dataclass(frozen=True)
class StepReport:
    """The training steps since the last report: plain numbers, of all ranks together.

    `data_wait` and `comm_wait` are the shares of the interval's time, 0 to 1, that were spent waiting for images and
    for other ranks; `peak_memory_bytes` is that of the rank that used most. Of text speed is in tokens. Under fp16,
    `skipped_steps` of these steps were not made, because their gradients overflowed; `loss_scale` is the present one.
    Of experts the last three are told, as `routing.ExpertUse` has them.
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

    def line(self) -> str:
        rate, what = self.images_per_second, "images/s"
        if rate is None:
            rate, what = self.tokens_per_second or 0.0, "tokens/s"
        more = [] if self.loss_scale is None else [f"skipped {self.skipped_steps}", f"scale {self.loss_scale:g}"]
        if self.expert_imbalance is not None:
            dropped = 100 * (self.dropped_tokens or 0.0)
            more += [f"fullest expert {self.expert_imbalance:.2f}", f"dropped {dropped:.1f} %"]
        return "  ".join(
            (
                f"step {self.step}",
                f"epoch {self.epoch}",
                f"loss {self.loss:#.4g}",
                f"{_rate(rate)} {what}",
                f"data wait {100 * self.data_wait:.1f} %",
                f"comm wait {100 * self.comm_wait:.1f} %",
                f"peak memory {self.peak_memory_bytes / MEBIBYTE:.0f} MiB",
                *more,
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
        accuracy = () if self.accuracy is None else (f"accuracy {100 * self.accuracy:.1f} %",)
        bits = () if self.bits_per_byte is None else (f"{self.bits_per_byte:.3f} bits per byte",)
        more = [
            f"{name.replace('_', ' ')} {value:.4g}"
            for name, value in self.metrics.items()
            if isinstance(value, float) and name != "accuracy"
        ]
        said = (
            f"step {self.step}",
            f"epoch {self.epoch}",
            f"validation loss {self.loss:#.4g}",
            *accuracy,
            *bits,
            *more,
        )
        return "  ".join((*said, "best so far") if self.best else said)


def summary(evaluation: Any, num_steps: int, seconds: float, num_unreadable: int) -> str:
    """What came of a run, in one line; `evaluation` is the last one, if there was any."""
    accuracy = evaluation.accuracy if evaluation else None
    result = "" if accuracy is None else f"validation accuracy {100 * accuracy:.1f} %, "
    skipped = f", {counted(num_unreadable, 'unreadable image')} skipped" if num_unreadable else ""
    return f"{result}{counted(num_steps, 'step')} in {seconds:.0f} s{skipped}"


def _rate(per_second: float) -> str:
    """One decimal, but three digits of a rate that is below 1: huge images take long."""
    return f"{per_second:.3g}" if per_second < 1 else f"{per_second:.1f}"


class Reporter:
    """Where the reports of a run go; make one on rank 0 only, and close it, best by `with`.

    Every report is one line on standard output and in rank 0's log. If standard error is a terminal, a progress bar
    stands below the lines. Reports of steps after `first_step` that TensorBoard's files hold already are hidden.
    """

    def __init__(self, folder: RunFolder, total_steps: int, *, first_step: int = 0, tensorboard: bool = True) -> None:
        self._metrics = MetricsFile(folder)
        self._writer: Any = _summary_writer(folder, first_step) if tensorboard else None
        self._bar: Any = None
        self._said = time.monotonic()
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=first_step, unit="step", file=sys.stderr, dynamic_ncols=True)

    def advance(self, step: int) -> None:
        """Move the progress bar, if there is one, to `step` finished steps; call it after every step."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def working(self, doing: str) -> None:
        """Say what a step is doing: beside the progress bar, or in a line now and then."""
        if self._bar is not None:
            self._bar.set_postfix_str(doing)
        elif time.monotonic() - self._said >= QUIET_SECONDS:
            self.say(doing)

    def step(self, report: StepReport) -> None:
        self._report("train", report)

    def validation(self, report: ValidationReport) -> None:
        self._report("validation", report)

    def images(self, name: str, images_N3HW: "Tensor", step: int) -> None:
        """Show a few images, with values from 0 to 1, in TensorBoard; make them small first."""
        if self._writer is not None:
            self._writer.add_images(name, images_N3HW.detach().float().cpu().clamp(0, 1), step)

    def say(self, line: str) -> None:
        """Print a line above the progress bar, and log it."""
        self._said = time.monotonic()
        logging.getLogger(LOGGER_NAME).info(line)
        if self._bar is None:
            print(line, flush=True)
        else:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._writer is not None:
            self._writer.close()
        self._metrics.close()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _report(self, phase: str, report: StepReport | ValidationReport) -> None:
        values = {name: value for name, value in asdict(report).items() if value is not None}
        values |= values.pop("metrics", {})
        if not values.get("best", True):
            del values["best"]
        self._metrics.append({"phase": phase} | values)
        if self._writer is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self._writer.add_scalar(f"{phase}/{name}", value, report.step)
        self.say(report.line())


def _summary_writer(folder: RunFolder, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.path), flush_secs=FLUSH_SECONDS, purge_step=first_step + 1 if first_step else None)
