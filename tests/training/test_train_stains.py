"""Slides with normalized stains and all augmentations: alike by any plan, after a resume, and in prediction."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from mpi4dl.datasets import DatasetError, Variation
from mpi4dl.datasets.slides.features import open_bag
from mpi4dl.datasets.slides.tissue import tissue_pixels
from mpi4dl.datasets.stains import METHODS, StainNormalization
from mpi4dl.embed import embed
from mpi4dl.geometry import Interval
from mpi4dl.options.config import ConfigError, parse
from mpi4dl.options.data import build_views
from mpi4dl.options.declare import with_values
from mpi4dl.options.sources import SlideSource, source_of, with_frame
from mpi4dl.predict import predict
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, run_train, said, words
from tests.support.interrupted import assert_the_same_run
from tests.support.tiny import TINY_RESNET

VARIED = (
    "--flip all --rotate quarter --rotate-degrees 15 --scale 0.9,1.1 --stain-jitter 0.1 --jitter 0.2 "
    "--augment RandomPosterize(bits=5),ColorJitter(hue=0.05) --stain-norm macenko"
)
COMMON = (
    f"--mpp 1 --model {TINY_RESNET} --num-workers 1 --val-fraction 0.34 --optimizer SGD "
    "--lr 0.0001 --lr-schedule constant --log-interval 1 --no-tensorboard --seed 3 --eval-every none --batch-size 1"
)
PATCHES = "--patches 64 --patches-at-once 32 --stream-norm running"

IN_PATCHES = "--mpp 2 --patches 32 --augment RandomPosterize(bits=5),GaussianBlur(3),RandomPerspective"


def flags_of(cohort: Path, folder: Path, more: str) -> list[str]:
    return words("--slides", cohort / "slides.csv", COMMON, VARIED, more, "--run-folder", folder)


MASKS = "--task segment --fit crop --image-size 64 --model unet --model-options num_filters=4,depth=3"


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        (f"{PATCHES} {IN_PATCHES}", "--tiles 1x2"),
        pytest.param(PATCHES, "--tiles 1x2", marks=pytest.mark.exhaustive),
        ("--mpp 2", "--tiles 1x2 --stream 2x2"),
        pytest.param("", "--tiles 1x2", marks=pytest.mark.exhaustive),
        pytest.param(MASKS, "--tiles 1x2 --stream 2x2", marks=pytest.mark.exhaustive),
    ],
)
def test_one_rank_and_two_see_the_same_varied_slides(
    ranks: Ranks, cohort: Path, tmp_path: Path, how: str, plan: str
) -> None:
    """Patches, and whole slides of their own sizes, which turn by quarters, also as streamed tiles."""
    one, two = (
        losses_of(run_train(ranks, folder, *flags_of(cohort, folder, f"{how} {more} --max-steps 2 --epochs 1")))
        for folder, more in ((tmp_path / "of1", ""), (tmp_path / "of2", plan))
    )
    assert len(one) == 2
    assert two == pytest.approx(one, rel=5e-4)


@pytest.fixture
def reference(cohort: Path, tmp_path: Path) -> Path:
    """A picture of a slide."""
    config = with_frame(parse(flags_of(cohort, tmp_path, f"{PATCHES} --stain-norm none")))
    slide = source_of(config).open_files().image(0)
    PIL.Image.fromarray(slide.read(*(Interval(0, side) for side in slide.size))).save(tmp_path / "reference.png")
    return tmp_path / "reference.png"


@pytest.mark.exhaustive
def test_a_resumed_run_draws_the_same(ranks: Ranks, cohort: Path, tmp_path: Path, reference: Path) -> None:
    more = f"{PATCHES} --epochs 1 --save-every 2 --resume auto --stain-reference {reference}"
    ranks(1).run(train, flags_of(cohort, tmp_path / "whole", more))
    ranks(1).run(train, flags_of(cohort, tmp_path / "parts", f"{more} --max-steps 2"))
    ranks(1).run(train, flags_of(cohort, tmp_path / "parts", more))
    assert_the_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("method", METHODS)
def test_any_box_of_a_slide_has_the_colours_of_the_reference(cohort: Path, tmp_path: Path, method: str) -> None:
    """Bit for bit, and the patches with tissue are those of the slide as it was scanned."""
    config = with_frame(parse(flags_of(cohort, tmp_path, f"{PATCHES} --rotate none --stain-norm {method}")))
    slides = source_of(config).open_files()
    scanned = source_of(with_values(config, {"stain_norm": "none"})).open_files()
    random = np.random.default_rng(0)
    for index in range(2):
        own, normalization = scanned.image(index), StainNormalization(method, METHODS[method][1])
        measured = normalization.measured(tissue_pixels(own))
        assert measured is not None
        pixels = own.read(*(Interval(0, side) for side in own.size))
        expected = normalization.recolour(measured)(pixels)
        assert not np.array_equal(expected, pixels)
        for _ in range(3):
            rows, cols = (Interval(*np.sort(random.integers(0, side + 1, 2)).tolist()) for side in own.size)
            assert np.array_equal(slides.image(index).read(rows, cols), expected[slice(*rows), slice(*cols)])
        assert np.array_equal(slides.tissue_patches(index, 64), scanned.tissue_patches(index, 64))
    training, validation = build_views(with_values(config, {"stain_jitter": 0.5}), 3, "pad")
    assert validation.variation(0, 0) == Variation()
    assert training.variation(0, 0).stains


def test_prediction_and_features_have_the_stains_of_training(
    ranks: Ranks, cohort: Path, tmp_path: Path, reference: Path
) -> None:
    """Without flags, also of a reference whose file is gone. A slide with too little tissue keeps its colours."""
    pytest.importorskip("h5py")
    flags = flags_of(cohort, tmp_path / "run", f"{PATCHES} --max-steps 1 --stain-reference {reference}")
    ranks(1).run(train, flags)
    stains = SlideSource(with_frame(parse(flags))).stains()
    assert stains is not None
    assert stains.reference != METHODS["macenko"][1]
    reference.rename(tmp_path / "slide.png")
    glass = np.full((200, 200, 3), 240, np.uint8)
    glass[96:104, 96:104] = 200, 120, 180
    PIL.Image.fromarray(glass).save(tmp_path / "glass.png")
    (tmp_path / "table.csv").write_text("slide,mpp\nslide.png,1\nglass.png,1\n")
    new, run = ("--slides", tmp_path / "table.csv", "--out"), tmp_path / "run"
    told = ranks(2).run(said, predict, words(run, *new, tmp_path / "out", "--no-maps"))
    assert "1 slide with too little stained tissue to normalize: glass.png" in told[0]
    encoder = f"--model {TINY_RESNET} --patches 64 --mpp 1 --weights {run}"
    ranks(1).run(said, embed, words(*new, tmp_path / "features", encoder))
    settings = open_bag(tmp_path / "features" / "slide.h5").settings
    assert (settings["stain_norm"], settings["stain_reference"]) == ("macenko", list(stains.reference))


WRONG_REFERENCES = {
    "--stain-reference 1,2": "8 numbers with commas between them for stain-norm macenko",
    "--stain-reference nowhere.png": "no such file",
    "--stain-reference {glass}": "too little stained tissue",
}


@pytest.mark.parametrize("flags", WRONG_REFERENCES)
def test_what_references_are_refused(cohort: Path, tmp_path: Path, flags: str) -> None:
    PIL.Image.fromarray(np.full((200, 200, 3), 240, np.uint8)).save(tmp_path / "glass.png")
    more = f"{PATCHES} {flags.format(glass=tmp_path / 'glass.png')}"
    with pytest.raises((DatasetError, ConfigError), match="stain_reference") as raised:
        with_frame(parse(flags_of(cohort, tmp_path / "run", more)))
    assert WRONG_REFERENCES[flags] in str(raised.value).replace("`", "").replace("_", "-")
