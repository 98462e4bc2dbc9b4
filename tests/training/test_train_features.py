"""Frozen features: what plain PyTorch makes of the patches of slides, and learns of bags, by any number of ranks."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import mpi4dl
from mpi4dl._files import lock
from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.base import BadImage
from mpi4dl.datasets.slides.dataset import SlideOptions
from mpi4dl.datasets.slides.features import FeatureFolder, open_bag
from mpi4dl.embed import embed
from mpi4dl.evaluate import evaluate
from mpi4dl.inference.embedding import Embedding, Encoder
from mpi4dl.models.patches import PatchModel, headless
from mpi4dl.options.config import parse
from mpi4dl.options.models import build_model
from mpi4dl.options.sources import source_of, with_frame
from mpi4dl.predict import predict
from mpi4dl.runs import stopping
from mpi4dl.train import train
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks, RanksFailed, on_ranks
from tests.support.commands import losses_of, plain_steps, read_lines, read_rows, refused, run_train, said, words
from tests.support.short_runs import write_mixed_cohort
from tests.support.tiny import TINY_RESNET, tiny_resnet
from tests.training.test_train_slides import MPP, PATCH, in_turn, patches_of

WIDTH = 6  # features of a patch, of the files that tests write
ATTRIBUTES = ("patch_size", "patch_size_level0", "patch_level", "level0_magnification", "target_magnification")
ATTRIBUTES += ("overlap", "level0_width", "level0_height", "name")
TRAINING = (
    "--batch-size 2 --num-workers 1 --val-fraction 0.34 --optimizer SGD --lr 0.05 --lr-schedule constant --epochs 2 "
    "--log-interval 1 --no-tensorboard --seed 3"
)


# Features of slides.


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides of several sizes, in three formats, of two magnifications, and the weights of an encoder."""
    folder = write_mixed_cohort(tmp_path_factory.mktemp("cohort"), 3, 600)
    torch.manual_seed(2)
    torch.save(tiny_resnet(9).state_dict(), folder / "weights.pt")
    return folder


def embedding(cohort: Path, out: Path, more: str = "") -> list[str]:
    flags = f"--mpp {MPP} --patches {PATCH} --patches-at-once 3 --model {TINY_RESNET} --model-options num_filters=4"
    return words("--slides", cohort / "slides.csv", "--weights", cohort / "weights.pt", "--out", out, flags, more)


def read(path: Path) -> tuple[Any, Any, dict[str, Any]]:
    """A file as its documented format says."""
    with h5py.File(path) as file:
        return file["features"][:], file["coords"][:], dict(file["coords"].attrs)


def test_files_have_the_features_of_the_plain_encoder_by_any_number_of_ranks(
    ranks: Ranks, cohort: Path, tmp_path: Path
) -> None:
    for count in (1, 2):
        ranks(count).run(embed, embedding(cohort, tmp_path / f"of{count}"))
    encoder = tiny_resnet(9)
    encoder.load_state_dict(torch.load(cohort / "weights.pt", weights_only=True))
    headless(encoder.eval(), 9)
    asked = words("--slides", cohort / "slides.csv", "--mpp", MPP, "--patches", PATCH)
    slides = source_of(with_frame(parse(asked))).open_files(labelled=False)
    for index in range(len(slides)):
        slide, name = slides.image(index), slides.name(index).removesuffix(".tif").removesuffix(".svs")
        features, coords, about = read(tmp_path / "of1" / f"{name}.h5")
        assert features.dtype == np.float32
        assert coords.dtype == np.int64
        with torch.no_grad():
            expected = encoder(patches_of(slides, index)).flatten(1).numpy()
        assert features == pytest.approx(expected, abs=1e-5)
        side = PATCH * slide.downsample
        places = slides.tissue_patches(index, PATCH)
        assert coords.tolist() == (places[:, ::-1] * side).tolist()
        assert {*ATTRIBUTES} < {*about}
        known = [about[name] for name in ("patch_size", "patch_size_level0", "level0_width", "level0_height", "name")]
        assert known == [PATCH, side, slide.file.size[1], slide.file.size[0], name]
        assert (about["level0_magnification"], about["target_magnification"]) == (20 * slide.downsample, 20)
        again, same, _ = read(tmp_path / "of2" / f"{name}.h5")
        assert again == pytest.approx(features, abs=1e-6)
        assert np.array_equal(same, coords)


def test_the_encoder_of_a_run_sees_patches_as_the_run_did(ranks: Ranks, cohort: Path, tmp_path: Path) -> None:
    """The aggregator of the run makes of the features what the whole model makes of the slides."""
    common = (
        f"--slides {cohort / 'slides.csv'} --mpp {MPP} --patches {PATCH} --model {TINY_RESNET} "
        "--model-options num_filters=4 --aggregator mean --mean 0.7 --std 0.2 --val-fraction 0.34 --batch-size 1 "
        "--max-steps 1 --no-tensorboard"
    )
    run, out = run_train(ranks, tmp_path / "run", common), tmp_path / "predicted"
    ranks(2).run(said, predict, words(run, "--slides", cohort / "slides.csv", "--out", out, "--no-maps"))
    ranks(2).run(embed, embedding(cohort, tmp_path / "features", f"--weights {run}"))
    weights = load_file(run / "model.safetensors")
    for line in read_lines(out / "predictions.jsonl"):
        name = line["image"].removesuffix(".tif").removesuffix(".svs")
        features = torch.from_numpy(read(tmp_path / "features" / f"{name}.h5")[0]).mean(0)
        logits = features @ weights["aggregator.head.weight"].T + weights["aggregator.head.bias"]
        assert [*line["probabilities"].values()] == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
    other = embedding(cohort, tmp_path / "other", f"--weights {run} --model-options num_filters=8")
    with pytest.raises(RanksFailed, match=r"trained .*tiny_resnet with .*num_filters=4: use these"):
        ranks(2).run(embed, other)


def test_embedding_goes_on_where_it_ended_with_the_slides_that_there_are(
    ranks: Ranks, cohort: Path, tmp_path: Path
) -> None:
    """A damaged slide ends nothing, and finished files stay; other pixels and microns per pixel are embedded."""
    slides, out = Path(shutil.copytree(cohort, tmp_path / "slides")), tmp_path / "out"
    place, damaged, other = (slides / f"slide_00{name}" for name in ("0.tif", "1.ome.tif", "2.svs"))
    size = max(path.stat().st_size for path in (place, other))
    place.write_bytes(place.read_bytes().ljust(size, b"\0"))
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    for found in ranks(2).run(refused, embed, embedding(slides, out, "--dry-run")):
        assert "1 slide of 3" in found
    assert not out.exists()

    def embedded(act: Callable[..., Any], *arguments: Any) -> set[str]:
        """The files that are written now, or anew."""
        before = {path: path.stat().st_mtime_ns for path in out.glob("*.h5")}
        ranks(2).run(act, *arguments)
        return {path.name for path in out.glob("*.h5") if path.stat().st_mtime_ns != before.get(path)}

    argv = embedding(slides, out)
    assert embedded(refused, embed, argv) == {"slide_000.h5", "slide_002.h5"}
    shutil.copy(cohort / damaged.name, damaged)
    assert embedded(embed, argv) == {"slide_001.ome.h5"}
    first, then = [read(out / f"slide_{name}.h5")[0] for name in ("000", "002")], place.stat()
    place.write_bytes(other.read_bytes().ljust(size, b"\0"))  # as many bytes, with the same times
    os.utime(place, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert embedded(embed, argv) == {"slide_000.h5"}
    assert np.array_equal(read(out / "slide_000.h5")[0], first[1])
    assert not np.array_equal(*first)
    table = (slides / "slides.csv").read_text().splitlines()
    rows = [f"{line},{'mpp' if not number else 0.3 if '002' in line else ''}" for number, line in enumerate(table)]
    (slides / "slides.csv").write_text("\n".join(rows))
    assert embedded(embed, argv) == {"slide_002.h5"}
    for more, told in (("--patches 32", "--patch-size 64, not 32"), ("--mean 0.4", "--mean [0.5, 0.5, 0.5], not [0.4")):
        assert f"{out} has results with {told}" in ranks(1).run(refused, embed, embedding(slides, out, more))[0]


def refused_at_once(comm: Communicator, act: Callable[..., None], argv: list[str]) -> str:
    """What a command says without waiting for a lock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpi4dl._files.LOCK_SECONDS", 0.0)
        return refused(comm, act, argv)


@pytest.mark.parametrize("act", [embed, evaluate])
def test_two_jobs_do_not_write_into_one_folder(
    ranks: Ranks, cohort: Path, tmp_path: Path, act: Callable[..., None]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    held = lock(out)
    assert held is not None
    argv = embedding(cohort, out) if act is embed else [str(tmp_path), "--out", str(out)]
    for found in ranks(2).run(refused_at_once, act, argv):
        assert "another job" in found
    os.close(held)


@on_ranks(2)
def test_a_rank_is_watched_while_it_encodes_and_not_while_it_waits(
    comm: Communicator, cohort: Path, tmp_path: Path
) -> None:
    """Whether this rank is watched while it encodes, and while it waits for the features of others."""
    argv = embedding(cohort, tmp_path / "out")
    encoding, waiting = set[bool](), set[bool]()

    class Dog:
        armed = False

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds
            self.feed()

        def feed(self) -> None:
            Dog.armed = self.seconds > 0

        def stop(self) -> None:
            Dog.armed = False

    encode, send = Encoder.__call__, Embedding._at_writers

    def encode_and_look(*arguments: Any) -> Any:
        encoding.add(Dog.armed)
        return encode(*arguments)

    def send_and_look(*arguments: Any) -> Any:
        waiting.add(Dog.armed)
        return send(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping, "Watchdog", Dog)
        patch.setattr(Encoder, "__call__", encode_and_look)
        patch.setattr(Embedding, "_at_writers", send_and_look)
        embed(comm, argv)
    assert (encoding, waiting) == ({True}, {False})


HANGING = """
import time
from mpi4dl import embed
from mpi4dl.inference.embedding import Embedding, Encoder

run, encode = Embedding.run, Encoder.__call__

def soon_out_of_patience(self):
    self.patience.seconds, Encoder.hangs = 2.0, self.comm.rank == 1
    run(self)

def hang(self, patches):
    time.sleep(1000 * self.hangs)
    return encode(self, patches)

Embedding.run, Encoder.__call__ = soon_out_of_patience, hang
embed.main()
"""


@pytest.mark.exhaustive
def test_an_encoder_that_hangs_ends_the_job(cohort: Path, tmp_path: Path) -> None:
    job = mpirun(2, "-c", HANGING, *embedding(cohort, tmp_path / "out"))
    assert job.code != 0
    assert "rank 1 of 2 came no further for 2 s" in job.stderr
    assert "in hang" in job.stderr


NOT_EMBEDDED = {
    "--model-options num_filters=8": "not all of it fits",
    "--model unet --model-options num_filters=4 --weights none": "unet",
    "--model timm/vit_tiny_patch16_224 --model-options= --weights none": "does not encode patches of 64 x 64",
    "--weights none --slides nowhere": "nowhere",
}


@pytest.mark.parametrize("more", NOT_EMBEDDED)
@pytest.mark.sample(2)
def test_what_embedding_refuses(ranks: Ranks, cohort: Path, tmp_path: Path, more: str) -> None:
    if "timm/" in more:
        import_torchvision()
        pytest.importorskip("timm")
    assert NOT_EMBEDDED[more] in ranks(1).run(refused, embed, embedding(cohort, tmp_path / "out", more))[0]


# Training on features.


def bags(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Files as TRIDENT and CLAM write them, below `folder`, with a table; the features and coordinates in each."""
    random, found = np.random.default_rng(0), {}
    (folder / "features" / "pt_files").mkdir(parents=True)
    lines = ["case_id,slide_id,label"]
    for number, count in enumerate((3, 1, 17, 8, 5, 12)):
        features = random.normal(size=(count, WIDTH)).astype(np.float16 if number == 1 else np.float32)
        coords = np.stack([np.arange(count) % 4, np.arange(count) // 4], 1) * 512
        path, name = folder / "features" / f"s{number}.h5", f"s{number}"
        if number == 3:
            torch.save(torch.from_numpy(features), folder / "features" / "pt_files" / f"{name}.pt")
        else:
            with h5py.File(path, "w") as file:
                lead = number == 2  # as TRIDENT's files of some versions
                file["features"] = features[None] if lead else features
                file["coords"] = coords[None] if lead else coords
                file["annotations"] = np.zeros(3)
                if number != 4:
                    values = (256, 512, 0, 40, 20, 0, 2500, 3000, name)
                    file["coords"].attrs.update(dict(zip(ATTRIBUTES, values, strict=True)))
        found[name] = features.astype(np.float32), coords
        lines.append(f"p{number},{name}{'.svs' if number % 2 else ''},{'ab'[number % 2]}")
    torch.save(torch.zeros(2, 2), folder / "features" / "pt_files" / "s0.pt")  # beside s0.h5, which says more
    (folder / "slides.csv").write_text("\n".join(lines))
    return found


@pytest.fixture
def written(tmp_path: Path) -> dict[str, tuple[Any, Any]]:
    return bags(tmp_path)


def flags_of(folder: Path, run: Path, more: str = "") -> list[str]:
    flags = f"--slides {folder / 'slides.csv'} --features {folder / 'features'} {TRAINING} {more}"
    return [*flags.split(), "--run-folder", str(run)]


@pytest.mark.parametrize(
    ("plan", "count"),
    [
        ("--tiles 1x2 --accumulate 2 --batch-size 1", 2),
        ("--data 2 --zero 1", 2),
        ("--tiles 1x2 --data 2 --aggregator max --preset mil --patches 224 --patience none", 4),
    ],
)
@pytest.mark.sample(2)
def test_training_is_that_of_a_plain_loop_over_bags(
    ranks: Ranks, tmp_path: Path, written: dict[str, tuple[Any, Any]], plan: str, count: int
) -> None:
    """With options of end-to-end training that change nothing; the encoder's are not used."""
    flags = flags_of(tmp_path, tmp_path / "run", f"--model resnet50 --mpp 0.5 {plan} --eval-every none")
    ranks(count).run(train, flags)
    config = with_frame(parse(flags))
    training, _ = source_of(config).open()
    model = build_model(config, 2, WIDTH)
    assert isinstance(model, PatchModel)

    def losses() -> Iterator[Tensor]:
        for chosen in in_turn(training, 2):
            names = [training.name(i).rpartition("/")[2].partition(".")[0] for i in chosen]
            logits = torch.stack([model.aggregator(torch.from_numpy(written[name][0])) for name in names])
            yield F.cross_entropy(logits, torch.tensor([training.label(i) for i in chosen]))

    expected = plain_steps(torch.optim.SGD(model.parameters(), lr=0.05), losses())
    assert losses_of(tmp_path / "run")[:4] == pytest.approx(expected, rel=1e-5)


def test_a_run_goes_on_as_it_was_by_a_table_in_another_order(
    ranks: Ranks, tmp_path: Path, written: dict[str, tuple[Any, Any]]
) -> None:
    """Stopped within an epoch: which slides are left, and which of their patches are drawn, is as it was."""
    runs, more = [tmp_path / name for name in ("whole", "stopped")], "--most-patches 4 --batch-size 1"
    ranks(1).run(train, flags_of(tmp_path, runs[0], more))
    ranks(1).run(train, flags_of(tmp_path, runs[1], f"{more} --max-steps 2"))
    table = tmp_path / "slides.csv"
    header, *lines = table.read_text().splitlines()
    table.write_text("\n".join([header, *reversed(lines)]))
    ranks(1).run(train, flags_of(tmp_path, runs[1], f"{more} --resume auto"))
    first, second = (load_file(run / "model.safetensors") for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def by_python(comm: Communicator, folder: Path, run: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """Predictions of files of features, and evaluations on them at several thresholds."""
    model = mpi4dl.TrainedModel(run, comm=comm)
    features, table = folder / "features", folder / "slides.csv"
    records = list(model.predict(features=features, out=folder / f"python{comm.size}", maps="none"))
    found: list[Any] = [
        model.evaluate(None, out, slides=table, features=features, threshold=threshold, positive="b", resamples=0)
        for threshold, out in ((1.0, None), ("youden", folder / "scored"))
    ]
    found.append(model.evaluate(resamples=0, threshold=0.0))  # on the slides that validated
    with pytest.raises(Refusal, match="`threshold` is 'most'"):
        model.evaluate(threshold="most")
    with pytest.raises(Refusal, match="`images` and `features` were both given"):
        model.predict("images", features=features)
    with pytest.raises(Refusal, match="`images` is missing"):
        model.predict()
    with pytest.raises(Refusal, match="no option `feature`"):
        model.predict(feature=features)
    return records, [(each.count, {name: m.value for name, m in each.metrics.items()}) for each in found]


def test_bags_are_predicted_and_evaluated_alike_by_any_number_of_ranks_and_by_python(
    ranks: Ranks, tmp_path: Path, written: dict[str, tuple[Any, Any]]
) -> None:
    run, features = tmp_path / "run", tmp_path / "features"
    ranks(1).run(train, flags_of(tmp_path, run, "--max-steps 2"))
    lines = []
    for count in (1, 2):
        told = ranks(count).run(said, predict, words(run, "--features", features, "--out", tmp_path / f"of{count}"))
        assert "6 slides looked at" in told[0]
        lines.append(read_lines(tmp_path / f"of{count}" / "predictions.jsonl"))
    found = [{Path(line["image"]).stem: line for line in each} for each in lines]
    for name, (_, coords) in written.items():
        one, two = (each[name] for each in found)
        assert one["probabilities"] == pytest.approx(two["probabilities"], abs=1e-6)
        if name == "s3":  # the file of CLAM, which does not say where patches are
            assert "maps" not in one
            continue
        shown = json.loads((tmp_path / "of2" / two["maps"][1]).read_text())["features"]
        corners = [tuple(map(min, zip(*each["geometry"]["coordinates"][0], strict=True))) for each in shown]
        assert corners == [pytest.approx(xy) for xy in coords.tolist()]
        values = [each["properties"]["measurements"]["attention"] for each in shown]
        assert sum(values) == pytest.approx(1, abs=1e-4)
        grid, side = tifffile.imread(tmp_path / "of1" / one["maps"][2]), 1 if len(coords) == 1 and name == "s4" else 512
        assert [grid[y // side, x // side] for x, y in coords] == pytest.approx(values, abs=1e-6)
    others = f"--slides {tmp_path / 'slides.csv'} --features {features} --threshold youden"
    for more, count in (("", 2), (others, 6)):
        out = tmp_path / f"evaluated{count}"
        ranks(2).run(evaluate, words(run, more, "--out", out, "--resamples 0"))
        rows = read_rows(out / "evaluation.csv")
        assert len(rows) == count
        for row in rows:
            expected = found[0][Path(row["image"]).stem]["probabilities"]["b"]
            assert float(row["probability b"]) == pytest.approx(expected, abs=1e-6)
    told = json.loads((out / "evaluation.json").read_text())
    metrics = {name: value["value"] for name, value in told["metrics"].items() if value["value"] != "nan"}
    of_python = ranks(2).run(by_python, tmp_path, run)
    scored = json.loads((tmp_path / "scored" / "evaluation.json").read_text())
    assert set(told) - set(scored) == {"warnings"}
    for name in ("source", "weights", "plan", "precision", "images", "part", "root", "slides"):
        assert scored[name] == told[name], name
    for records, scores in of_python:
        assert [each["image"] for each in records] == [each["image"] for each in lines[0]]
        for one, two in zip(records, lines[0], strict=True):
            assert one["probabilities"] == pytest.approx(two["probabilities"], abs=1e-6)
        assert [count for count, _ in scores] == [6, 6, 2]
        assert (scores[0][1]["sensitivity"], scores[2][1]["specificity"]) == (0, 0)
        assert {name: scores[1][1][name] for name in metrics} == pytest.approx(metrics, abs=1e-5)


def with_header(table: Path, header: str) -> Path:
    """The same table with other names of columns."""
    _, *rows = table.read_text().splitlines()
    other = table.with_name(f"{header.replace(',', '-')}.csv")
    other.write_text("\n".join([header, *rows]))
    return other


def test_another_table_may_have_other_columns_than_that_of_training(
    ranks: Ranks, tmp_path: Path, written: dict[str, tuple[Any, Any]]
) -> None:
    """Those of training, the usual ones, or others that flags name: all with the same metrics and predictions."""
    run, features = tmp_path / "run", tmp_path / "features"
    table = with_header(tmp_path / "slides.csv", "Patient,Slide file,Diagnosis")
    flags = flags_of(tmp_path, run, "--max-steps 2 --label-columns Diagnosis")
    flags[flags.index("--slides") + 1] = str(table)
    ranks(1).run(train, [*flags, "--slide-column", "Slide file"])
    for header, columns, labels in (
        ("Patient,Slide file,Diagnosis", "", ""),
        ("case_id,slide,label", "", ""),
        ("Fall,Bild,Befund", "--slide-column Bild --patient-column Fall", "--label-columns Befund"),
    ):
        out = tmp_path / header.partition(",")[0]
        others = [str(run), "--slides", str(with_header(table, header)), *words("--features", features, columns)]
        ranks(2).run(evaluate, [*others, *words(labels, "--resamples 0 --out", out)])
        assert (out / "evaluation.csv").read_bytes() == (tmp_path / "Patient" / "evaluation.csv").read_bytes()
        told = ranks(2).run(said, predict, [*others, "--out", str(out / "predicted"), "--no-maps"])
        assert "6 slides looked at" in told[0]
    for argv, word in (
        ([*others, "--label-columns", "nothing"], "nothing"),
        (words(run, "--slide-column Bild"), "--slides"),
    ):
        assert all(word in found for found in ranks(2).run(refused, evaluate, argv))


def rewritten(features: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file["features"] = features

    return write


def at_two_microns(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["coords"].attrs["target_magnification"] = 5


NAN = np.where(np.eye(4, WIDTH, -1) > 0, np.nan, 1)
BAD: dict[str, Callable[[Path], Any]] = {
    "s2.h5: has features of patches of 256 px at 2 um per pixel, but s0.h5 has features of patches": at_two_microns,
    "s2 is no file of features": Path.unlink,
    "s2.h5: cannot be read as HDF5": lambda path: path.write_bytes(path.read_bytes()[:900]),
    "s2.h5: has no patches": rewritten(np.zeros((0, WIDTH))),
    "s2.h5: has 5 features": rewritten(np.zeros((4, 5))),
    "s2.h5: the features of patch 1 are not finite": rewritten(NAN),
    "s2.h5: has no dataset 'features'": lambda path: h5py.File(path, "w").close(),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.sample(2)
def test_a_bad_file_of_features_ends_training_with_its_name(
    ranks: Ranks, tmp_path: Path, written: dict[str, tuple[Any, Any]], message: str
) -> None:
    """Before the first step, but for features that are no numbers, which nobody has read then."""
    BAD[message](tmp_path / "features" / "s2.h5")
    for found in ranks(2).run(refused, train, flags_of(tmp_path, tmp_path / "run", "--tiles 1x2 --val-fraction 0.2")):
        assert message in found
    assert not (tmp_path / "run").exists() or "finite" in message


@pytest.mark.parametrize(
    ("asked", "words_of"),
    [
        (("--mpp 1", "--mpp 2"), ("at 1 um", "at 2 um")),
        (("--mpp 1", "--magnification 5"), ("at 1 um", "at 2 um")),
        (("", ""), ("at 0.5", "at 0.25 um")),  # level 0 of slides that differ
    ],
)
@pytest.mark.sample(1)
def test_features_of_two_resolutions_do_not_go_together(
    ranks: Ranks, cohort: Path, tmp_path: Path, asked: tuple[str, str], words_of: tuple[str, str]
) -> None:
    header, *rows = (cohort / "slides.csv").read_text().splitlines()
    features = tmp_path / "features"
    for number, (flags, some) in enumerate(zip(asked, (rows[:1], rows[1:]), strict=True)):
        table = tmp_path / f"part{number}.csv"
        table.write_text("\n".join([header, *some]))
        argv = embedding(cohort, tmp_path / f"part{number}", f"--slides-folder {cohort} --slides {table}")
        place = argv.index("--mpp")
        argv[place : place + 2] = flags.split()
        ranks(2).run(embed, argv)
        shutil.copytree(tmp_path / f"part{number}", features, dirs_exist_ok=True)
    argv = words("--slides", cohort / "slides.csv", "--features", features, TRAINING, "--run-folder", tmp_path / "run")
    for found in ranks(2).run(refused, train, argv):
        assert [
            word for word in ("slide_001.ome.h5: has features", "slide_000.h5", *words_of) if word not in found
        ] == []


CLAM = {"patch_size": 256, "patch_level": 0, "downsample": (1.0, 1.0), "name": "s"}
TRIDENT = {"patch_size": 256, "patch_size_level0": 512, "level0_magnification": 40, "target_magnification": 20}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (TRIDENT, TRIDENT, None),
        ({}, {}, "warning: s0.h5 does not say the resolution"),
        (CLAM, CLAM, "warning: s0.h5 does not say the resolution"),
        (TRIDENT, {}, "warning: s1.h5 does not say the resolution"),
        (CLAM, {**CLAM, "patch_size": 512}, "s1.h5: has features of patches of 512 px"),
        (
            {"patch_size": 256, "patch_size_level0": 512, "level0_magnification": 40},
            {"patch_size": 256, "patch_size_level0": 256, "level0_magnification": 10},
            "s1.h5: has features of patches at 1 um per pixel, but s0.h5 at 0.5",
        ),
    ],
)
def test_the_resolution_of_features_is_that_of_their_attributes_or_unknown(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], words: str | None
) -> None:
    for number, attributes in enumerate((first, second)):
        with h5py.File(tmp_path / f"s{number}.h5", "w") as file:
            file["features"] = np.zeros((3, WIDTH), np.float32)
            file["coords"] = np.arange(6).reshape(3, 2) * 512
            file["coords"].attrs.update(attributes)
    found = FeatureFolder(tmp_path, SlideOptions(), folder=tmp_path)
    said = [line for line in found.remarks if "warning" in line]
    try:
        found.image(1)
    except BadImage as error:
        said = [str(error)]
    assert (words is None and not said) or (words is not None and words in said[0])


def test_patches_without_attributes_are_as_large_as_their_usual_step(tmp_path: Path) -> None:
    """CLAM begins a grid at each piece of tissue, and writes no attributes."""
    grid = np.stack(np.meshgrid(np.arange(4) * 512, np.arange(3) * 512), -1).reshape(-1, 2)
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["coords"] = np.random.default_rng(0).permutation(np.concatenate([grid, np.add(grid[:-3], (2051, 7))]))
        file["features"] = np.zeros((21, WIDTH), np.float32)
    assert open_bag(tmp_path / "s.h5").side == 512
