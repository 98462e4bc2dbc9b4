"""Code that files name is loaded if this user's training signed them, or the user asks for it; no other."""

import json
import stat
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpi4dl import TrainedModel
from mpi4dl.comm import Refusal, world
from mpi4dl.models.registry import without_loading
from mpi4dl.options import parts
from mpi4dl.runs.description import Description
from mpi4dl.text.loading import find_trained
from tests.inference.cases import train_nothing, write_images


def another_user(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """From now on files were written by somebody else: this user's key is another one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(home))


EVIL = """
from pathlib import Path
(Path(__file__).parent / "ran").touch()
import torch
class Nothing(torch.nn.Module):
    pass
build = darker = Slides = lambda *a, **b: Nothing()
"""


@pytest.mark.sample(5)
@pytest.mark.parametrize("source", ["run", "run/model.safetensors", "exported.pt"])
@pytest.mark.parametrize("place", ["model", "transforms", "dataset"])
@pytest.mark.parametrize("name", ["evil.py:{}", "evil:{}", "evil.inner:{}"])
def test_files_of_others_run_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, place: str, name: str
) -> None:
    """Whatever is in a folder that somebody shared, signed by them, and the folder is where the user works."""
    text = name.format({"model": "build", "transforms": "darker", "dataset": "Slides"}[place])
    code = tmp_path / ("evil/__init__.py" if "inner" in name else "evil.py")
    code.parent.mkdir(exist_ok=True)
    code.write_text(EVIL)
    train_nothing(tmp_path / "run")
    (path,) = write_images(tmp_path / "new", 1)
    about = json.loads((tmp_path / "run/model.json").read_text())
    about["options"][place] = json.dumps(text)
    about["own"] = {place: {"file": str(code), "digest": parts.print_of(f"{code}:x")}}
    told = Description.read(json.dumps(about), "").signed().text
    state = load_file(tmp_path / "run/model.safetensors")
    save_file(state, tmp_path / "run/model.safetensors", {"mpi4dl": told})
    (tmp_path / "run/model.json").write_text(told)
    saved = OrderedDict(state)
    saved._metadata = {"mpi4dl": {"mpi4dl": told}}  # type: ignore[attr-defined]
    torch.save(saved, tmp_path / "exported.pt")
    another_user(monkeypatch, tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(Refusal, match=rf"names code to load: `{place}` {text}.*`trust_code`"):
        for _ in TrainedModel(source).predict(path) if place != "dataset" else [TrainedModel(source).evaluate()]:
            pass
    assert not (code.parent / "ran").exists()


def test_a_run_of_text_runs_no_code_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text('[model]\nmodel = "evil.py:build"\n[data]\ntext = "stdlib"\n')
    (tmp_path / "run/model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=r"names code to load: `model` evil.py:build"):
        find_trained(world(), Path("run"))
    assert find_trained(world(), Path("run"), trust_code=True).run.part == "evil.py:build"


def test_options_that_a_file_has_read_no_other_weights(tmp_path: Path) -> None:
    asked = {"checkpoint_path": "x.pt", "pretrained": True, "in_chans": 3}
    assert without_loading("timm/resnet18", asked) == {"in_chans": 3}
    assert without_loading("resnet18", {"weights": "DEFAULT"}) == {"weights": "DEFAULT"}


IMAGES = """
class Images(torch.utils.data.Dataset):
    classes, channels = ("a", "b"), 3
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((3, 24, 32), index / 40), index % 2
"""


def test_what_this_user_trained_needs_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "own_and_signed.py"
    code.write_text(
        "import torch\n\ndef build(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), "
        "torch.nn.Linear(12, num_classes))\n" + IMAGES
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    train_nothing(tmp_path / "run", model=f"{code}:build")
    (path,) = write_images(tmp_path / "new", 1)
    key = tmp_path / "mine/mpi4dl/key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(list(TrainedModel(tmp_path / "run").predict(path))) == 1
    key.chmod(0o644)  # then others can sign too
    with pytest.raises(Refusal, match="names code to load"):
        TrainedModel(tmp_path / "run")
    for trusting in ({"trust_code": True}, {"model": f"{code}:build"}):
        assert len(list(TrainedModel(tmp_path / "run", **trusting).predict(path))) == 1
    key.chmod(0o600)
    train_nothing(tmp_path / "own", dataset=f"{code}:Images", classes=("a", "b"), model_options={})
    assert TrainedModel(tmp_path / "own").evaluate(resamples=0).count > 0
    told = (tmp_path / "run/model.json").read_text()
    forged = Description.read(told.replace(":build", ":other"), "")
    assert Description.read(told, "").is_ours()
    assert Description.read(
        told.replace('"input_values": null', '"later": null'), ""
    ).is_ours()  # of an earlier version
    assert not forged.is_ours()
