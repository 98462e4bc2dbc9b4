"""The training command with --stream: the numbers of training without it, on slides, resumed, and said before."""

from pathlib import Path

import numpy as np
import pytest
import tifffile

from mpi4dl.comm import world
from mpi4dl.datasets.base import WholeImage
from mpi4dl.train import train
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, read_metrics, refused, run_train, words
from tests.support.interrupted import assert_the_same_run, program
from tests.support.tiny import TINY_RESNET

COMMON = (
    f"--model {TINY_RESNET} --model-options num_filters=4 --image-size 144 --batch-size 2 --num-workers 1 --epochs 1 "
    "--val-fraction 0.3 --log-interval 1 --optimizer SGD --lr 0.002 --lr-schedule constant --flip "
    "--no-tensorboard"
)
STREAMED = "--stream 3x2 --stream-until stage1_block1 --stream-segments 2"
PATCHES = "--patches 32 --patches-at-once 7 --min-tissue 0.2 --jitter 0.2"
PLANS = (
    "--tiles 1x1",
    "--tiles 1x2",
    "--tiles 1x2 --data 2 --zero 2",
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
    for counts, end in (("2x2", "up to stem.3"), ("9x9", "up to stem.2")):
        flags = (COMMON, "--num-samples 6 --max-steps 1 --eval-every none --stream", counts)
        log = (run_train(ranks, tmp_path / counts, *flags) / "log-rank0.txt").read_text()
        assert f"each rank streams {counts} tiles one after the other, {end}\n" in log


@pytest.fixture(scope="module")
def expected(ranks: Ranks, slides: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of(run_train(ranks, tmp_path_factory.mktemp("expected") / "run", COMMON, "--images", slides))


class Varied:
    """Images that are drawn anew each time, box by box."""

    channels, classes = 3, ("a", "b")

    def __len__(self) -> int:
        return 8

    def label(self, index: int) -> int:
        return index % 2

    def image(self, index: int) -> WholeImage:
        coarse = np.random.rand(12, 12, 3).astype(np.float32)
        return WholeImage(np.kron(coarse, np.ones((12, 12, 1), np.float32)) * (index + 1) / 8)


@pytest.mark.parametrize("how", [STREAMED, "--patch-size 48 --patches-at-once 2"])
def test_a_dataset_that_draws_is_drawn_once(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """Each tile, and each patch, is of the same image, in training and validation: no thread reads it ahead."""
    common = f"{COMMON} --dataset tests.training.test_train_streaming:Varied --tiles 1x1"
    whole = "--patch-size 48 --patches-at-once 99" if "patch" in how else ""
    expected, found = (
        run_train(ranks, tmp_path / name, common, flags) for name, flags in zip("ab", (whole, how), strict=True)
    )
    was, now = ([each["loss"] for each in read_metrics(run)] for run in (expected, found))
    assert now == pytest.approx(was, rel=1e-5)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.exhaustive
def test_slides_by_every_plan(ranks: Ranks, slides: Path, expected: list[float], tmp_path: Path, plan: str) -> None:
    run = run_train(ranks, tmp_path / "run", COMMON, STREAMED, "--images", slides, plan)
    assert losses_of(run) == pytest.approx(expected, rel=1e-3)


@pytest.mark.exhaustive
def test_tiles_are_chosen_for_a_limit_of_memory(
    ranks: Ranks, slides: Path, expected: list[float], tmp_path: Path
) -> None:
    limit = "--stream auto --memory-limit 44MB --stream-until stage1_block1 --tiles 1x2"
    run = run_train(ranks, tmp_path / "run", COMMON, limit, "--images", slides)
    assert losses_of(run) == pytest.approx(expected, rel=1e-3)
    assert "--stream auto: " in (run / "log-rank0.txt").read_text()


IN_A_TILE = program(
    """
from mpi4dl.parallel.streaming.stream import Streaming

run_tile = Streaming._run_tile
saved = Path(sys.argv[sys.argv.index("--run-folder") + 1], "checkpoints", "step-00000002")
under_way = []

def fatal(self, tile, *arguments, **options):
    backward = "compare" not in options
    if under_way[-1].num_steps == 2 and under_way[-1].comm.rank == 1 and backward and tile % 3 == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return run_tile(self, tile, *arguments, **options)

Streaming._run_tile = fatal
""",
    """
while engine.num_steps == 2 and not saved.exists():
    time.sleep(0.01)
under_way.append(engine)
""",
)


@pytest.mark.parametrize("how", [STREAMED, PATCHES])
@pytest.mark.exhaustive
def test_a_run_killed_in_the_backward_pass_of_a_tile_goes_on_to_the_last_bit(
    ranks: Ranks, slides: Path, tmp_path: Path, how: str
) -> None:
    flags = words(COMMON, how, "--images", slides, "--tiles 1x2 --save-every 2 --resume auto")
    run_train(ranks, tmp_path / "whole", *flags)
    assert mpirun(2, "-c", IN_A_TILE, *flags, "--run-folder", str(tmp_path / "parts")).code != 0
    assert len(read_metrics(tmp_path / "parts")) == 2
    run_train(ranks, tmp_path / "parts", *flags)
    assert_the_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.exhaustive
def test_patches_by_every_plan(ranks: Ranks, slides: Path, tmp_path: Path) -> None:
    plans = ("", "--tiles 1x2 --stream-segments 3", "--tiles 1x2 --data 2 --aggregator gated-attention --zero 1")
    common = (COMMON, PATCHES, "--max-steps 2 --images", slides)
    runs = [run_train(ranks, tmp_path / str(number), *common, plan) for number, plan in enumerate(plans)]
    first, *others = map(losses_of, runs)
    assert others == [pytest.approx(first, rel=1e-3)] * 2


@pytest.mark.parametrize("how", ["--stream 2x2", "--patches 33", "--patches 33 --min-tissue 0.1"])
@pytest.mark.sample(1)
def test_an_image_that_breaks_in_the_middle_ends_the_run_on_all_ranks(
    ranks: Ranks, slides: Path, tmp_path: Path, how: str
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
    flags = words(COMMON, how, "--images", tmp_path / "slides", "--fit resize --tiles 1x2")
    said = ranks(2).run(refused, train, [*flags, "--run-folder", str(tmp_path / "run")])
    assert all(".tif" in each for each in said), said


def test_a_dry_run_shows_one_tile_of_patches_and_what_streaming_would_take(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = "--num-samples 8 --tiles 1x1 --dry-run --run-folder"
    train(world(), words(COMMON, "--patches 32 --min-tissue 0.1", more, tmp_path / "run"))
    out = capfd.readouterr().out
    assert "4 x 4 patches of 32 px in each image, those with at least 10 % of tissue: 16 at once on each rank" in out
    assert "--zero 0 (this plan)" in out
    train(world(), words(COMMON, STREAMED, more, tmp_path / "run"))
    assert "--zero 0 (this plan)" in capfd.readouterr().out
