"""mpi4dl.export: what it writes is loaded by plain PyTorch, into torchvision's own model."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mpi4dl._torchvision import import_torchvision
from mpi4dl.checkpoints import saved
from mpi4dl.checkpoints.manifest import checkpoints_in, remove
from mpi4dl.checkpoints.weights import open_weights, weights_in
from mpi4dl.export import export, main
from mpi4dl.train import train
from tests.checkpoints.made import flip
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT
from tests.support.faults import file_limit

FLAGS = (
    "--model shufflenet_v2_x0_5 --image-size 32 --batch-size 2 --num-samples 4 --num-workers 0 --eval-every none "
    "--epochs 2 --balance flops"
)


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on tiles and stages: two epochs of 2 steps."""
    folder = tmp_path_factory.mktemp("runs") / "shufflenet"
    plan = ("--stages", "2", "--tiles", "1x2,1x1")
    ranks(3).run(train, [*FLAGS.split(), *plan, "--no-tensorboard", "--run-folder", str(folder)])
    return folder


def loaded(file: Path) -> nn.Module:
    """torchvision's model with these weights."""
    model: nn.Module = import_torchvision().models.shufflenet_v2_x0_5(num_classes=10)
    weights = torch.load(file) if file.suffix == ".pt" else load_file(file)
    assert list(model.load_state_dict(weights)) == [[], []]
    return model.eval()


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.sample(1)
def test_torchvision_loads_the_weights(run: Path, tmp_path: Path, name: str) -> None:
    newest = checkpoints_in(run / "checkpoints")[0]
    assert newest.name == "step-00000004"
    assert export(run, tmp_path / name) == [f"{tmp_path / name}: 338 values of {newest / 'model.safetensors'}"]
    final = load_file(run / "model.safetensors")
    found = loaded(tmp_path / name).state_dict()
    assert all(torch.equal(found[key], value) for key, value in final.items())
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_older_checkpoint_is_exported_by_its_path(run: Path, tmp_path: Path) -> None:
    newest, older = checkpoints_in(run / "checkpoints")
    export(newest, tmp_path / "newest.pt")
    export(older, tmp_path / "older.pt")
    two, four = (loaded(tmp_path / name).get_parameter("conv1.0.weight") for name in ("older.pt", "newest.pt"))
    assert not torch.equal(two, four)


def test_a_file_of_weights_is_exported_as_it_is(run: Path, tmp_path: Path) -> None:
    """Such as a run's best weights, which are averages already where the run has an average."""
    shutil.copy(run / "model.safetensors", tmp_path / "best.safetensors")
    save_file({"conv1.0.weight": torch.zeros(24, 3, 3, 3)}, tmp_path / "ema.safetensors")
    said = export(tmp_path / "best.safetensors", tmp_path / "weights.pt")
    assert said == [f"{tmp_path / 'weights.pt'}: 338 values of {tmp_path / 'best.safetensors'}"]
    found, expected = loaded(tmp_path / "weights.pt").state_dict(), load_file(run / "model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_the_command_says_what_it_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run), str(tmp_path / "weights.pt")])
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'weights.pt'}: 338 values of {run}")


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_others_may_read_the_weights_as_the_user_wants(tmp_path: Path, name: str) -> None:
    save_file({"first": torch.zeros(3)}, str(tmp_path / "model.safetensors"))
    for mask, mode in ((0o022, 0o644), (0o002, 0o664), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            export(tmp_path, tmp_path / name)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_a_tie_to_nothing_is_damaged(tmp_path: Path) -> None:
    save_file({"first": torch.zeros(3)}, str(tmp_path / "model.safetensors"), metadata={"second": "../third"})
    with pytest.raises(ValueError, match=r"'second' is declared equal to '../third'$"):
        export(tmp_path, tmp_path / "out.pt")


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_disk_without_room_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    save_file({"weight": torch.zeros(100_000)}, tmp_path / "best.safetensors")
    with file_limit(1000), pytest.raises(OSError, match=re.escape(str(tmp_path / name))):
        export(tmp_path / "best.safetensors", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["best.safetensors"]


def test_what_has_two_names_gets_both(tmp_path: Path) -> None:
    weight = torch.arange(3.0)
    save_file({"first": weight}, str(tmp_path / "model.safetensors"), metadata={"second": "first", "classes": "[]"})
    (said,) = export(tmp_path, tmp_path / "out.pt")
    assert said.endswith("(without checksums: this run has no checkpoints)")
    state = torch.load(tmp_path / "out.pt")
    assert state["first"].data_ptr() == state["second"].data_ptr()
    export(tmp_path, tmp_path / "out.safetensors")
    assert all(torch.equal(value, weight) for value in load_file(tmp_path / "out.safetensors").values())
    assert set(load_file(tmp_path / "out.safetensors")) == {"first", "second"}


def test_a_checkpoint_that_a_training_removes_meanwhile_is_no_longer_the_newest(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    older, newer = reversed(checkpoints_in(tmp_path / "run" / "checkpoints"))
    newer.rename(tmp_path / newer.name)
    plain = saved.verify

    def removing(path: Path, ranges: Any) -> None:
        if older.exists():
            (tmp_path / newer.name).rename(newer)
            remove(older)
        plain(path, ranges)

    monkeypatch.setattr(saved, "verify", removing)
    assert weights_in(tmp_path / "run") == (newer / "model.safetensors", [])
    with pytest.raises(ValueError, match=rf"there is no checkpoint {older}: a run removes its oldest"):
        open_weights(str(older / "model.safetensors"))


def test_damaged_weights_are_not_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "run")
    newest, older = checkpoints_in(tmp_path / "run" / "checkpoints")
    flip(newest / "model.safetensors")
    skipped, said = export(tmp_path / "run", tmp_path / "weights.pt")
    assert skipped.startswith(f"skipped {newest}: model.safetensors: bytes ")
    assert said.endswith(f"values of {older / 'model.safetensors'}")
    with pytest.raises(SystemExit) as stop:
        main([str(newest), str(tmp_path / "none.pt")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"mpi4dl: no checkpoint is whole: {newest}: model.safetensors: bytes ")
    assert not (tmp_path / "none.pt").exists()


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        (".", "weights.bin", "weights.bin must end in .pt or .safetensors"),
        (".", "weights.pt", "is neither a run of mpi4dl train with weights nor a checkpoint"),
        (
            "no",
            "weights.pt",
            "no: no such file or folder; name a run, one of its checkpoints, or a file of weights, such",
        ),
        (".", "no/weights.pt", "no; make it first"),
        ("taken", "weights.pt", "taken: is another file; name a run"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, out: str, message: str
) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / source), str(tmp_path / out)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_exporting_starts_no_mpi(run: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from mpi4dl.export import export\n"
        f"export(Path({str(run)!r}), Path({str(tmp_path / 'weights.pt')!r}))\n"
        "print(sorted({'mpi4py', 'mpi4py.MPI', 'torchvision'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("[]", "")
