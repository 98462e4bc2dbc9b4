"""Published plans beside estimates: fitted or relative to the first row; curves with what fits and what lacks."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import published, scaling
from benchmarks.published import LASSEN, Configuration, Configurations
from mpi4dl import models
from mpi4dl.estimate.machine_file import load_machine
from mpi4dl.estimate.scaling import ALL, Point

STAGES = {"stages": 2, "tiles": [(1, 1)]}


def told(cells: tuple[Configuration, ...], **how: Any) -> Configurations:
    build = partial(models.build, "small_resnet", 10)
    return Configurations("a table", build, load_machine(LASSEN), cells, "times", **how)


def test_rows_are_relative_to_the_first() -> None:
    layer = Configuration("layer", 1.0, {**STAGES, "microbatches": 1}, 4)
    pipeline = Configuration("pipeline", 1.5, {**STAGES, "microbatches": 4, "schedule": "gpipe"}, 64)
    replicas = Configuration("replicas", 1.0, {**STAGES, "microbatches": 1, "data": 2, "local_batches": True}, 8)
    cells = (layer, pipeline, replicas)
    speeds = told(cells).forecaster()
    assert speeds.of(layer)[0] == 1.0
    pipelined, idle = speeds.of(pipeline)
    assert pipelined > 1.0
    assert idle < speeds.of(layer)[1]
    efficiencies = told(cells, each_rank=True).forecaster()
    assert efficiencies.of(layer)[0] == 1.0
    assert 0.5 < efficiencies.of(replicas)[0] <= 1.0


def test_a_forward_pass_goes_from_stage_to_stage() -> None:
    cell = Configuration("two stages", 10.0, STAGES, 1)
    speeds = told((cell,), relative=False, trains=False).forecaster()
    before = speeds.of(cell)[0]
    speeds.factor = 2.0
    assert before / 2 <= speeds.of(cell)[0] < before  # messages take as long as before


@pytest.mark.parametrize("name", [*published.TABLES])
def test_every_table_begins_with_a_number(name: str) -> None:
    table = published.TABLES[name]()
    assert table.cells[0].published
    assert len({cell.name for cell in table.cells}) == len(table.cells)


class Estimate(SimpleNamespace):
    def __str__(self) -> str:
        return "a plan"


def test_curves_say_what_fits_what_pays_and_what_lacks() -> None:
    parts = SimpleNamespace(_asdict=lambda: {"arithmetic": 0.5})

    def best(speed: float) -> Any:
        return Estimate(samples_per_second=speed, num_bytes=1 << 30, time=SimpleNamespace(seconds=1.0, parts=parts))

    small: Any = Estimate(num_bytes=3 << 30)
    points = [Point(ALL, 1, None, small), Point(ALL, 2, best(1.0)), Point(ALL, 4, best(1.9)), Point(ALL, 8, best(2.0))]
    case = scaling.Case("resnet50", "lassen", "weak", 4096)
    none, *fits = scaling.rows_of(case, points, 2 << 30)
    assert (none["speed"], none["lacks_gibibytes"]) == (None, 1.0)
    assert [(row["ranks"], row["last_that_pays"]) for row in fits] == [(2, False), (4, True), (8, False)]
    assert fits[0]["spent"] == {"arithmetic": 0.5}
    found = scaling.summary_of(case, points)
    assert (found["fits_from"], found["pays_to"], found["ranks"], found["plan"]) == (2, 4, 8, "a plan")
    assert found["efficiency"] == pytest.approx(50.0)
    nothing = scaling.summary_of(case, points[:1])
    assert (nothing["kinds"], nothing["gibibytes"]) == ({}, 3.0)
