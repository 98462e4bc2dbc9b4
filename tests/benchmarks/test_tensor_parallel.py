"""benchmarks.tensor_parallel: what is added up over features is the formula's, and what must be alike is compared."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tensor_parallel import GLOO, OURS, Ours, as_table, build, formula_bytes, parse, summarise
from benchmarks.turns import Contestant
from mpi4dl.comm import Communicator
from mpi4dl.parallel.costs.atoms import count_atoms
from mpi4dl.parallel.costs.timing import sites_of
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT, python

SIZES = "--layers 2 --hidden 8 --heads 2 --vocabulary 16 --context 8 --batch-size 2".split()
TINY = [*SIZES, "--ranks", "2", "--steps", "1", "--rounds", "1"]


def counted(comm: Communicator, sequence: bool) -> int:
    return Ours(parse(TINY), comm, sequence).count()


@pytest.mark.parametrize("sequence", [False, True])
def test_the_bytes_that_ranks_add_up_are_those_of_the_formula_and_of_the_planner(ranks: Ranks, sequence: bool) -> None:
    options, plan = parse(TINY), replace(Plan(((1,),)), tensor=2, sequence=sequence)
    cuttable = Cuttable(outline(lambda: build(options)))
    (site,) = sites_of(cuttable, plan, (options.batch_size, options.context))
    foreseen = sum(atom.summed for atom in count_atoms(cuttable, site))
    assert ranks(2).run(counted, sequence) == [formula_bytes(options, 2)] * 2 == [foreseen] * 2


def contestants(**other: Any) -> list[Contestant]:
    options = parse(TINY)
    known = {"losses": [2.0, 1.5], "counted_bytes": formula_bytes(options, 2), "mebibytes": 8.0, "cpu_seconds": 0.5}
    ours = [{"seconds": seconds, **known, **other} for seconds in (0.5, 1.0, 2.0)]
    peers = [{"seconds": 2.0, **known, "counted_bytes": 0} for _ in range(3)]
    return [Contestant(OURS, 2, [], ours), Contestant(GLOO, 2, [], peers)]


def test_ratios_within_a_turn() -> None:
    rows = summarise(contestants(), parse(TINY))
    assert (rows[0]["over_gloo"], rows[0]["over_gloo_min"], rows[0]["over_gloo_max"]) == (0.5, 0.25, 1.0)
    assert rows[0]["sent_bytes"] == rows[0]["counted_bytes"]  # two ranks send 2 x 1 / 2 of it
    assert "0.50  (0.25-1.00)" in as_table(rows)


@pytest.mark.parametrize(
    ("other", "message"), [({"losses": [2.0, 1.6]}, "has the losses"), ({"counted_bytes": 7}, "7 bytes were added up")]
)
def test_what_is_not_alike_is_not_measured(other: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        summarise(contestants(**other), parse(TINY))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "two"], "write them as 1,2,4"),
        (["--ranks", "3"], "torch shares out 8 heads evenly alone"),
        (["--ways", "theirs"], "choose of ours"),
        (["--layers", "0"], "--layers is 0, but must be at least 1"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(parse, flags, message, capsys)


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "tensor"
    command = [python(), "-m", "benchmarks.tensor_parallel", *TINY, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{out}.json").read_text())["results"]["contestants"]
    assert [row["name"] for row in rows][:1] == [OURS]
    assert all(row["seconds"] > 0 for row in rows)
    assert_picture(f"{out}.png")
