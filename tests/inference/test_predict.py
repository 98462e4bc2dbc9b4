"""Predicting: what plain PyTorch says of each image, by any plan, whatever is damaged, stopped or moved."""

import csv
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import mpi4dl
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.predict import predict
from tests.inference.cases import CLASSES, shown, train_nothing, write_images
from tests.pool.ranks import Ranks

TOLERANCE = 1e-5


def said(comm: Communicator, *argv: str) -> str:
    with redirect_stdout(StringIO()) as out:
        predict(comm, argv)
    return out.getvalue()


def records_in(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["image"]: each for each in map(json.loads, (folder / "predictions.jsonl").read_text().splitlines())}


@pytest.mark.parametrize("plan", ["", "--tiles 2x2", "--stages 2 --tiles 1x2", "--stream 2x2 --tiles 1x2"])
def test_each_image_has_its_line_and_a_damaged_one_its_error(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    model = train_nothing(tmp_path / "run")
    paths = write_images(tmp_path / "new", 9)
    paths[4].write_bytes(paths[4].read_bytes()[:300])
    (tmp_path / "new" / "notes.txt").write_text("no image")
    argv = [str(tmp_path / "run"), "--images", str(tmp_path / "new"), *plan.split()]
    told = ranks(4).run(said, *argv)
    assert "9 images looked at, 1 of which could not be read" in told[0]
    assert not any(told[1:])
    found = records_in(tmp_path / "run" / "predictions-new")
    with (tmp_path / "run" / "predictions-new" / "predictions.csv").open() as file:
        table = {row["image"]: row for row in csv.DictReader(file)}
    assert len(found) == len(table) == len(paths)
    for path in paths:
        name = path.relative_to(tmp_path / "new").as_posix()
        if path == paths[4]:
            assert "4.png" in found[name]["error"]
            assert table[name]["error"] == found[name]["error"]
            continue
        with torch.no_grad():
            expected = model(shown(path)).softmax(1)[0].tolist()
        assert [*found[name]["probabilities"]] == [*CLASSES]
        assert found[name]["probabilities"] == pytest.approx(dict(zip(CLASSES, expected, strict=True)), abs=TOLERANCE)
        assert table[name]["prediction"] == found[name]["prediction"] == CLASSES[expected.index(max(expected))]
        assert float(table[name]["probability tumour"]) == found[name]["probabilities"]["tumour"]


def test_it_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    train_nothing(tmp_path / "run")
    paths = write_images(tmp_path / "new", 7)
    whole = paths[2].read_bytes()
    paths[2].write_bytes(b"damaged")
    argv = [str(tmp_path / "run"), "--images", str(tmp_path / "new"), "--out", str(tmp_path / "out")]
    said(world(), *argv)
    lines, table = tmp_path / "out" / "predictions.jsonl", tmp_path / "out" / "predictions.csv"
    before = records_in(tmp_path / "out")
    lines.write_bytes(b"".join(lines.read_bytes().splitlines(keepends=True)[:5])[:-9])  # as a kill leaves them
    table.write_bytes(table.read_bytes()[:77])
    paths[2].write_bytes(whole)
    told = said(world(), *argv)
    assert "3 images done before" in told
    assert "\n4 images looked at;" in told
    after = records_in(tmp_path / "out")
    assert set(after) == set(before)
    assert {name for name, record in after.items() if record != before[name]} == {"2.png"}
    with table.open() as file:
        assert {row["image"]: row["prediction"] for row in csv.DictReader(file)} == {
            name: record["prediction"] for name, record in after.items()
        }
    assert "7 images done before\n0 images looked at" in said(world(), *argv)
    with pytest.raises(Refusal, match="has results with --precision 'fp32', not 'bf16': choose another --out"):
        predict(world(), [*argv, "--precision", "bf16"])


def masks_of(comm: Communicator, run: Path, images: str, out: Path, tiles: str) -> list[dict[str, Any]]:
    return list(mpi4dl.TrainedModel(run, comm=comm, tiles=tiles).predict(images, out))


def test_masks_are_the_classes_of_plain_pytorch(ranks: Ranks, tmp_path: Path) -> None:
    model = train_nothing(tmp_path / "run", "segment", model="unet", model_options={"num_filters": 4, "depth": 2})
    paths = write_images(tmp_path / "new", 3)
    found = ranks(4).run(masks_of, tmp_path / "run", str(tmp_path / "new"), tmp_path / "out", "2x2")
    assert found == 4 * [list(records_in(tmp_path / "out").values())]
    by_name = {record["image"]: record for record in found[0]}
    for path in paths:
        record = by_name[path.relative_to(tmp_path / "new").as_posix()]
        mask = PIL.Image.open(tmp_path / "out" / record["mask"])
        with torch.no_grad():
            expected = model(shown(path)).argmax(1)[0]
        assert mask.mode == "P"
        assert np.array_equal(np.asarray(mask), expected.numpy())
        assert list(record["pixels"].values()) == torch.bincount(expected.reshape(-1), minlength=3).tolist()


def refused(comm: Communicator, *argv: str) -> str:
    with pytest.raises(Refusal) as caught:
        predict(comm, argv)
    return str(caught.value)


def test_a_mask_that_cannot_be_written_ends_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    train_nothing(tmp_path / "run", "segment", model="unet", model_options={"num_filters": 4, "depth": 2})
    write_images(tmp_path / "new", 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "masks").touch()
    argv = [str(tmp_path / "run"), "--images", str(tmp_path / "new"), "--out", str(tmp_path / "out"), "--tiles", "2x2"]
    assert all("masks" in each for each in ranks(4).run(refused, *argv))


def test_code_of_the_user_must_be_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4dl.options import parts

    code = tmp_path / "my_own_code.py"
    code.write_text(
        "import torch\n\ndef build(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), "
        "torch.nn.Linear(12, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    model = train_nothing(tmp_path / "run", model="my_own_code.py:build")
    (path,) = write_images(tmp_path / "new", 1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the whole path was kept
    argv = [str(tmp_path / "run"), "--images", str(path), "--out", str(tmp_path / "out")]
    said(world(), *argv)
    with torch.no_grad():
        expected = model(shown(path)).softmax(1)[0].tolist()
    assert list(records_in(tmp_path / "out")["0.png"]["probabilities"].values()) == pytest.approx(expected, abs=1e-6)
    code.write_text(code.read_text() + "# changed\n")
    parts._from_file.cache_clear()
    assert "my_own_code.py is not as it was in training (digest " in refused(world(), *argv)
    again = (*argv, "--model", f"{code}:build")
    assert "out has results with --model" in refused(world(), *again)  # which another code made
    assert "1 image looked at" in said(world(), *again, "--out", str(tmp_path / "other"))
    code.unlink()
    assert f"made the model, but {code} is gone: put it back" in refused(world(), *argv)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("", "name the folder of a run, a checkpoint, or weights first"),
        ("run", "--images is missing"),
        ("nowhere --images new", "nowhere: there is no such file or folder"),
        ("run/model.safetensor --images new", "there is no such file or folder; did you mean model.safetensors?"),
        ("run --images gone", "gone: no such file or folder"),
        ("run --images empty", "empty: has no images, which end in .png"),
        ("run --images *.jpeg", "*.jpeg: no file matches this"),
        ("run --images list.txt", "list.txt: names new/0.png twice"),
        ("run --images table.csv", "table.csv is no image (is not an image"),
        ("run --images bad.png", "none of 1 image can be read: bad.png: is empty"),
        ("empty.pt --images new", "empty.pt is empty (0 bytes)"),
        ("run --images new --tiles 2x2", "tiles(2x2) x data(1) = 4 ranks, but mpirun started 1"),
        ("run --images new --model x.py:y", "--model x.py:y: training had no own one"),
        ("other.safetensors --images new", "other.safetensors does not say what it is of"),
        ("text --images new", "which was trained on text: continue text with mpi4dl generate"),
    ],
)
def test_what_cannot_be_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: str, complaint: str) -> None:
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "new", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("file,class\nnew/0.png,benign\n")
    for name in ("bad.png", "empty.pt"):
        (tmp_path / name).touch()
    (tmp_path / "list.txt").write_text("new/0.png\nnew/0.png\n")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    if argv.startswith("text"):
        train_nothing(tmp_path / "text")
        about = json.loads((tmp_path / "text" / "model.json").read_text()) | {"task": "language"}
        save_file({"x": torch.zeros(1)}, tmp_path / "text" / "model.safetensors", {"mpi4dl": json.dumps(about)})
    else:
        train_nothing(tmp_path / "run")
    assert complaint in refused(world(), *argv.split())
