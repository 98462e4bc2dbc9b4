"""Pen marks and regions out of focus: found where they were drawn, nowhere on clean slides, and left out by option."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import scipy.ndimage
import skimage.data
import skimage.draw

from mpi4dl.comm import Communicator
from mpi4dl.datasets.base import Pixels, WholeImage
from mpi4dl.datasets.slides.artifacts import COLOURS, FOCUS_PX, laplacian_variances, pen_marks
from mpi4dl.datasets.slides.compose import Composition, composition
from mpi4dl.datasets.slides.dataset import SlideFolder, SlideOptions
from mpi4dl.datasets.slides.slide import Level, Resolution, Slide, SlideFile, open_slide
from mpi4dl.datasets.slides.tissue import find_tissue
from mpi4dl.embed import embed
from mpi4dl.geometry import Interval
from mpi4dl.predict import predict
from mpi4dl.train import train
from tests.datasets.boxes import contains
from tests.pool.ranks import Ranks, RanksFailed
from tests.support.tiny import TINY_RESNET

MPP = 0.5
BOTH = ("pen", "blur")
INKS = {
    "blue": (40, 60, 180), "pale blue": (70, 130, 200), "green": (40, 130, 70), "dark green": (10, 70, 50),
    "red": (200, 25, 35), "black": (35, 35, 38),
}  # fmt: skip


def slide_of(pixels: Pixels, mpp: float = MPP) -> Slide:
    return Slide(SlideFile(Path("x"), (Level(WholeImage(pixels), 1.0),), mpp))


def whole(slide: Composition) -> Pixels:
    return slide.pixels(*(slice(0, side) for side in slide.size))


@pytest.fixture(scope="module")
def clean() -> Pixels:
    return whole(composition(11, 2048, MPP, True, 0.004))


def stroke_of(pixels: Pixels) -> npt.NDArray[np.bool_]:
    """A stroke of a pen across tissue and glass."""
    found = np.zeros(pixels.shape[:2], bool)
    for step in range(0, 800, 5):
        found[skimage.draw.disk((1000, 500 + step), 60)] = True
    return found


def inked(pixels: Pixels, stroke: npt.NDArray[np.bool_], ink: tuple[int, int, int]) -> Pixels:
    """Light passes through the ink and what is below it, so that their transmittances are multiplied."""
    through = np.rint(pixels * (np.array(ink) / 255)).astype(np.uint8)
    return np.where(stroke[..., None], through, pixels)


def at_pixels_of(mask: npt.NDArray[np.bool_], found: Any) -> npt.NDArray[np.bool_]:
    """A mask of level 0 at the middles of the pixels of a mask of tissue."""
    places = [((np.arange(side) + 0.5) * found.scale[0]).astype(int) for side in found.mask.shape]
    return mask[np.ix_(*(np.minimum(at, side - 1) for at, side in zip(places, mask.shape, strict=True)))]


@pytest.mark.parametrize(
    ("seed", "size", "mpp"),
    [(3, 1024, 1.0), (5, 1500, 2.0), pytest.param(4, 4096, 0.25, marks=pytest.mark.exhaustive), (6, 1024, 4.0)],
)
def test_nothing_of_clean_slides_is_left_out(seed: int, size: int, mpp: float) -> None:
    slide = slide_of(whole(composition(seed, size, mpp, True, 0.005)), mpp)
    found = find_tissue(slide, None, BOTH)
    assert not any(mask.any() for mask in found.left_out.values())
    assert np.array_equal(found.mask, find_tissue(slide).mask)


def test_nothing_of_real_tissue_is_left_out() -> None:
    """Of colon in focus (scikit-image's sample), and of hematoxylin and eosin in any amounts (Beer and Lambert)."""
    picture = skimage.data.immunohistochemistry()
    for mpp in (0.25, 0.5, 1.0):
        assert not any(mask.any() for mask in find_tissue(slide_of(picture, mpp), None, BOTH).left_out.values())
    amounts = np.stack(np.meshgrid(np.linspace(0, 2, 128), np.linspace(0, 2, 128)), axis=2)
    for stains in ([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11]], [[0.5626, 0.7201, 0.4062], [0.2159, 0.8012, 0.5581]]):
        assert not pen_marks(np.rint(255 * 10 ** -(amounts @ np.array(stains))).astype(np.uint8)).any()


@pytest.mark.parametrize("ink", INKS)
def test_pen_marks_are_found_over_tissue_and_glass(clean: Pixels, ink: str) -> None:
    stroke = stroke_of(clean)
    found = find_tissue(slide_of(inked(clean, stroke, INKS[ink])), None, ("pen",))
    drawn, marked = at_pixels_of(stroke, found), found.left_out["pen"]
    assert (marked & drawn).sum() > 0.97 * drawn.sum()
    assert not (marked & ~scipy.ndimage.binary_dilation(drawn, iterations=6)).any()
    assert not (found.mask & drawn).sum() > 0.03 * drawn.sum()
    usual = find_tissue(slide_of(clean)).mask & ~drawn
    assert (found.mask & usual).sum() > 0.95 * usual.sum()


def test_variances_are_those_of_plain_convolution() -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (FOCUS_PX, 2 * FOCUS_PX, 3), np.uint8)
    grey = np.asarray(PIL.Image.fromarray(pixels).convert("L")).astype(float)
    for number, variance in enumerate(laplacian_variances(pixels)[0]):
        cell = grey[:, number * FOCUS_PX :][:, :FOCUS_PX]
        assert variance == pytest.approx(scipy.ndimage.laplace(cell)[1:-1, 1:-1].var())


@pytest.mark.parametrize("sigma_um", [2.0, 4.0])
def test_regions_out_of_focus_are_found(clean: Pixels, sigma_um: float) -> None:
    """The left part of a slide is blurred; a cell at its border may be either."""
    border = 900
    pixels = clean.copy()
    pixels[:, :border] = scipy.ndimage.gaussian_filter(clean.astype(np.float32), (sigma_um / MPP,) * 2 + (0,))[
        :, :border
    ]
    found = find_tissue(slide_of(pixels), None, BOTH)
    usual, cell = find_tissue(slide_of(clean)).mask, FOCUS_PX / MPP
    inside, outside = (int((border + add) / found.scale[0]) for add in (-cell, cell))
    blurred = found.left_out["blur"]
    assert blurred[:, :inside].sum() > 0.95 * usual[:, :inside].sum()
    assert not blurred[:, outside:].any()
    assert not found.left_out["pen"].any()
    assert not (found.mask & blurred).any()


@pytest.fixture(scope="module")
def marked(clean: Pixels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two slides: one with a stroke of a pen, and one that is blurred on the left."""
    folder = tmp_path_factory.mktemp("marked")
    PIL.Image.fromarray(inked(clean, stroke_of(clean), INKS["blue"])).save(folder / "inked.png")
    blurred = scipy.ndimage.gaussian_filter(clean.astype(np.float32), (8, 8, 0)).astype(np.uint8)
    blurred[:, 900:] = clean[:, 900:]
    PIL.Image.fromarray(blurred).save(folder / "blurred.png")
    return folder


def command(comm: Communicator, *argv: str) -> None:
    from mpi4dl.slides import slides

    slides(comm, argv)


def test_one_rank_and_two_show_what_is_left_out(ranks: Ranks, marked: Path, tmp_path: Path) -> None:
    """In PNG with a colour for each kind, and in GeoJSON with its class."""
    argv = ("tissue", str(marked), "--assume-mpp", str(MPP), "--leave-out", "pen,blur", "--out")
    for count in (1, 2):
        ranks(count).run(command, *argv, str(tmp_path / str(count)))
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(names) == 4
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes() for name in names)
    kinds = []
    for name, kind, place in (("inked", "Pen mark", (1000, 800)), ("blurred", "Out of focus", (1000, 700))):
        features = json.loads((tmp_path / "1" / f"{name}.png.geojson").read_text())["features"]
        classes = {each["properties"]["classification"]["name"] for each in features}
        assert classes == {"Tissue", kind}
        of_kind = [each for each in features if each["properties"]["classification"]["name"] == kind]
        assert contains(of_kind, *place)
        slide = open_slide(marked / f"{name}.png", Resolution(assumed_mpp=MPP))
        found = find_tissue(slide, None, BOTH)
        [(key, mask)] = ((key, mask) for key, mask in found.left_out.items() if mask.any())
        view = slide.thumbnail(max(mask.shape))
        plain = view.read(*(Interval(0, side) for side in view.size)).astype(float)
        with PIL.Image.open(tmp_path / "1" / f"{name}.png.png") as picture:
            nearer = np.abs(np.asarray(picture) - COLOURS[key]).sum(2) < np.abs(plain - COLOURS[key]).sum(2)
        assert nearer[mask].all()
        kinds.append(key)
    assert sorted(kinds) == sorted(BOTH)
    with pytest.raises(RanksFailed, match="--leave-out is 'pen,folds', but must be some of pen, blur"):
        ranks(2).run(command, *argv[:4], "--leave-out", "pen,folds")


def test_patches_and_whole_slides_leave_it_out(marked: Path, clean: Pixels) -> None:
    """A patch is left out if more of it is ink than tissue; whole slides are white there."""
    patch, stroke = 64, stroke_of(clean)
    folders = [
        SlideFolder(marked, SlideOptions(Resolution(assumed_mpp=MPP), white_background=True, leave_out=leave_out))
        for leave_out in ((), ("pen",))
    ]
    index = next(i for i in range(2) if folders[0].name(i) == "inked.png")
    usual, fewer = ({*map(tuple, each.tissue_patches(index, patch).tolist())} for each in folders)
    assert fewer < usual
    near = scipy.ndimage.binary_dilation(stroke, iterations=24)
    for row, col in usual:
        ink, about = (mask[row * patch :, col * patch :][:patch, :patch] for mask in (stroke, near))
        assert (row, col) not in fewer if ink.mean() > 0.6 else about.any() or (row, col) in fewer
    shown = [each.image(index).read(*(Interval(0, side) for side in clean.shape[:2])) for each in folders]
    middle = scipy.ndimage.binary_erosion(stroke, iterations=32)
    assert (shown[0][middle] < 250).any()
    assert (shown[1][middle] == 255).all()


def test_features_are_those_of_what_is_left(ranks: Ranks, marked: Path, tmp_path: Path) -> None:
    """By embed; files of other settings are not taken for these."""
    import h5py

    argv = ["--slides", str(marked), "--assume-mpp", str(MPP), "--patches", "64", "--model", TINY_RESNET]
    argv += ["--weights", "none", "--num-workers", "1", "--out", str(tmp_path)]
    ranks(1).run(embed, [*argv, "--leave-out", "pen"])
    slides = SlideFolder(marked, SlideOptions(Resolution(assumed_mpp=MPP), leave_out=("pen",)))
    for index in range(2):
        with h5py.File(tmp_path / Path(slides.name(index)).with_suffix(".h5")) as file:
            assert len(file["coords"]) == len(slides.tissue_patches(index, 64))
    with pytest.raises(RanksFailed, match="leave_out"):
        ranks(1).run(embed, argv)


def test_prediction_leaves_out_as_training_did(ranks: Ranks, marked: Path, tmp_path: Path) -> None:
    (tmp_path / "slides.csv").write_text("slide,label,split\ninked.png,a,train\nblurred.png,b,val\n")
    flags = ["--slides", str(tmp_path / "slides.csv"), "--slides-folder", str(marked), "--assume-mpp", str(MPP)]
    encoder = f"--model {TINY_RESNET} --patches 128 --leave-out blur".split()
    run = "--no-tensorboard --max-steps 1 --batch-size 1 --eval-every none --run-folder".split()
    ranks(1).run(train, [*flags, *encoder, *run, str(tmp_path / "run")])
    ranks(1).run(predict, [str(tmp_path / "run"), "--slides", str(marked), "--out", str(tmp_path / "out")])
    slides = SlideFolder(marked, SlideOptions(Resolution(assumed_mpp=MPP), leave_out=("blur",)))
    for index in range(2):
        (path,) = (tmp_path / "out" / "maps").glob(f"{Path(slides.name(index)).stem}*.geojson")
        tiles = json.loads(path.read_text())["features"]
        assert len(tiles) == len(slides.tissue_patches(index, 128))
