"""Plans for another machine: its file, layers timed elsewhere, costs of large sites from small ones, curves."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from mpi4dl import models
from mpi4dl.estimate.machine_file import load_machine, machine_toml
from mpi4dl.estimate.memory import StateBytes
from mpi4dl.estimate.plan_estimate import Estimator
from mpi4dl.estimate.scaling import PAYS, Point, numbers_of_ranks, stops_paying
from mpi4dl.estimate.search import estimates
from mpi4dl.estimate.step_time import StepTime, behind_backward
from mpi4dl.geometry import GridShape
from mpi4dl.options.declare import ConfigError
from mpi4dl.parallel.costs.cost_model import MissingTimings, Overhead, Profiler, StageSeconds
from mpi4dl.parallel.costs.machine import LinkLevel, Machine
from mpi4dl.parallel.costs.sites import Site, base_choices
from mpi4dl.parallel.costs.stage_traffic import NO_WAITS, StageTraffic, WaitSeconds
from mpi4dl.parallel.costs.store import Store
from mpi4dl.parallel.costs.timing import Seconds, time_units
from mpi4dl.parallel.costs.units import count_units
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tables.simulator import simulate
from mpi4dl.plan import plan as show
from tests.support.tiny import TINY_RESNET, tiny_resnet

CPU = torch.device("cpu")
LINKS = (LinkLevel("node", 1e-6, 1e10, ranks=4), LinkLevel("network", 1e-5, 1e9, shared_by=4))
MACHINE = Machine("a cluster", 16, 4, LINKS, 8 << 30, "GPU", 1e13, 1e11, collectives={"two-level": 1.25})


def test_a_file_describes_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(machine_toml(MACHINE))
    found = load_machine(str(path))
    assert found == replace(MACHINE, collectives={"library": 1.0, "direct": 1.0, "ring": 1.0, "two-level": 1.25})
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
    assert str(refused.value).count(str(path)) == 1


FEW_TILES = [(1, 1, 2), (1, 1, 8), (1, 2, 4), (2, 1, 2), (2, 2, 2), (4, 1, 2), (1, 2, 5), (1, 3, 3)]


def resnet() -> torch.nn.Module:
    return models.build("small_resnet", 10)


def tiny() -> torch.nn.Module:
    return tiny_resnet(10)


LARGE = [(1, 1, 1), (1, 1, 2), (1, 8, 4), (4, 5, 1), (1, 2, 2), (1, 1, 5), (2, 1, 4), (1, 2, 8), (3, 2, 2)]


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        *((tiny, GridShape(*each)) for each in LARGE[:2]),
        *(pytest.param(resnet, GridShape(*each), marks=pytest.mark.exhaustive) for each in LARGE),
    ],
)
def test_counts_of_large_sites_follow_from_small_ones(build: Callable[[], nn.Module], shape: GridShape) -> None:
    """Of a rank in the middle: bytes within 3 %, as many rounds, and what they send."""
    cuttable = Cuttable(outline(build))
    site = Site((2 * shape.batch, 3, 256 * shape[1], 512 * shape[2]), shape, shape.batch > 1, plain=shape.size == 1)
    profiler = Profiler(small=True)
    found, exact = profiler.counts(cuttable, site), count_units(cuttable, site)
    assert sum(unit.touched_bytes for unit in found) == pytest.approx(
        sum(unit.touched_bytes for unit in exact), rel=0.3
    )
    for unit, right in zip(found, exact, strict=True):
        for name, least in {"kept_bytes": 1 << 14, "output_bytes": 0, "flops": 1 << 12}.items():
            assert getattr(unit, name) == pytest.approx(getattr(right, name), rel=0.03, abs=least), name
        for way, of_right in ((unit.there, right.there), (unit.back, right.back)):
            assert {each.alike: each.times for each in way} == {each.alike: each.times for each in of_right}
            sizes = {each.alike: dict(each.parts) for each in of_right}
            for each in way:
                for offset, size in each.parts:
                    assert size == pytest.approx(sizes[each.alike][offset], rel=0.05, abs=4096)


@pytest.mark.parametrize(
    "shape", [(1, 2, 2), *[pytest.param(each, marks=pytest.mark.exhaustive) for each in FEW_TILES]]
)
def test_few_ranks_wait_as_they_are_counted(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Norms of up to eight ranks go another way than those of more, and two tiles have one neighbour each."""
    cuttable, plan = Cuttable(outline(tiny)), Plan.of(tiles=[shape[1:]], data=shape[0])
    site = Site.of(plan, 0, (2 * shape[0], 3, 256 * shape[1], 256 * shape[2]))
    found, exact = Profiler(small=True).counts(cuttable, site), count_units(cuttable, site)
    stage = StageTraffic(MACHINE, plan, 0)
    for name in ("there", "back"):
        ours, theirs = (stage.waits_of([getattr(unit, name) for unit in units]) for units in (found, exact))
        for own, right in zip(map(list, ours), map(list, theirs), strict=True):
            assert own == pytest.approx(right, rel=0.03, abs=1e-7)


@pytest.mark.parametrize("side", [64, pytest.param(96, marks=pytest.mark.exhaustive)])
def test_tiles_smaller_than_usual_follow_from_smaller_ones(tmp_path: Path, side: int) -> None:
    cuttable, shape = Cuttable(outline(tiny)), GridShape(1, 4, 4)
    site = Site((2, 3, 4 * side, 4 * side), shape, False, plain=False)
    found, exact = Profiler(small=True).counts(cuttable, site), count_units(cuttable, site)
    for name in ("kept_bytes", "flops", "output_bytes"):
        ours, right = (sum(getattr(unit, name) for unit in units) for units in (found, exact))
        assert ours == pytest.approx(right, rel=0.03), name


def a_pixel(cuttable: Any, site: Site, *_: Any) -> Seconds:
    return np.array([(0.5 + 1e-6 * site.pixels, 1.0, 0.0) for _ in range(len(cuttable))])


def test_seconds_of_large_sites_follow_from_small_ones(tmp_path: Path) -> None:
    cuttable = Cuttable(outline(tiny))
    site = Site((4, 3, 4096, 4096), GridShape(2, 4, 4), True, plain=False)
    (unit, *_) = Profiler(time=a_pixel, small=True).costs(cuttable, site, CPU)
    assert unit.forward_seconds == pytest.approx(0.5 + 1e-6 * 2 * 1024 * 1024)
    assert unit.backward_seconds == 1.0
    assert {each.shape for each in next(base_choices(site, small=True))} == {GridShape(2, 3, 3)}
    by_rates = Profiler(machine=MACHINE, small=True)
    counts = by_rates.counts(cuttable, site)[0]
    (unit, *_) = by_rates.costs(cuttable, site, CPU)
    assert unit.forward_seconds == pytest.approx(counts.flops / 1e13 + counts.touched_bytes / 1e11)
    (slow, *_) = replace(by_rates, machine=replace(MACHINE, flops_per_second=1e10)).costs(cuttable, site, CPU)
    assert slow.forward_seconds == pytest.approx(counts.flops / 1e10 + counts.touched_bytes / 1e11)


def test_timings_of_elsewhere_are_a_file(tmp_path: Path) -> None:
    cuttable, path = Cuttable(outline(tiny)), tmp_path / "timings.json"
    site = Site((4, 3, 4096, 4096), GridShape(2, 4, 4), True, plain=False)
    store = Store(measured_on="elsewhere")
    timed = Profiler(store, a_pixel, small=True).costs(cuttable, site, CPU)
    store.save(path)

    def fail(*_: Any) -> Seconds:
        raise AssertionError("timed here")

    known = Store.load(path)
    assert known.measured_on == "elsewhere"
    there = Profiler(known, fail, small=True)
    assert there.costs(cuttable, site, CPU) == timed
    with pytest.raises(MissingTimings, match="no timings of this model on 4x1 tiles"):
        there.costs(cuttable, site._replace(shape=GridShape(2, 4, 1)), CPU)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no file of timings"):
        Store.load(path)


def estimator_of(build: Any, image: tuple[int, ...], profiler: Profiler) -> Estimator:
    return Estimator(Cuttable(outline(build)), image, profiler, CPU)


def test_timings_of_another_model_are_not_replaced_by_counted_flops(tmp_path: Path) -> None:
    Store().save(tmp_path / "other.json")
    store = Store.load(tmp_path / "other.json")
    estimator = estimator_of(tiny, (2, 3, 256, 256), Profiler(store, machine=replace(MACHINE, flops_per_second=None)))
    with pytest.raises(MissingTimings, match=r"other\.json"):
        estimates(estimator, [Plan.of(tiles=[(1, 2)])])


def test_counts_of_another_version_are_not_taken_from_a_file(tmp_path: Path) -> None:
    store = Store()
    seconds, counts = {"what": ["seconds"], "on": "a GPU", "mpi4dl": "0.1"}, {"what": ["counts"], "mpi4dl": "0.1"}
    for facts in (seconds, counts):
        store.put(facts, 1)
    assert store.get({**seconds, "mpi4dl": "0.2"}) is None  # of this machine, other versions take other times
    store.save(tmp_path / "older.json")
    file = Store.load(tmp_path / "older.json")
    assert file.get({**seconds, "on": "CPU", "mpi4dl": "0.2"}) == 1
    assert file.get({**counts, "mpi4dl": "0.2"}) is None


class NormOfOneValue(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8), nn.Flatten())


class OneSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.positions = nn.Parameter(torch.zeros(1, 8, 192, 192))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + self.positions


@pytest.mark.parametrize("build", [NormOfOneValue, OneSize])
def test_models_that_refuse_small_sites_are_looked_at_on_others(tmp_path: Path, build: type[nn.Module]) -> None:
    """Batch norm takes no single value, and parameters for each position take images of one size."""
    cuttable, site = Cuttable(outline(build)), Site((4, 3, 192, 192), GridShape(1, 1, 1), False, plain=True)
    found = Profiler(machine=MACHINE, small=True).counts(cuttable, site)
    for unit, right in zip(found, count_units(cuttable, site), strict=True):
        assert unit.flops == pytest.approx(right.flops, rel=0.01)
        assert unit.output_bytes == pytest.approx(right.output_bytes, rel=0.01)
    assert (time_units(cuttable, site, CPU, 0.01)[:, 0] > 0).all()


def test_the_ways_with_most_samples_decide(tmp_path: Path) -> None:
    cuttable, profiler = Cuttable(outline(tiny)), Profiler(time=a_pixel, small=True)
    few, even = (Site((samples, 3, 256, 256), GridShape(3, 1, 1), True, plain=False) for samples in (4, 6))
    assert profiler.costs(cuttable, few, CPU) == profiler.costs(cuttable, even, CPU)
    assert [unit.kept_bytes for unit in count_units(cuttable, few)] == [
        unit.kept_bytes for unit in count_units(cuttable, even)
    ]


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


@pytest.mark.parametrize(("zero", "gathers"), [(0, 0), (2, 0), (3, 4)])
def test_python_of_parameters_that_replicas_share(zero: int, gathers: int) -> None:
    """Each of 10 gradients is sorted into a bucket, and with ZeRO 3 parameters are looked for in 4 microbatches."""
    plan = Plan.of(data=2, microbatches=4, zero=zero)
    state = StateBytes(parameters=0, update=0, fixed=0, bucket=0, tensors=10)
    overhead = Overhead(parameter_seconds=1.0, summed_seconds=0.5, gathered_seconds=0.25)
    seconds = (StageSeconds(1.0, 2.0, NO_WAITS, NO_WAITS),)
    alone, shared = (
        StepTime(each, MACHINE, seconds, (), (1,), ((state,),), overhead).parts.optimizer
        for each in (Plan.of(microbatches=4), plan)
    )
    assert alone == pytest.approx(10.0)
    assert shared == pytest.approx(10 * (1.0 + 0.5 + 0.25 * gathers))


def test_sums_hide_behind_the_backward_pass() -> None:
    """Of four buckets of 1 s each the last one is left, or what a pass of 2 s, with the first at 0.5 s, cannot hide."""
    assert behind_backward(4, 1.0, 8.0) == 1.0
    assert behind_backward(4, 1.0, 2.0) == 4.0 + 0.5 - 2.0
    assert behind_backward(1, 1.0, 8.0) == 1.0


def test_the_same_sites_on_other_ranks_have_their_own_messages() -> None:
    """Stages 0 to 3 on four ranks each, or dealt out over two ranks in two chunks: these hand on to other ranks."""
    estimator = estimator_of(tiny, (4, 3, 256, 256), Profiler(machine=MACHINE, small=True))
    whole = Plan.of(stages=4, tiles=[(1, 2)], microbatches=2)
    chunks = Plan.of(stages=4, tiles=[(1, 2)], microbatches=2, chunks=2, schedule="interleaved")
    assert estimator.sites(whole) == estimator.sites(chunks)
    for plan in (whole, chunks):
        ranks = [stage.ranks.tolist() for stage in estimator.costs(plan).stages]
        assert ranks == [list(plan.ranks(0, stage)) for stage in range(4)]


def test_on_gpus_tensors_alone_count() -> None:
    plan, profiler = Plan.of(tiles=[(1, 2)]), Profiler(machine=MACHINE, small=True)
    estimator = estimator_of(tiny, (2, 3, 256, 256), profiler)
    assert estimator.memory(plan, (len(estimator.cuttable),)).process(0) == 0
    estimator.profiler = replace(estimator.profiler, machine=replace(MACHINE, device="CPU"))
    assert estimator.memory(plan, (len(estimator.cuttable),)).process(0) > 0


def test_a_kind_pays_as_long_as_twice_the_ranks_are_worth_it() -> None:
    class Best:
        def __init__(self, speed: float) -> None:
            self.samples_per_second = speed

    def points(*speeds: float) -> list[Point]:
        return [Point("tiles", 2**i, Best(speed)) for i, speed in enumerate(speeds)]  # type: ignore[arg-type]

    assert stops_paying(points(1.0, 2.0, 4.0)) is None
    assert stops_paying(points(1.0, 2.0, 2.0 * PAYS - 0.1, 4.0)) == 2
    assert numbers_of_ranks(12) == [1, 2, 4, 8, 12]


def test_the_command_plans_for_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.toml"
    path.write_text(machine_toml(MACHINE))
    training = ["--model", TINY_RESNET, "--image-size", "1024", "--batch-size", "2"]
    on = ["--machine", str(path)]
    show([*training, *on, "--ranks", "2", "--search"])
    told = capsys.readouterr().out
    assert "a cluster: 16 nodes of 4 ranks, GPU; node 1 us, 10 GB/s; network 10 us, 1 GB/s for 4 ranks" in told
    assert "node-hours for 1,000 steps: " in told
    assert "mpirun -n 2 " in told
    show([*training, *on, "--ranks", "2", "--scaling", "strong"])
    told = capsys.readouterr().out
    assert (tmp_path / "scaling-strong.png").stat().st_size > 1000
    assert "all together: fit from 1 rank on" in told
    with pytest.raises(ConfigError, match="more than the machine has: 64"):
        show([*training, *on, "--ranks", "128", "--search"])


@pytest.mark.parametrize("patch", ["64", "256"])
def test_patches_are_planned_for_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], patch: str
) -> None:
    path, timings = tmp_path / "cluster.toml", tmp_path / "timings.json"
    path.write_text(machine_toml(MACHINE))
    flags = ["--model", TINY_RESNET, "--image-size", "512", "--batch-size", "2", "--patches", patch, "--tiles", "1x2"]
    show([*flags, "--machine", str(path)])
    assert "simulated (by the rates of a cluster" in capsys.readouterr().out
    Store().save(timings)
    with pytest.raises(ConfigError, match=rf"--patch-size {patch}: --timings is for models of whole images"):
        show([*flags, "--timings", str(timings)])


def test_a_rank_needs_for_its_patches_what_one_rank_needs_for_as_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(machine_toml(MACHINE))
    patches = ["--model", TINY_RESNET, "--image-size", "512", "--patch-size", "64", "--patches-at-once", "4"]

    def needs(*flags: str) -> tuple[float, str]:
        """Seconds of a step, and MiB of activations."""
        show([*patches, "--machine", str(path), *flags])
        told = capsys.readouterr().out
        row = next(line for line in told.splitlines() if "(this plan)" in line).split()
        return float(told.splitlines()[-1].split(" s, ")[0]), row[-4]

    seconds, num_bytes = needs("--batch-size", "1")
    on_tiles = needs("--batch-size", "1", "--tiles", "2x2")
    assert on_tiles == (pytest.approx(seconds / 4, rel=0.01), num_bytes)
    assert needs("--batch-size", "4", "--data", "4") == (pytest.approx(seconds, rel=0.01), num_bytes)


def test_files_that_cannot_be_made_are_refused_before_anything_is_timed(tmp_path: Path) -> None:
    training = ["--model", "small_resnet", "--image-size", "64", "--batch-size", "8", "--ranks", "2", "--time-only"]
    known = tmp_path / "known.png"
    known.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        show([*training, str(known)])
    with pytest.raises(ConfigError, match="No such file or directory"):
        show([*training, str(tmp_path / "missing" / "new.png")])
    assert known.read_text() == "mine"


@pytest.mark.exhaustive
def test_timings_for_many_ranks_are_for_fewer_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, told = tmp_path / "timings.json", {"out": ""}
    training = ["--model", "small_resnet", "--image-size", "64", "--batch-size", "4"]

    def of(*flags: str) -> str:
        show([*training, *flags])
        told["out"] = capsys.readouterr().out
        return told["out"]

    with patch("mpi4dl.parallel.costs.cost_model.Profiler.time", staticmethod(a_pixel)):
        of("--ranks", "2", "--time-only", str(path))
    found = of("--ranks", "2", "--timings", str(path), "--scaling", "strong")
    assert "replicas: fit from 1 rank on" in found
    for how in (["--ranks", "2", "--search"], ["--stages", "2"]):
        with pytest.raises(ConfigError, match=r"^--timings .* has no timings of this model"):
            of(*how, "--timings", str(path), "--num-classes", "7")
