"""mpi4dl.datasets.loader: the tiles of all ranks make up the batch that one process reads."""

import re
import threading
from itertools import count

import numpy as np
import PIL.Image
import pytest
import torch
from torch.nn import functional as F

from mpi4dl import datasets
from mpi4dl.datasets import Augmentation, BadImage, DatasetError, Loader, View
from mpi4dl.datasets.arrays import Synthetic
from mpi4dl.geometry import Box, GridShape, Interval
from tests.datasets.sharing import Share, owned

SIZE = (12, 10)
DATASET = Synthetic(11, (15, 13), num_classes=3)
VARIED = View(SIZE, augmentation=Augmentation(flip_rows=True, contrast=0.3, saturation=0.3), seed=4)
WHOLE = Share(Interval(0, SIZE[0]), Interval(0, SIZE[1]))


def contents(batches):
    return [(b.indices, b.labels.tolist(), [tile.numpy().tobytes() for tile in b.tiles], b.errors) for b in batches]


@pytest.mark.parametrize("grid", [GridShape(1, 2, 2), GridShape(2, 1, 1), GridShape(3, 2, 1), GridShape(5, 1, 3)])
def test_the_tiles_of_all_ranks_make_up_the_batch(grid):
    def loader(boxes_of):
        return Loader(DATASET, VARIED, 4, boxes_of, seed=1, shuffle=True)

    parts = [list(loader(owned(grid, SIZE, rank)).epoch(2)) for rank in range(grid.size)]
    for number, batch in enumerate(loader(WHOLE).epoch(2)):
        assert batch.tiles[0].dtype == torch.float32
        joined = torch.full_like(batch.tiles[0], torch.nan)
        for rank in range(grid.size):
            part, (box,) = parts[rank][number], owned(grid, SIZE, rank)(len(batch.indices))
            assert part.indices == batch.indices
            assert torch.equal(part.labels, batch.labels)
            where = [slice(*interval) for interval in box]
            joined[where[0], :, where[1], where[2]] = part.tiles[0]
        assert torch.equal(joined, batch.tiles[0])


def test_batches_hold_the_samples_that_they_name():
    for batch in Loader(DATASET, View(SIZE), 4, WHOLE, shuffle=True).epoch(0):
        for position, index in enumerate(batch.indices):
            expected = View(SIZE).tile(DATASET.image(index), WHOLE.rows, WHOLE.cols)
            assert np.array_equal(batch.tiles[0][position].numpy(), expected)
        assert batch.labels.dtype == torch.int64
        assert batch.labels.tolist() == [DATASET.label(index) for index in batch.indices]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 3]), (True, [4, 4])])
def test_the_last_batch_is_smaller_or_left_out(drop_last, sizes):
    loader = Loader(DATASET, View(SIZE), 4, WHOLE, drop_last=drop_last)
    assert len(loader) == len(sizes)
    assert [len(batch.indices) for batch in loader.epoch(0)] == sizes


def order(**options):
    epoch = options.pop("epoch", 0)
    return [index for batch in Loader(DATASET, View(SIZE), 4, WHOLE, **options).epoch(epoch) for index in batch.indices]


def test_shuffling_follows_seed_and_epoch():
    assert order() == list(range(11))
    assert sorted(order(shuffle=True)) == list(range(11))
    assert order(shuffle=True, seed=3, epoch=1) == order(shuffle=True, seed=3, epoch=1)
    orders = [order(shuffle=True, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(o) for o in orders}) == 4


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_number_of_workers_changes_nothing(num_workers):
    options = {"shuffle": True, "seed": 2}
    expected = contents(Loader(DATASET, VARIED, 2, WHOLE, **options).epoch(1))
    assert contents(Loader(DATASET, VARIED, 2, WHOLE, num_workers=num_workers, **options).epoch(1)) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_can_be_resumed(num_workers):
    loader = Loader(DATASET, VARIED, 2, WHOLE, shuffle=True, num_workers=num_workers)
    assert contents(loader.epoch(3, start=4)) == contents(loader.epoch(3))[4:]
    assert contents(loader.epoch(3, start=6)) == []
    with pytest.raises(ValueError, match="start=7: the epoch has 6 batches, so start must be in 0 to 6"):
        loader.epoch(3, start=7)


def test_a_rank_without_pixels_reads_nothing_and_sees_the_labels():
    class Unreadable(Synthetic):
        def image(self, index):
            raise AssertionError("read")

    nothing = Interval(0, 0)
    for boxes in ([], [Box(nothing, WHOLE.rows, WHOLE.cols)], [Box(Interval(0, 4), nothing, WHOLE.cols)]):
        batch = next(Loader(Unreadable(5, SIZE), View(SIZE), 4, lambda n, boxes=boxes: boxes).epoch(0))
        assert batch.labels.tolist() == [0, 1, 2, 3]
        assert [tile.numel() for tile in batch.tiles] == [0] * len(boxes)
        assert batch.errors == {}


@pytest.fixture
def folder(tmp_path):
    for name in ("a/0", "a/1", "b/2", "b/3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        PIL.Image.new("RGB", (20, 20), (int(name[-1]) + 1,) * 3).save(tmp_path / f"{name}.png")
    (tmp_path / "a/1.png").write_bytes(b"")
    damaged = tmp_path / "b/2.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    return datasets.sources.open_files(tmp_path)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_images_are_reported_and_zero(folder, num_workers):
    loader = Loader(folder, View(SIZE), 4, WHOLE, num_workers=num_workers, on_bad_image="report")
    (batch,) = loader.epoch(0)
    assert sorted(batch.errors) == [1, 2]
    assert batch.errors[1] == f"{folder.path(1)}: is empty (0 bytes)"
    assert batch.errors[2].startswith(f"{folder.path(2)}: cannot be decoded")
    assert [bool(batch.tiles[0][i].any()) for i in range(4)] == [True, False, False, True]
    assert batch.labels.tolist() == [0, 0, 1, 1]


def test_positions_of_errors_are_those_of_the_global_batch(folder):
    errors = []
    for way in range(2):
        (batch,) = Loader(folder, View(SIZE), 4, Share(WHOLE.rows, WHOLE.cols, way, 2), on_bad_image="report").epoch(0)
        assert batch.tiles[0].shape == (2, 3, *SIZE)
        errors.append(sorted(batch.errors))
    assert errors == [[1], [2]]


def test_a_lazy_batch_names_what_cannot_be_opened_and_reading_it_is_an_error(folder):
    (batch,) = Loader(folder, View(SIZE), 4, WHOLE, on_bad_image="report", lazy=True).epoch(0)
    assert list(batch.errors) == [1]
    assert (batch.tiles[0].shape, batch.tiles[0].dtype) == ((4, 3, *SIZE), torch.float32)
    for position in (1, 2):
        with pytest.raises(BadImage):
            batch.tiles[0][[position]].read(Box(Interval(0, 1), WHOLE.rows, WHOLE.cols))
    assert batch.tiles[0][[3]].read(Box(Interval(0, 1), WHOLE.rows, WHOLE.cols)).unique().numel() == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_images_are_errors_unless_the_loop_asks_for_reports(folder, num_workers):
    batches = Loader(folder, View(SIZE), 1, WHOLE, num_workers=num_workers).epoch(0)
    assert next(batches).errors == {}
    with pytest.raises(BadImage, match=re.escape(f"{folder.path(1)}: is empty (0 bytes)")):
        next(batches)


class Labelled:
    """Synthetic images, (12, 10) px, with other labels."""

    classes, channels = ("a", "b"), 3

    def __init__(self, labels):
        self.labels = labels
        self.image = Synthetic(len(labels), SIZE).image

    def __len__(self):
        return len(self.labels)

    def label(self, index):
        return self.labels[index]


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        ([0.7, 1.0], torch.float32),
        ([np.float64(0.7), np.float64(1)], torch.float64),
        ([1, 0.7], torch.float32),
        ([np.int32(3), np.int32(4)], torch.int64),
        ([True, False], torch.int64),
        ([[0.0, 1.0, 0.5], [1.0, 0.0, 0.0]], torch.float32),
        ([np.array([0.5, 1]), np.array([0, 2.5])], torch.float64),
        ([torch.tensor([0.5, 1]), torch.tensor([0, 2.5])], torch.float32),
        ([np.array([1, 0], np.uint8), np.array([1, 1], np.uint8)], torch.int64),
    ],
    ids=str,
)
def test_labels_keep_their_type(labels, dtype):
    (batch,) = Loader(Labelled(labels), View(SIZE), 2, WHOLE).epoch(0)
    assert batch.labels.dtype == dtype
    assert batch.labels.tolist() == pytest.approx(np.array([np.asarray(label) for label in labels]).astype(float))


def test_masks_of_floating_point_are_no_numbers_beyond_the_image():
    masks = [np.ones((2, *SIZE), np.float32)]
    (batch,) = Loader(Labelled(masks), View((13, 10), "crop"), 1, WHOLE).epoch(0)
    assert batch.labels.shape == (1, 2, 13, 10)
    assert batch.labels.isnan().sum() == 2 * 10
    targets = Labelled(masks)
    targets.task = "image"
    (batch,) = Loader(targets, View((13, 10), "crop"), 1, WHOLE).epoch(0)
    assert torch.equal(batch.labels, F.pad(torch.ones(1, 2, *SIZE), (0, 0, 0, 1)))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([np.zeros((3, 4))], "the label of sample 0 has shape (3, 4), but its image 12 x 10 pixels: labels of two or"),
        (["cat"], "the label of sample 0 is 'cat': expected a number, numbers, or a mask"),
        ([None], "the label of sample 0 is None: expected"),
        ([[1, 2], [1, 2, 3]], "labels of one batch have shapes (2,) (sample 0) and (3,) (sample 1)"),
    ],
    ids=str,
)
def test_labels_that_cannot_be(labels, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        next(Loader(Labelled(labels), View(SIZE), 2, WHOLE).epoch(0))


class Failing(Synthetic):
    def image(self, index):
        if index == 5:
            raise DatasetError("tifffile is not installed")
        return super().image(index)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_other_errors_surface_in_the_consumer(num_workers):
    batches = Loader(Failing(20, SIZE), View(SIZE), 2, WHOLE, num_workers=num_workers, prefetch=4).epoch(0)
    assert [next(batches).indices, next(batches).indices] == [(0, 1), (2, 3)]
    with pytest.raises(DatasetError, match="tifffile is not installed"):
        next(batches)


def test_other_errors_are_reported_as_a_problem_of_this_rank():
    batches = list(Loader(Failing(20, SIZE), View(SIZE), 2, WHOLE, on_bad_image="report").epoch(0))
    assert [batch.problem for batch in batches] == [None, None, "tifffile is not installed", *[None] * 7]
    assert all(batch.errors == {} for batch in batches)


def test_waiting_for_batches_is_measured(monkeypatch):
    monkeypatch.setattr("time.perf_counter", count().__next__)
    loader = Loader(DATASET, View(SIZE), 4, WHOLE)
    list(loader.epoch(0))
    assert loader.wait_seconds == 4  # for each batch, and for the end


def test_leaving_early_leaves_no_thread():
    for _ in Loader(DATASET, View(SIZE), 1, WHOLE, num_workers=3, prefetch=5).epoch(0):
        break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mpi4dl-reader")]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size=0, num_workers=0, prefetch=2: needs a batch_size and a prefetch of at least 1"),
        ({"num_workers": -1}, "num_workers=-1, prefetch=2: needs a batch_size and a prefetch of at least 1, and 0 or"),
        ({"prefetch": 0}, "prefetch=0: needs a batch_size"),
        ({"on_bad_image": "skip"}, "on_bad_image='skip': expected error or report"),
        (
            {"batch_size": 12, "drop_last": True},
            "11 images to train on do not fill one batch of 12: choose",
        ),
    ],
)
def test_loaders_that_cannot_be(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Loader(DATASET, View(SIZE), **{"batch_size": 4, "boxes_of": WHOLE, **wrong})


def test_bad_image_tells_the_path_and_survives_a_copy(tmp_path):
    import pickle

    error = pickle.loads(pickle.dumps(BadImage(tmp_path, "is empty")))
    assert (error.path, error.reason, str(error)) == (tmp_path, "is empty", f"{tmp_path}: is empty")
    assert isinstance(error, ValueError)
