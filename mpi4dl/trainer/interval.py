"""The steps of training between two reports: their losses, and how long they waited."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from mpi4dl.engine import Engine
from mpi4dl.trainer.report import StepReport


class LogInterval:
    """The steps since the last report; `losses` are those of a run that goes on in the middle of an interval.

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
