"""Plans for another machine: its file, layers timed elsewhere, costs of large sites from small ones, curves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mpi4dl import models
from mpi4dl.estimate.machine_file import load_machine, machine_toml
from mpi4dl.estimate.scaling import PAYS, Point, numbers_of_ranks, stops_paying
from mpi4dl.estimate.step_time import StepTime
from mpi4dl.geometry import GridShape
from mpi4dl.options.declare import ConfigError
from mpi4dl.parallel.costs.cost_model import StageSeconds
from mpi4dl.parallel.costs.machine import LinkLevel, Machine
from mpi4dl.parallel.costs.scaled import ScaledProfiler, TimingsFile, base_sites
from mpi4dl.parallel.costs.stage_traffic import NO_WAITS, WaitSeconds
from mpi4dl.parallel.costs.timing import Column, Site, UnitSeconds
from mpi4dl.parallel.costs.units import UnitCounts, count_units
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tables.simulator import simulate
from mpi4dl.plan import show

CPU = torch.device("cpu")
LINKS = (LinkLevel("node", 1e-6, 1e10, ranks=4), LinkLevel("network", 1e-5, 1e9, shared_by=4))
MACHINE = Machine("a cluster", 16, 4, LINKS, 8 << 30, "GPU", 1e13, 1e11, collectives={"two-level": 1.25})


def test_a_file_describes_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(machine_toml(MACHINE))
    found = load_machine(str(path))
    assert found == Machine(
        **{**vars(MACHINE), "collectives": {"library": 1.0, "direct": 1.0, "ring": 1.0, "two-level": 1.25}}
    )
    assert found.num_ranks == 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[machine]\nnodes = 0", "nodes"),
        ("[machine]\nnode = 2\n[[links]]\nname='a'", "nodes"),
        ("[machine]\nnodes = 2\n[links]\nname='a'", r"\[\[links\]\]"),
        ("[machine]\nnodes = 2\n[[links]]\nlatency_seconds = 'fast'", "latency_seconds"),
        ("[machine]\nmemory = 'much'\n[[links]]\n", "memory"),
        ("[collectives]\nfastest = 1\n[[links]]\n", "fastest"),
        ("[machine]\nnodes = 2\n[[links]]\nranks = 3\n", "groups"),
        ("[machine", "TOML"),
    ],
)
def test_a_file_that_describes_none_is_refused_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        load_machine(str(path))
    assert str(path) in str(refused.value)


def resnet() -> torch.nn.Module:
    return models.build("small_resnet", 10)


@pytest.mark.parametrize("shape", [GridShape(1, 8, 4), GridShape(4, 5, 1), GridShape(1, 1, 1)])
def test_counts_of_large_sites_follow_from_small_ones(tmp_path: Path, shape: GridShape) -> None:
    """Of a rank in the middle: bytes within 3 %, as many rounds, and what they send."""
    cuttable = Cuttable(outline(resnet))
    site = Site((2 * shape.batch, 3, 256 * shape[1], 512 * shape[2]), shape, shape.batch > 1, plain=shape.size == 1)
    profiler = ScaledProfiler(TimingsFile(tmp_path / "none"))
    found, exact = profiler.counts(cuttable, site), count_units(cuttable, site)
    assert sum(unit.touched for unit in found) == pytest.approx(sum(unit.touched for unit in exact), rel=0.3)
    for unit, right in zip(found, exact, strict=True):
        for name, least in {"kept": 1 << 14, "handed": 0, "flops": 1 << 12}.items():
            assert getattr(unit, name) == pytest.approx(getattr(right, name), rel=0.03, abs=least), name
        for way, of_right in ((unit.there, right.there), (unit.back, right.back)):
            assert {each.alike: each.times for each in way} == {each.alike: each.times for each in of_right}
            sizes = {each.alike: dict(each.parts) for each in of_right}
            for each in way:
                for offset, size in each.parts:
                    assert size == pytest.approx(sizes[each.alike][offset], rel=0.05, abs=4096)


def a_pixel(cuttable: Any, site: Site, *_: Any) -> Column:
    return tuple(UnitSeconds(0.5 + 1e-6 * site.pixels, 1.0) for _ in range(len(cuttable)))


def test_seconds_of_large_sites_follow_from_small_ones(tmp_path: Path) -> None:
    cuttable = Cuttable(outline(resnet))
    site = Site((4, 3, 4096, 4096), GridShape(2, 4, 4), True, plain=False)
    (unit, *_) = ScaledProfiler(TimingsFile(tmp_path / "none"), a_pixel).column(cuttable, site, CPU)
    assert unit.forward == pytest.approx(0.5 + 1e-6 * 2 * 1024 * 1024)
    assert unit.backward == 1.0
    assert {each.shape for each in base_sites(site)} == {GridShape(2, 3, 3)}
    by_rates = ScaledProfiler(TimingsFile(tmp_path / "none"), rates=MACHINE)
    counts: UnitCounts = by_rates.counts(cuttable, site)[0]
    (unit, *_) = by_rates.column(cuttable, site, CPU)
    assert unit.forward == pytest.approx(counts.flops / 1e13 + counts.touched / 1e11)


def test_timings_of_elsewhere_are_a_file(tmp_path: Path) -> None:
    cuttable, path = Cuttable(outline(resnet)), tmp_path / "timings.json"
    site = Site((4, 3, 4096, 4096), GridShape(2, 4, 4), True, plain=False)
    file = TimingsFile(path, measured_on="elsewhere")
    timed = ScaledProfiler(file, a_pixel).column(cuttable, site, CPU)
    file.save()

    def fail(*_: Any) -> Column:
        raise AssertionError("timed here")

    known = TimingsFile.load(path)
    assert known.measured_on == "elsewhere"
    there = ScaledProfiler(known, fail, given=known)
    assert there.column(cuttable, site, CPU) == timed
    with pytest.raises(ValueError, match="no timings of this model on 3x1 tiles"):
        there.column(cuttable, site._replace(shape=GridShape(2, 4, 1)), CPU)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no file of timings"):
        TimingsFile.load(path)


@pytest.mark.parametrize(
    "plan",
    [
        Plan.of(stages=4, tiles=[(2, 2), (2, 2), (1, 2), (1, 1)], microbatches=4, data=2),
        Plan.of(stages=4, tiles=[(1, 2)], microbatches=2, bidirectional=2),
        Plan.of(stages=4, chunks=2, schedule="interleaved", tiles=[(2, 2)], microbatches=4),
        Plan.of(stages=3, schedule="zero-bubble", microbatches=6),
    ],
)
def test_ranks_that_do_the_same_are_simulated_once(plan: Plan) -> None:
    stages = tuple(StageSeconds(1.0 + s, 2.0, WaitSeconds(halos=0.5), NO_WAITS) for s in range(plan.num_stages))
    step = StepTime(plan, MACHINE, stages, (0.25,) * (plan.num_stages - 1), (1,) * plan.num_stages, ())
    whole = simulate(plan.table(), plan.placement, step.costs)
    assert step.simulation.makespan_seconds == pytest.approx(whole.makespan_seconds)
    for ranks, row in zip(plan.placement.alike, step.simulation.rows, strict=True):
        assert all([span.action for span in whole.rows[rank]] == [span.action for span in row] for rank in ranks)
    assert len(step.simulation.rows) < plan.ranks_per_replica or set(map(len, plan.placement.alike)) == {1}
    assert step.seconds == pytest.approx(whole.makespan_seconds)
    assert sum(step.parts) == pytest.approx(step.seconds)
    assert step.parts.halos > 0


def test_a_kind_pays_as_long_as_twice_the_ranks_are_worth_it() -> None:
    class Best:
        def __init__(self, speed: float) -> None:
            self.samples_per_second = speed

    def points(*speeds: float) -> list[Point]:
        return [Point("tiles", 2**i, Best(speed)) for i, speed in enumerate(speeds)]  # type: ignore[arg-type]

    assert stops_paying(points(1.0, 2.0, 4.0)) is None
    assert stops_paying(points(1.0, 2.0, 2.0 * PAYS - 0.1, 4.0)) == 2
    assert numbers_of_ranks(12) == [1, 2, 4, 8, 12]


def test_the_command_plans_for_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(machine_toml(MACHINE))
    training = ["--model", "small_resnet", "--image-size", "1024", "--batch-size", "8"]
    on = ["--machine", str(path)]
    show([*training, *on, "--ranks", "64", "--search"])
    told = capsys.readouterr().out
    assert "a cluster: 16 nodes of 4 ranks, GPU; node 1 us, 10 GB/s; network 10 us, 1 GB/s for 4 ranks" in told
    assert "node-hours for 1,000 steps: " in told
    assert "mpirun -n 64 " in told
    picture = tmp_path / "curves.png"
    show([*training, *on, "--ranks", "8", "--scaling", "strong", "--curves", str(picture)])
    told = capsys.readouterr().out
    assert picture.stat().st_size > 1000
    assert "all together: fit from 1 rank on" in told
    with pytest.raises(ConfigError, match="more than the machine has: 64"):
        show([*training, *on, "--ranks", "128", "--search"])
