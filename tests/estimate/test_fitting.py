"""What a run says before its first step: that it does not fit, with what does, and the passes over tiles of a step."""

import re
from pathlib import Path
from typing import Any

import pytest

from mpi4dl import _memory
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.estimate import dry_run
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse
from mpi4dl.parallel.streaming.stream import Streaming
from mpi4dl.train import train
from mpi4dl.training.run import fit
from mpi4dl.training.setup import set_up, told_before
from tests.pool.ranks import Ranks
from tests.support.counting import memory_of_command
from tests.support.tiny import TINY_RESNET

RUN = "--no-tensorboard --num-samples 4 --max-steps 1 --eval-every none --save-every none --num-workers 1"
LARGE = "--model small_resnet --image-size 512 --batch-size 4"
UNSTREAMED = "--schedule gpipe"  # by which nothing can be streamed, which takes long to try
PROCESS = 40 << 20  # bytes of each rank beside its tensors


def begun(comm: Communicator, flags: str, num_bytes: float, folder: Path) -> str:
    """How a run ends on nodes of so much memory: the refusal, or else what the log of rank 0 says."""
    memory, _memory.memory_of_node = _memory.memory_of_node, lambda: int(num_bytes)  # type: ignore[assignment]
    try:
        train(comm, [*flags.split(), *RUN.split(), "--run-folder", str(folder)])
    except Refusal as refusal:
        return f"refused: {refusal}"
    finally:
        _memory.memory_of_node = memory
    log = folder / "log-rank0.txt"
    return log.read_text() if log.exists() else ""


def needs(flags: str) -> int:
    config = parse(flags.split())
    return memory_of_command(config, build_plan(config), 10)


@pytest.mark.parametrize("more", [UNSTREAMED, pytest.param("--image-size 1024", marks=pytest.mark.exhaustive)])
def test_a_run_that_cannot_fit_is_refused_with_what_does(ranks: Ranks, tmp_path: Path, more: str) -> None:
    """On all ranks alike. What it proposes is started on the same nodes, and is neither refused nor warned of."""
    flags = f"{LARGE} --tiles 1x2 {more}"
    limit = 2 * PROCESS + 0.57 * (needs(flags) - 2 * PROCESS)
    (refusal,) = set(ranks(2).run(begun, flags, limit, tmp_path / "refused"))
    assert refusal.startswith("refused: 2 ranks on ")
    assert not (tmp_path / "refused").exists()
    proposed = [words for words in re.findall(r"--[a-z][^;,.]*", refusal) if not words.startswith("--memory-check")]
    words_of_all = {word for words in proposed for word in words.split()}
    assert words_of_all >= {"--batch-size", "--recompute", *(["--stream"] if more != UNSTREAMED else [])}
    for number, words in enumerate(proposed):
        folder = tmp_path / f"run{number}"
        told = ranks(2).run(begun, f"{flags} {words.replace(' with ', ' ')}", limit, folder)[0]
        assert "done:" in told, words
        assert "of memory" not in told, words


def begun_without_estimate(comm: Communicator, folder: Path) -> str:
    def fails(*_: Any) -> None:
        raise TypeError("no shapes here\nand more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "MemoryNeed", fails)
        return begun(comm, LARGE, 2.0 * PROCESS, folder)


def test_a_run_says_why_nothing_could_be_estimated(ranks: Ranks, tmp_path: Path) -> None:
    (log,) = ranks(1).run(begun_without_estimate, tmp_path / "run")
    assert "could not be estimated (TypeError: no shapes here)" in log
    assert "done:" in log


@pytest.mark.parametrize(
    ("more", "share", "ends"),
    [
        ("", 1.1, "done:"),
        ("", 0.9, "warning: 1 rank"),
        ("", 0.5, "refused: 1 rank"),
        ("--memory-check warn", 0.5, "warning: 1 rank"),
        ("--memory-check none", 0.5, "done:"),
        ("--freeze *.weight", 0.5, "warning: 1 rank"),
        ("--precision bf16", 0.5, "warning: 1 rank"),
    ],
)
@pytest.mark.sample(2)
def test_only_what_is_clearly_too_large_is_refused(
    ranks: Ranks, tmp_path: Path, more: str, share: float, ends: str
) -> None:
    flags = f"{LARGE} {UNSTREAMED} {more}"
    told = ranks(1).run(begun, flags, share * needs(LARGE), tmp_path / "run")[0]
    assert ends in told
    assert ("done:" in told, "of memory" in told) == (not ends.startswith("refused"), ends != "done:")


STREAMED_RUNS = {
    "patches": "--patches 32 --patches-at-once 3 --tiles 1x2",
    "patches, segments": "--patches 32 --patches-at-once 3 --stream-segments 3",
    "stream": "--stream 2x2 --stream-until stage1_block1",
    "stream, segments": "--stream 2x3 --stream-until stage1_block1 --stream-segments 3 --tiles 1x2",
}


def tiles_of_a_step(comm: Communicator, flags: str, folder: Path) -> tuple[int, int, str]:
    """How many tiles a step runs on this rank, how many were estimated, and what the run says."""
    run_tile, made = Streaming._run_tile, []

    def noted(self: Any, *arguments: Any, **how: Any) -> Any:
        made.append(self)
        return run_tile(self, *arguments, **how)

    Streaming._run_tile = noted  # type: ignore[method-assign]
    try:
        argv = [*flags.split(), *RUN.split(), "--run-folder", str(folder)]
        setup = set_up(parse(argv), comm, argv=argv)
        told = told_before(setup)
        fit(setup)
    finally:
        Streaming._run_tile = run_tile  # type: ignore[method-assign]
    passes = dry_run.passes_of(setup.workload(), setup.engine.stages)
    assert passes is not None
    return (
        len(made),
        passes.tiles * sum(2 + s.forward_statistics + s.backward_statistics for s in passes.segments),
        "".join(told),
    )


@pytest.mark.parametrize("name", STREAMED_RUNS)
@pytest.mark.sample(1)
def test_the_passes_of_a_step_are_said_before_it(ranks: Ranks, tmp_path: Path, name: str) -> None:
    flags = f"--model {TINY_RESNET} --image-size 128 --batch-size 2 {STREAMED_RUNS[name]}"
    num_ranks = build_plan(parse(flags.split())).num_ranks
    found = ranks(num_ranks).run(tiles_of_a_step, flags, tmp_path / "run")
    assert [made for made, _, _ in found] == [foreseen for _, foreseen, _ in found]
    said = found[0][2]
    assert re.search(r"\d+ times a step, \d+ forward and \d+ backward", said)
    assert re.search(r"about \d+ (s|min) of arithmetic a step", said)
    assert "`stream_norm` running" in said


def test_a_dry_run_warns_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun(world(), f"{LARGE} {UNSTREAMED} --dry-run", 0.1 * needs(LARGE), tmp_path / "run")
    assert "warning: 1 rank" in capfd.readouterr().out


def test_norms_that_need_one_pass_are_not_warned_of(ranks: Ranks, tmp_path: Path) -> None:
    flags = "--model small_resnet --image-size 64 --batch-size 2 --patches 32 --stream-norm running"
    assert "times a step" not in ranks(1).run(begun, flags, 2**40, tmp_path / "run")[0]


def test_a_node_has_the_memory_that_its_control_group_allows(tmp_path: Path) -> None:
    meminfo, group, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs"
    meminfo.write_text("MemFree: 1 kB\nMemTotal:       4096 kB\n")
    inner = root / "user" / "job"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (root / "user" / "memory.max").write_text("3000000\n")
    group.write_text("0::/user/job\n")
    assert _memory.memory_of_node(meminfo, group, root) == 3000000
    (root / "memory" / "old").mkdir(parents=True)
    (root / "memory" / "old" / "memory.limit_in_bytes").write_text("2000000\n")
    group.write_text("4:cpu,memory:/old\n3:cpu:/other\n")
    assert _memory.memory_of_node(meminfo, group, root) == 2000000
    assert _memory.memory_of_node(meminfo, tmp_path / "none", root) == 4096 * 1024
