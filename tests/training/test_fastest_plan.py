"""mpi4dl.train --plan auto: the plan is searched for the ranks that there are, and trains what any plan trains."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpi4dl._memory import NodeMemory
from mpi4dl.comm import Communicator
from mpi4dl.options.config import ConfigError, parse
from mpi4dl.parallel.plan import Plan
from mpi4dl.plan import plan
from mpi4dl.train import train
from mpi4dl.training.fastest_plan import choose, require_open
from mpi4dl.training.setup import with_samples
from tests.pool.ranks import Ranks
from tests.support.commands import PLAIN, read_metrics, refused, said
from tests.support.tiny import TINY_RESNET

FLAGS = (
    f"--model {TINY_RESNET} --image-size 20 --batch-size 4 --num-samples 20 "
    "--num-workers 0 --no-tensorboard --save-every 2 --log-interval 1"
).split()
RUN = [*FLAGS, *PLAIN, "--epochs", "2"]
AUTO = ["--plan", "auto"]
SMALL = ["--model", "small_resnet"]


def losses(folder: Path) -> list[float]:
    return [each["loss"] for each in read_metrics(folder)]


def told(comm: Communicator, argv: list[str]) -> str:
    """A body: what a training prints that finds these ranks alone on their node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm.node, "local_size", comm.size)
        return said(comm, train, argv)


def test_a_run_goes_on_by_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Each job finds a plan of its own for the ranks that it has, and says how to keep it."""
    auto = [*RUN, *AUTO, "--resume", "auto", "--run-folder", str(tmp_path / "run")]
    begun, _ = ranks(2).run(told, [*auto, "--max-steps", "5"])
    advice = re.search(r"--plan auto: .* that fit; to keep it, replace --plan auto by (.*)\n", begun)
    assert advice is not None, begun
    kept = parse([*RUN, *shlex.split(advice[1])])
    assert Plan.of(**{name: getattr(kept.parallel, name) for name in Plan.options()}).num_ranks == 2
    (done,) = ranks(1).run(told, auto)
    assert "by nothing\n" in done
    assert "resumes from" in done
    [written] = (tmp_path / "run").glob("config-step-*.toml")
    assert parse(["--config", str(written)]).parallel == parse(RUN).parallel
    ranks(1).run(train, [*RUN, "--run-folder", str(tmp_path / "whole")])
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_options_of_a_plan_are_not_chosen_too(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(2).run(refused, train, [*RUN, *AUTO, "--tiles", "1x2", "--run-folder", str(tmp_path / "run")])
    assert set(said) == {"--plan auto chooses --tiles, too, or does without: leave out one or the other"}
    assert not (tmp_path / "run").exists()


def test_texts_and_volumes_are_left_open_too() -> None:
    for flags in ("--text stdlib --model gpt", "--image-size 8x8x8 --model resnet3d"):
        require_open(parse(flags.split()).parallel)
    with pytest.raises(ConfigError, match=r"^`plan` auto chooses `tiles`, too"):
        require_open(parse("--text stdlib --model gpt --tiles 2".split()).parallel)
    with pytest.raises(ConfigError, match=r"^`plan` auto chooses `memory_limit`, too, or does without"):
        require_open(parse("--memory-limit 1GiB".split()).parallel)


@pytest.mark.parametrize(
    ("norm", "asked", "found", "more"),
    [
        ("batch", 1, {1}, []),
        ("batch", 2, {2}, []),
        ("none", 2, {2}, []),
        ("none", 1, {1, 2, 4}, []),
        ("none", 1, {1}, ["--task", "survival"]),
    ],
)
def test_microbatches_are_chosen_where_neither_norm_nor_loss_sees_them(
    monkeypatch: pytest.MonkeyPatch, norm: str, asked: int, found: set[int], more: list[str]
) -> None:
    looked_at = set()

    def search(estimator, plans, *rest):
        looked_at.update(each.num_microbatches for each in plans)
        raise ConfigError("looked")

    monkeypatch.setattr("mpi4dl.training.fastest_plan.search", search)
    flags = [*FLAGS, *SMALL, "--model-options", f"num_filters=4,norm={norm}", "--microbatches", str(asked), *more]
    work = with_samples(parse(flags))
    work = replace(work, targets=torch.ones(4, 2)) if more else work
    with pytest.raises(ConfigError, match="looked"):
        choose(work, [NodeMemory("a", 1 << 34)] * 2, 2)
    assert looked_at == found


def test_the_search_of_the_planning_command_leaves_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    plan([*FLAGS, *AUTO, "--ranks", "2"])
    commands = [line for line in capsys.readouterr().out.splitlines() if "mpi4dl.train" in line]
    assert commands
    assert not [line for line in commands if "--plan" in line]
    with pytest.raises(ConfigError, match=r"^--plan auto is for a training: here --ranks N shows the fastest plans$"):
        plan([*FLAGS, *AUTO])


def test_what_fits_no_rank_is_refused_with_what_it_needs() -> None:
    work = with_samples(parse([*RUN, *SMALL]))
    with pytest.raises(ConfigError, match=r"^no plan for 2 ranks fits into 0.4 MiB of each: the smallest needs [1-9]"):
        choose(work, [NodeMemory("a", 1 << 20), NodeMemory("a", 1 << 20)], 2)


def test_without_time_the_simplest_plan_that_was_looked_at_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("mpi4dl.training.fastest_plan.SEARCH_SECONDS", -1.0)
    found, told = choose(with_samples(parse([*RUN, *SMALL])), [NodeMemory("a", 1 << 34)] * 4, 4)
    assert (found["data"], found["stages"]) == (4, 1)
    assert re.search(r"the fastest of [1-9]\d* plans? that fit and were looked at in a minute$", told)
