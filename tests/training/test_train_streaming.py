"""The training command with --stream: the numbers of training without it, on slides, resumed, and refused in words."""

from pathlib import Path

import numpy as np
import pytest
import tifffile

from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.options import build
from mpi4dl.options.config import parse
from mpi4dl.train import train
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, read_metrics
from tests.support.interrupted import assert_the_same_run

COMMON = (
    "--model small_resnet --model-options num_filters=4 --image-size 144 --batch-size 2 --num-workers 1 --epochs 1 "
    "--val-fraction 0.3 --log-interval 1 --optimizer SGD --lr 0.002 --lr-schedule constant --flip "
    "--no-tensorboard"
).split()
STREAMED = "--stream 3x2 --stream-until stage2_block2 --stream-segments 2".split()
PLANS = (
    "--tiles 1x1",
    pytest.param("--tiles 1x2", marks=pytest.mark.exhaustive),
    pytest.param("--tiles 1x2 --data 2 --zero 2", marks=pytest.mark.exhaustive),
    "--stages 2 --tiles 2x1,1x1 --stream-until stem --stream-segments 1",
    "--tiles 1x2 --stream-segments norms --stream-keep disk",
)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiled TIFFs with JPEG compression, larger than what is shown of them."""
    root, random = tmp_path_factory.mktemp("slides"), np.random.default_rng(0)
    for label in range(2):
        for i in range(5):
            path = root / "ab"[label] / f"{i}.tif"
            path.parent.mkdir(exist_ok=True)
            coarse = random.integers(0, 256, (12, 11, 3), dtype=np.uint8)
            pixels = np.kron(coarse, np.ones((16, 16, 1), np.uint8))
            tifffile.imwrite(path, pixels, photometric="rgb", tile=(64, 64), compression="jpeg")
    return root


@pytest.mark.exhaustive
def test_what_is_streamed_is_said(ranks: Ranks, tmp_path: Path) -> None:
    """The wider the tiles, the further it goes by itself."""
    flags = [*COMMON, "--num-samples", "6", "--max-steps", "1", "--eval-every", "none", "--stream"]
    ends = ("2x2", "up to stem.3"), ("9x9", "up to stem.2")
    for counts, end in ends:
        ranks(1).run(train, [*flags, counts, "--run-folder", str(tmp_path / counts)])
        said = f"each rank streams {counts} tiles one after the other, {end}\n"
        assert said in (tmp_path / counts / "log-rank0.txt").read_text()


@pytest.fixture(scope="module")
def expected(ranks: Ranks, slides: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("expected") / "run"
    ranks(1).run(train, [*COMMON, "--images", str(slides), "--run-folder", str(folder)])
    return losses_of(folder)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.exhaustive
def test_slides_by_every_plan(ranks: Ranks, slides: Path, expected: list[float], tmp_path: Path, plan: str) -> None:
    flags = [*COMMON, *STREAMED, "--images", str(slides), *plan.split(), "--run-folder", str(tmp_path / "run")]
    ranks(build.build_plan(parse(flags)).num_ranks).run(train, flags)
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=1e-3)


IN_A_TILE = """
import os, signal, sys, time
from pathlib import Path
from mpi4dl import engine, train
from mpi4dl.parallel.streaming.stream import Streaming

step, run_tile = engine.Engine.step, Streaming._run_tile
saved = Path(sys.argv[sys.argv.index("--run-folder") + 1], "checkpoints", "step-00000002")
under_way = []

def third_waits(self, *arguments):
    while self.num_steps == 2 and not saved.exists():
        time.sleep(0.01)
    under_way.append(self)
    return step(self, *arguments)

def fatal(self, tile, *arguments, **options):
    backward = "compare" not in options
    if under_way[-1].num_steps == 2 and under_way[-1].comm.rank == 1 and backward and tile % 3 == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return run_tile(self, tile, *arguments, **options)

engine.Engine.step, Streaming._run_tile = third_waits, fatal
train.main()
"""
PATCHES = "--patches 32 --patches-at-once 7 --min-tissue 0.2 --jitter 0.2".split()


@pytest.mark.parametrize("how", [STREAMED, pytest.param(PATCHES, marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_a_run_killed_in_the_backward_pass_of_a_tile_goes_on_to_the_last_bit(
    ranks: Ranks, slides: Path, tmp_path: Path, how: list[str]
) -> None:
    flags = [*COMMON, *how, "--images", str(slides), "--tiles", "1x2", "--save-every", "2", "--resume", "auto"]
    ranks(2).run(train, [*flags, "--run-folder", str(tmp_path / "whole")])
    assert mpirun(2, "-c", IN_A_TILE, *flags, "--run-folder", str(tmp_path / "parts")).code != 0
    assert len(read_metrics(tmp_path / "parts")) == 2
    ranks(2).run(train, [*flags, "--run-folder", str(tmp_path / "parts")])
    assert_the_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.exhaustive
def test_patches_by_every_plan(ranks: Ranks, slides: Path, tmp_path: Path) -> None:
    losses = []
    for plan in ("", "--tiles 1x2 --stream-segments 3", "--tiles 1x2 --data 2 --aggregator gated-attention --zero 1"):
        folder = tmp_path / f"run{len(losses)}"
        flags = [*COMMON, *PATCHES, "--max-steps", "2", "--images", str(slides), *plan.split()]
        flags += ["--run-folder", str(folder)]
        ranks(build.build_plan(parse(flags)).num_ranks).run(train, flags)
        losses.append(losses_of(folder))
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-3)] * 2


@pytest.mark.parametrize("how", [["--stream", "2x2"], ["--patches", "33"], ["--patches", "33", "--min-tissue", "0.1"]])
@pytest.mark.sample(1)
def test_an_image_that_breaks_in_the_middle_ends_the_run_on_all_ranks(
    ranks: Ranks, slides: Path, tmp_path: Path, how: list[str]
) -> None:
    """Only the tile in its lower right corner is damaged: one rank reads it, in one of its tiles."""
    for path in slides.rglob("*.tif"):
        into = tmp_path / "slides" / path.relative_to(slides)
        into.parent.mkdir(exist_ok=True, parents=True)
        into.write_bytes(path.read_bytes())
        with tifffile.TiffFile(into) as found:
            start, count = found.pages[0].dataoffsets[-1], found.pages[0].databytecounts[-1]  # type: ignore[union-attr]
        with into.open("r+b") as file:
            file.seek(start)
            file.write(bytes(count))
    flags = [*COMMON, *how, "--images", str(tmp_path / "slides"), "--fit", "resize", "--tiles", "1x2"]
    said = ranks(2).run(refused, [*flags, "--run-folder", str(tmp_path / "run")])
    assert all(".tif" in each for each in said), said


def refused(comm: Communicator, flags: list[str]) -> str:
    with pytest.raises((Refusal, ValueError)) as raised:
        train(comm, flags)
    return str(raised.value)


@pytest.mark.exhaustive
def test_tiles_are_chosen_for_a_limit_of_memory(
    ranks: Ranks, slides: Path, expected: list[float], tmp_path: Path
) -> None:
    limit = "--stream auto --memory-limit 44MB --stream-until stage1_block1 --tiles 1x2"
    flags = [*COMMON, *limit.split(), "--images", str(slides), "--run-folder", str(tmp_path / "run")]
    ranks(2).run(train, flags)
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=1e-3)
    (log,) = [path for path in (tmp_path / "run").rglob("*") if "rank" in path.name and "0" in path.name]
    assert "--stream auto: " in log.read_text()


def test_a_dry_run_says_what_it_would_take(ranks: Ranks, tmp_path: Path) -> None:
    flags = [*COMMON, *STREAMED, "--num-samples", "8", "--dry-run", "--run-folder", str(tmp_path / "run")]
    ranks(1).run(train, flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stream 4", "--stream 4: streaming cuts 1 axes, but images have 2"),
        ("--stream 2x400", "--stream 2x400: images of 144x144 pixels are too small for 2x400 tiles"),
        ("--stream 2x2 --stream-until none_such", "--stream 2x2: there is no 'none_such' in the first stage, whose"),
        ("--stream 2x2 --stream-until head", "--stream 2x2: the whole model would be streamed, up to head"),
        ("--stream auto", "--stream auto needs --memory-limit: the limit of a rank's memory, such as 6GiB"),
        ("--stream 2x2 --memory-limit 1GiB", "--memory-limit 1,024.0 MiB is for --stream auto, which chooses"),
        pytest.param(
            "--stream auto --memory-limit 5MiB",
            "--stream auto: no tiles keep a rank within 5.0 MiB: the least would be",
            marks=pytest.mark.exhaustive,
        ),
        ("--stream-until stem", "--stream-until stem says where streaming ends, but --stream is missing"),
        ("--patches 145", "--patch-size 145 of --model small_resnet: images of 144 x 144 px have no patches of 145 x"),
        ("--patches 32 --stream 2x2", "--stream is for images that the model sees whole"),
        (
            "--patches 32 --model squeezenet1_0 --model-options dropout=0.1",
            "it does not end in a linear layer of its classes",
        ),
        ("--min-tissue 0.1", "--min-tissue 0.1 chooses patches, but --patch-size is missing"),
    ],
)
def test_what_cannot_be_streamed(ranks: Ranks, tmp_path: Path, flags: str, message: str) -> None:
    more = ["--num-samples", "8", *flags.split(), "--run-folder", str(tmp_path / "run")]
    (found,) = ranks(1).run(refused, [*COMMON, *more])
    assert message in found


def test_a_dry_run_of_patches_shows_one_tile(ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--num-samples 8 --patches 32 --min-tissue 0.1 --tiles 1x1 --dry-run --run-folder".split()
    train(world(), [*COMMON, *flags, str(tmp_path / "run")])
    out = capfd.readouterr().out
    assert "4 x 4 patches of 32 px in each image, those with at least 10 % of tissue: 16 at once on each rank" in out
    assert "--zero 0 (this plan)" in out
