"""Operators without a rule in training: gathered where that is asked for, over tiles, stages and recomputation."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from mpi4dl.parallel.plan import Plan
from mpi4dl.train import train as train_command
from tests.pool.ranks import Ranks
from tests.support.commands import TINY
from tests.support.short_runs import Task, check

SPECTRAL = Task("spectral", (16, 12), batch=8)
SQUARE, ONE = (2, 2), (1, 1)


@contextmanager
def gathering() -> Iterator[None]:
    with spatial.gathering(), warnings.catch_warnings():
        warnings.simplefilter("ignore", spatial.GatheredWarning)
        yield


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (SPECTRAL, Plan((SQUARE,))),
        (SPECTRAL.with_engine(recompute=True), Plan(((1, 2),), data=2, zero=2)),
        (SPECTRAL, Plan((SQUARE, (1, 2)), microbatches=2)),
        (SPECTRAL, Plan(((2, 1), ONE), schedule="zero-bubble", microbatches=4)),
    ],
    ids=["tiles", "recompute, ZeRO", "stages on tiles", "zero-bubble"],
)
@pytest.mark.sample(2)
def test_what_is_gathered_trains_as_a_plain_loop_does(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, replace(task, within=gathering), plan)


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(self.layer(x)).real.mean((2, 3))


def command(comm: Communicator, folder: str, *flags: str) -> list[str]:
    """What the training command warns of on this rank."""
    arguments = [*TINY, "--model", "small_resnet", "--tiles", "2x1", "--num-samples", "8", "--run-folder", folder]
    arguments += ["--no-rule", "gather", *flags]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", spatial.GatheredWarning)
        patch.setattr("mpi4dl.models.build", lambda *_, **__: Fourier())
        train_command(comm, arguments)
    return [str(warning.message) for warning in caught if issubclass(warning.category, spatial.GatheredWarning)]


@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["training", "a dry run"])
def test_the_command_gathers_if_it_is_told_to(ranks: Ranks, tmp_path: Path, flags: tuple[str, ...]) -> None:
    first, second = ranks(2).run(command, str(tmp_path / "run"), *flags)
    assert [bool(re.search(r"fft_fft2 in module Fourier .* bytes were gathered", line)) for line in first[:1]] == [True]
    assert second == []
