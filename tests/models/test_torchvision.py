"""torchvision imports beside any torch, and only when asked."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpi4dl import _torchvision
from mpi4dl._torchvision import import_torchvision


def install_fake(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(_torchvision, "find_spec", lambda name: spec)


def test_importing_the_models_leaves_torchvision_alone():
    code = "import mpi4dl.models, sys; assert 'torchvision' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=600)


def test_models_and_transforms_work_and_every_call_gives_the_same_package():
    torchvision = import_torchvision()
    assert torchvision is import_torchvision() is sys.modules["torchvision"]
    model = torchvision.models.resnet18(weights=None, num_classes=3).eval()
    assert model(torch.zeros(1, 3, 33, 47)).shape == (1, 3)


@pytest.mark.parametrize("name", ["_C.so", "_C_stable.so"])
def test_a_library_that_loads_needs_no_schema(monkeypatch, tmp_path, name):
    [loadable] = (Path(torch.__file__).parent / "lib").glob("libtorch_global_deps.*")
    (tmp_path / name).symlink_to(loadable)
    install_fake(monkeypatch, tmp_path)
    assert _torchvision._compiled_operators_load()


def test_a_library_that_cannot_load_or_is_not_there_needs_schemas(monkeypatch, tmp_path):
    install_fake(monkeypatch, tmp_path)
    assert not _torchvision._compiled_operators_load()
    (tmp_path / "_C.so").write_text("built for another machine")
    assert not _torchvision._compiled_operators_load()


def test_without_torchvision_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_torchvision, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install torchvision"):
        import_torchvision()
