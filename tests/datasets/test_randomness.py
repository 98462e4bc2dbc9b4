"""mpi4dl.datasets.randomness: what a user's dataset draws is alike on all ranks, or is refused."""

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpi4dl
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Augmentation, DatasetError, Loader, View, adapt
from mpi4dl.datasets.arrays import Synthetic
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.loader import repeats
from mpi4dl.datasets.randomness import DatasetRandomness
from mpi4dl.datasets.split import split
from mpi4dl.datasets.transform import Pointwise
from mpi4dl.geometry import Box, GridShape, Interval
from mpi4dl.training.data import _each
from mpi4dl.training.input_pipeline import BadImages
from tests.datasets.sharing import owned
from tests.pool.ranks import Ranks

SIZE, COUNT = (12, 10), 6
SOMEWHERE = np.random.default_rng(7)  # a generator among the globals of a user's file


def global_generator() -> float:
    return float(SOMEWHERE.random())


def torch_generator() -> Callable[[], float]:
    own = torch.Generator()
    own.seed()
    return lambda: torch.rand((), generator=own).item()


SOURCES: dict[str, Callable[[], Callable[[], float]]] = {
    "torch": lambda: lambda: torch.rand(()).item(),
    "numpy": lambda: np.random.rand,
    "python": lambda: random.random,
    "own Generator": lambda: np.random.default_rng().random,
    "own RandomState": lambda: np.random.RandomState().rand,
    "own Random": lambda: random.Random().random,
    "own torch.Generator": lambda: torch_generator(),
    "a global of the file": lambda: global_generator,
}


class Erased:
    """Erases a random box of some images, as torchvision's RandomErasing does, and has a random label."""

    def __init__(self, source: str, probability: float = 0.7) -> None:
        self.draw, self.probability = SOURCES[source](), probability

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.full((3, *SIZE), 0.1 * index + 0.1)
        if self.draw() < self.probability:
            top, left = int(self.draw() * 8), int(self.draw() * 7)
            image[:, top : top + 4, left : left + 3] = 1.0
        return image, torch.tensor(self.draw())


class Patchwise(Erased):
    """The same, read box by box."""

    channels, classes = 3, ()

    def label(self, index: int) -> float:
        return self.draw()

    def image(self, index: int) -> WholeImage:
        return WholeImage(self[index][0].permute(1, 2, 0).numpy())


def batches(dataset: Any, grid: GridShape, rank: int, epoch: int, start: int = 0, **options: Any) -> list[Any]:
    view = View(SIZE, augmentation=Augmentation(), seed=3, mean=(0.0,) * 3, std=(1.0,) * 3)
    return list(Loader(dataset, view, 2, owned(grid, SIZE, rank), seed=1, shuffle=True, **options).epoch(epoch, start))


def states() -> list[Any]:
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


@pytest.mark.parametrize(
    ("source", "kind"), [*((source, Erased) for source in SOURCES), ("numpy", Patchwise), ("own Generator", Patchwise)]
)
@pytest.mark.sample(5)
def test_what_a_dataset_draws_is_alike_on_all_ranks(source: str, kind: type[Erased]) -> None:
    """Each rank makes the dataset for itself, and asks for other boxes, from another batch on."""
    grid, whole = GridShape(1, 2, 2), GridShape(1, 1, 1)
    dataset = adapt(kind(source))
    assert dataset.draws
    assert f"{kind.__name__} draws random numbers" in dataset.remarks[-1]
    plain = batches(dataset, whole, 0, 2)
    for rank in range(4):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        own = states()
        for number, batch in enumerate(batches(adapt(kind(source)), grid, rank, 2, start=rank % 2, num_workers=2)):
            expected = plain[number + rank % 2]
            (box,) = owned(grid, SIZE, rank)(2)
            part = expected.tiles[0][(slice(None), slice(None), *(slice(*each) for each in box.space))]
            assert torch.equal(batch.tiles[0], part)
            assert torch.equal(batch.labels, expected.labels)
        assert states() == own  # the model's numbers are no others
    other = batches(dataset, whole, 0, 3)
    assert {*torch.cat([b.labels for b in plain]).tolist()}.isdisjoint(torch.cat([b.labels for b in other]).tolist())


class Randomizable:
    """Keeps a generator in its class until it is given one, as MONAI's transforms do."""

    R = np.random.RandomState()


def test_generators_are_found_wherever_the_code_keeps_them() -> None:
    """In an own place each, so that no two of them draw the same numbers."""
    inner = np.random.default_rng(0)
    kept = {"list": [random.Random(0)], "bound": np.random.RandomState(0).rand, "closure": lambda: inner.random()}
    bits = np.random.PCG64()
    found = DatasetRandomness(kept, random.SystemRandom(), Randomizable(), global_generator, (bits,))
    own = [generator for _, generator in found.generators[3:]]
    assert {id(each) for each in own} > {id(inner), id(Randomizable.R), id(SOMEWHERE), id(bits)}
    assert len(own) == 6
    with found.seeded(1) as drawn:
        numbers = [kept["bound"](), Randomizable.R.rand(), inner.random()]  # type: ignore[operator]
    assert sorted(drawn) == ["a Generator of its own", "a RandomState of its own", "a RandomState of its own"]
    with found.seeded(1):
        assert numbers == [kept["bound"](), Randomizable.R.rand(), inner.random()]  # type: ignore[operator]
    assert len({*numbers}) == 3


class Leaky(Erased):
    """Draws by chance from where nobody can give it a state, or of a sample that nobody looks at before training."""

    def __init__(self) -> None:
        super().__init__("numpy")

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.full((3, *SIZE), 0.5)
        if index == 1:
            image[:, 5] = int.from_bytes(os.urandom(3), "little") / 2**24
        return image, torch.tensor(index % 2)


class Labels(Leaky):
    """Whose labels differ."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = super().__getitem__(index)
        return image * 0, torch.tensor([label.item(), image[0, 5, 0] if index == 1 else 0.0])


def compared(comm: Communicator, kind: type[Any], grid: GridShape, workers: int) -> list[str]:
    """What comes of each batch of an epoch, whose boxes the ranks share."""
    dataset, told = adapt(kind()), []
    for batch in batches(dataset, grid, comm.rank, 0, num_workers=workers, on_bad_image="report"):
        try:
            BadImages(comm, "error").require_alike(batch)
            told.append("" if 1 not in batch.indices else "1")
        except Refusal as refusal:
            told.append(str(refusal))
    return told


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "grid"), [(Leaky, GridShape(1, 2, 1)), (Labels, GridShape(2, 1, 1))])
def test_samples_that_ranks_have_otherwise_are_refused_before_they_train(
    ranks: Ranks, kind: type[Any], grid: GridShape, workers: int
) -> None:
    first, second = ranks(2).run(compared, kind, grid, workers)
    assert first == second
    (refused,) = [each for each in first if each]
    assert "the dataset gives sample 1 otherwise on some ranks than on others" in refused


class OtherLabels(Synthetic):
    """Whose labels differ from rank to rank, of samples that are not looked at before the split."""

    def __init__(self, rank: int) -> None:
        super().__init__(10, SIZE, 2)
        self.rank = rank

    def label(self, index: int) -> int:
        return int(index in (1, 2, 3)) if self.rank == 0 else int(index in (6, 7, 8))


def chosen(comm: Communicator) -> str:
    with pytest.raises(Refusal) as refused:
        _each(comm, lambda: split(adapt(OtherLabels(comm.rank)), 0.3))
    return str(refused.value)


def test_ranks_that_split_otherwise_are_refused(ranks: Ranks) -> None:
    assert all("the choice of training samples" in told for told in ranks(2).run(chosen))


class Pooled(nn.Module):
    """A number for each image."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x).tanh().mean((2, 3)))
        return found


def trained(comm: Communicator, source: str, folder: Path, **plan: Any) -> float:
    """The validation loss after two epochs on what draws; the processes have other generators."""
    SOMEWHERE.random(comm.rank)
    given: dict[str, Any] = {
        "model": Pooled,
        "dataset": (Erased(source), Erased(source)),
        "image_size": SIZE,
        "lr": 0.1,
        "optimizer": "SGD",
        "lr_schedule": "constant",
    }
    given |= {"batch_size": 2, "epochs": 2, "tensorboard": False, "save_every": "none", "run_folder": str(folder)}
    evaluation = mpi4dl.Trainer(comm=comm, **given, **plan).fit()
    assert evaluation is not None
    return evaluation.loss


@pytest.mark.parametrize("source", ["torch", "own Generator"])
def test_training_on_tiles_of_what_draws_is_that_of_one_process(ranks: Ranks, tmp_path: Path, source: str) -> None:
    (alone,) = ranks(1).run(partial(trained, source=source, folder=tmp_path / "1"))
    spread = ranks(4).run(partial(trained, source=source, folder=tmp_path / "4", tiles="2x2"))
    assert spread == pytest.approx([alone] * 4, rel=1e-5)


def test_boxes_with_numbers_of_their_own_are_refused() -> None:
    class Noisy(Patchwise):
        def image(self, index: int) -> Any:
            image = super().image(index)
            plain = image.read
            image.read = lambda *space: plain(*space) + np.random.rand(*(each.length for each in space), 3)  # type: ignore[method-assign]
            return image

    with pytest.raises(DatasetError, match=r"draws other random numbers \(NumPy.*\) for a box than for a part of it"):
        batches(adapt(Noisy("numpy")), GridShape(1, 1, 1), 0, 0)


def test_what_has_no_state_is_refused_at_the_start() -> None:
    class Entropy(Erased):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((3, *SIZE), os.urandom(1)[0] / 255), torch.tensor(int.from_bytes(os.urandom(4), "little"))

    with pytest.raises(DatasetError, match="gives another image or label of one sample each time"):
        adapt(Entropy("numpy"))


def test_a_split_of_what_draws_is_read_in_the_main_thread() -> None:
    training, validation = split(adapt(Erased("python")), 0.3)
    assert training.draws
    assert validation.compared
    assert not split(Synthetic(8, SIZE), 0.3)[0].draws


@pytest.mark.parametrize("lazy", [False, True])
def test_a_sample_that_is_repeated_is_varied_anew(lazy: bool) -> None:
    """By `balanced` a rare class comes again: on all ranks as it is on one."""

    class Rare(Synthetic):
        def label(self, index: int) -> int:
            return int(index == 0)

    dataset, view = Rare(10, (15, 13), 2), View(SIZE, augmentation=Augmentation(crop=0.5, brightness=0.5), seed=4)

    def loader(grid: GridShape, rank: int) -> Loader:
        boxes = owned(grid, SIZE, rank)
        return Loader(dataset, view, 5, boxes, seed=1, shuffle=True, sampling="balanced", lazy=lazy, num_workers=2)

    seen, number = [], 0
    for whole, part in zip(loader(GridShape(1, 1, 1), 0).epoch(1), loader(GridShape(1, 1, 2), 1).epoch(1), strict=True):
        (tile,), (right,) = whole.tiles, part.tiles
        if lazy:
            half = Box(Interval(0, 5), Interval(0, 12), Interval(5, 10))
            tile, right = tile.read(Box(Interval(0, 5), Interval(0, 12), Interval(0, 10))), right[range(5)].read(half)
        assert torch.equal(right, tile[..., 5:])
        seen += [image for image, index in zip(tile, whole.indices, strict=True) if index == 0]
        number += whole.indices.count(0)
    assert len(seen) == number == 5
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert repeats([3, 1, 3, 3]) == [0, 0, 1, 2]
    assert view.variation(0, 1, 0) == view.variation(0, 1)  # as before in runs that go on


def blurred(pixels: Any) -> Any:
    return ((pixels.astype(np.float32) + np.roll(pixels, 1, 0)) / 2).astype(pixels.dtype)


def sometimes(draw: Callable[[], float]) -> Callable[[Any], Any]:
    return lambda pixels: blurred(pixels) if draw() < 0.001 else pixels


def transformed(transform: Pointwise, pixels: Any, wrong: list[int]) -> None:
    """The same pixels as those of many samples; `wrong` are the samples of which something else was made."""
    for number in range(300):
        if not np.array_equal(transform(pixels.copy(), (0, 0, number)), pixels):
            wrong.append(number)


def test_transforms_that_act_now_and_then_are_found() -> None:
    """At the start by what they draw from, and where that has no state, or is the right one, when they act."""
    for draw in (random.random, np.random.rand, SOURCES["own Generator"](), SOURCES["torch"]()):
        with pytest.raises(DatasetError, match="give it a second argument, `random`"):
            Pointwise(sometimes(draw)).check(2, 3)

    def entropy(pixels: Any) -> Any:
        return blurred(pixels) if os.urandom(1)[0] < 40 else pixels

    def given(pixels: Any, random: Any) -> Any:
        return pixels if random is None or random.random() > 0.1 else blurred(pixels)

    def erased(pixels: Any, random: Any) -> Any:
        if random is not None and random.random() < 0.1:
            place = random.integers(pixels.shape[0])
            pixels = pixels.copy()
            pixels[place:] = 0
        return pixels

    pixels = np.random.default_rng(0).integers(0, 256, (30, 20, 3), np.uint8)
    for function in (entropy, given, erased):
        wrong: list[int] = []
        with pytest.raises(DatasetError, match="what it makes of a pixel must follow from this pixel alone"):
            transformed(Pointwise(function), pixels, wrong)
        assert wrong == []
