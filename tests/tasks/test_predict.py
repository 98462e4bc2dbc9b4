"""Runner.predict: outputs of any plan reach rank 0, or stay where they are, each once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, Runner
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import tiles_of
from tests.tasks.cases import SIZE, Dense, Small, images_of

TILES = Plan(((2, 2),))
STAGES = Plan(((1, 1), (1, 2)), microbatches=2)
GEMS = Plan(((1, 1), (1, 1)), bidirectional=1)
COUNT = 7


def outputs(comm: Communicator, plan: Plan, dense: bool, stream: Any, path: Path | None) -> list[Any]:
    """Of each batch its numbers, what rank 0 has, and bands; dense outputs are written to a file that all have open."""

    def build() -> Any:
        return (Dense() if dense else Small()).double()

    held = split(build, plan, comm, seed=0, image=(4, 3, *SIZE), stream=stream)
    runner = Runner(held, plan, comm=comm)
    images, found = images_of(COUNT), []
    batches = [(tiles_of(part, runner, training=False), len(part)) for part in images.split(4)]
    array = None if path is None else np.load(path, mmap_mode="r+")
    for batch in runner.predict(batches, SIZE):
        assert held.training
        if array is not None:
            batch.write(array)
        bands = list(batch.bands(4)) if dense else []
        found.append((tuple(batch.numbers), batch.whole, bands))
    if array is not None:
        array.flush()
    return found


def whole(dense: bool) -> Tensor:
    torch.manual_seed(0)
    model = (Dense() if dense else Small()).double()
    with torch.no_grad():
        return model(images_of(COUNT))


def check(ranks: Ranks, plan: Plan, dense: bool, folder: Path, stream: Any = None) -> None:
    expected, path = whole(dense), folder / "outputs.npy"
    np.save(path, np.full(expected.shape, np.nan))
    first, *others = ranks(plan.num_ranks).run(outputs, plan, dense, stream, path if dense else None)
    assert [numbers for numbers, _, _ in first] == [(0, 4), (4, 7)]
    if not dense:
        assert torch.allclose(torch.cat([logits for _, logits, _ in first]), expected, rtol=1e-10, atol=1e-12)
        assert all(logits is None for other in others for _, logits, _ in other)
        return
    assert np.allclose(np.load(path), expected.numpy(), rtol=1e-10, atol=1e-12)
    put_together = torch.full_like(expected, torch.nan)
    for _, logits, bands in first:
        assert logits is None or plan.num_ranks == 1
        for where, values in bands:
            assert values.shape[-2] <= 4
            put_together[where] = values
    assert torch.allclose(put_together, expected, rtol=1e-10, atol=1e-12)
    assert not any(bands for other in others for _, _, bands in other)


@pytest.mark.parametrize(("plan", "dense"), [(STAGES, False), (TILES, True)], ids=str)
def test_outputs_reach_rank_0_or_are_written_where_they_are(
    ranks: Ranks, plan: Plan, dense: bool, tmp_path: Path
) -> None:
    check(ranks, plan, dense, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("plan", [TILES, STAGES, GEMS, Plan(((1, 2),), data=2), Plan(((2, 2), (1, 1)))], ids=str)
def test_outputs_of_every_plan(ranks: Ranks, plan: Plan, dense: bool, tmp_path: Path) -> None:
    check(ranks, plan, dense, tmp_path)


@pytest.mark.exhaustive
def test_outputs_of_images_that_are_streamed(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, Plan(((1, 2),)), False, tmp_path, StreamOptions((2, 2)))


def auxiliary(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["aux"]


@on_ranks(1)
def test_on_one_rank_images_are_all_that_it_takes(comm: Communicator) -> None:
    torch.manual_seed(0)
    model = Dense(auxiliary=True).double()
    runner = Runner(model, Plan(), comm=comm)
    with pytest.raises(ValueError, match="no loss"):
        runner.evaluate([(images_of(2), torch.zeros(2))])
    (main,), (other,) = (
        [batch.whole for batch in runner.predict([images_of(2)], **options)] for options in ({}, {"of": auxiliary})
    )
    with torch.no_grad():
        expected = model(images_of(2))
    engine = Engine(model, Plan(), torch.optim.SGD(model.parameters(), lr=0.1), lambda x, y: x, comm=comm)
    assert isinstance(engine, Runner)
    (trained,) = engine.predict([images_of(2)])
    assert torch.equal(main, trained.whole)
    assert torch.equal(main, expected["out"])
    assert torch.equal(other, expected["aux"])
