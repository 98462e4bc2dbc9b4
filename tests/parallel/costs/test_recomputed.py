"""Blocks that are recomputed: what is kept of them, and what they take again."""

from mpi4dl import models
from mpi4dl.parallel.costs.cost_model import groups_of, recomputed
from mpi4dl.parallel.costs.meter import UnitCosts
from mpi4dl.parallel.pipeline.split import Cuttable, outline


def test_groups_are_the_units_of_blocks() -> None:
    cuttable = Cuttable(outline(lambda: models.build("small_resnet", 10)))
    groups = groups_of(cuttable)
    assert [cuttable.names[first] for first, _ in groups] == [
        *("stem.0", "stage1_block1", "stage1_block2", "stage2_block1", "stage2_block2", "stage3_block1"),
        *("stage3_block2", "head"),
    ]
    assert groups[0] == (0, 4)


def test_of_a_group_its_inputs_are_kept_until_it_runs_again() -> None:
    column = tuple(UnitCosts(10 * i, i, 0, 1, 2) for i in range(1, 5))
    found = recomputed(column, [(0, 1), (2, 4)], 7)
    assert [unit.kept_bytes for unit in found] == [7, 20, 2, 0]
    assert [unit.backward_bytes for unit in found] == [12, 2, 2, 2 + 30 + 40]
    seconds = recomputed((UnitCosts(forward_seconds=1.0, backward_seconds=2.0),) * 3, [(1, 2)], 0)
    assert [unit.backward_seconds for unit in seconds] == [2.0, 3.0, 2.0]
