"""Scenarios that train with torch.distributed's pipeline schedules over one backend, as PyTorch's own tests of them do.

Each is checked against the plain chain of all stages: losses, outputs, and the weights after steps.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from tests.comm.backend_collectives import numbers

WIDTH, NARROW = 6, 3
STEPS = 2
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
ONE_STAGE = (ScheduleGPipe, Schedule1F1B)
IN_TURN = (ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
THERE_AND_BACK = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


class Link(nn.Module):
    """A stage that gives two tensors to the next one; `scale` is an argument that all stages get by name."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NARROW)
        self.is_last = is_last

    def forward(self, x: Tensor, carried: Tensor | None = None, *, scale: Tensor) -> Any:
        y, beside = self.main(x).tanh() * scale, self.side(x)
        beside = beside if carried is None else beside + carried.sin()
        return y + beside.repeat(1, WIDTH // NARROW) if self.is_last else (y, beside)


class Pipeline:
    """A chain of links over the ranks, and the same chain on this rank alone."""

    def __init__(self, rank: int, size: int, schedule: Any, num_microbatches: int) -> None:
        per_rank = 1 if schedule in ONE_STAGE else 2
        num_stages = size * per_rank
        self.is_first = rank == 0
        self.mine = [rank, 2 * size - 1 - rank] if schedule in THERE_AND_BACK else list(range(rank, num_stages, size))
        self.has_loss = num_stages - 1 in self.mine
        torch.manual_seed(3)
        self.links = [Link(i == num_stages - 1) for i in range(num_stages)]
        self.plain = copy.deepcopy(self.links)
        stages = [PipelineStage(self.links[i], i, num_stages, torch.device("cpu")) for i in self.mine]
        self.loss = nn.MSELoss()
        self.schedule = schedule(stages if per_rank > 1 else stages[0], num_microbatches, loss_fn=self.loss)
        self.rows = 2 * num_microbatches

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (numbers(seed, WIDTH * self.rows).view(-1, WIDTH) for seed in (step, step + 100))
        return x, y, numbers(step + 200, self.rows).view(-1, 1)

    def run(self, step: int, train: bool) -> list[Tensor]:
        """The output of the last stage and the losses of its microbatches, where it is; checked."""
        x, y, scale = self.batch(step)
        losses: list[Tensor] = []
        call = self.schedule.step if train else self.schedule.eval
        wanted = {"target": y, "losses": losses} if self.has_loss else {}
        out = call(*([x] if self.is_first else []), scale=scale, **wanted)
        expected: Any = (x,)
        for link in self.plain:
            expected = link(*(expected if isinstance(expected, tuple) else (expected,)), scale=scale)
        if train:
            self.loss(expected, y).backward()
        if not self.has_loss:
            return []
        torch.testing.assert_close(out, expected, **CLOSE)
        torch.testing.assert_close(torch.stack(losses).mean(), self.loss(expected, y), **CLOSE)
        return [out.detach(), *(each.detach() for each in losses)]

    def update(self) -> None:
        for links in ([self.links[i] for i in self.mine], self.plain):
            optimizer = torch.optim.SGD(nn.ModuleList(links).parameters(), lr=0.1, momentum=0.9)
            optimizer.step()
            optimizer.zero_grad()

    def weights(self) -> Iterator[Tensor]:
        for i in self.mine:
            for mine, alone in zip(self.links[i].parameters(), self.plain[i].parameters(), strict=True):
                torch.testing.assert_close(mine, alone, **CLOSE)
                yield mine.detach()


def trained(rank: int, size: int, schedule: Any) -> list[Tensor]:
    pipeline = Pipeline(rank, size, schedule, num_microbatches=3 * size)
    results = []
    for step in range(STEPS):
        results += pipeline.run(step, train=True)
        pipeline.update()
        if schedule not in THERE_AND_BACK:  # whose `eval` fails over every backend
            results += pipeline.run(step + STEPS, train=False)
    return results + list(pipeline.weights())


def pipelines(rank: int, size: int) -> list[Tensor]:
    schedules = (*ONE_STAGE, *IN_TURN, *THERE_AND_BACK)
    return [result for schedule in schedules for result in trained(rank, size, schedule)]
