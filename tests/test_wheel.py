"""The wheel: it has all files of the package, and trains where nothing else of the checkout is."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = [*Path(sys.prefix, "lib").glob("libmpi.so.*")]  # of the package mpich, for this environment alone
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
TRAIN = "train --image-size 32 --model small_resnet --num-samples 8 --batch-size 4 --epochs 1 --run-folder run".split()


def ran(*command: str | Path, folder: Path) -> str:
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(each) != ROOT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if LIBRARIES:
        environment["MPI4PY_LIBMPI"] = str(LIBRARIES[0])
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_is_whole_and_trains(tmp_path: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("twine")
    shutil.copytree(ROOT / "mpi4dl", tmp_path / "mpi4dl", ignore=shutil.ignore_patterns("__pycache__"))
    package = {str(each.relative_to(tmp_path)) for each in (tmp_path / "mpi4dl").rglob("*") if each.is_file()}
    for name in SOURCES:
        shutil.copy(ROOT / name, tmp_path)
    ran(sys.executable, "-m", "build", "--no-isolation", folder=tmp_path)
    archives = sorted((tmp_path / "dist").iterdir())
    ran(sys.executable, "-m", "twine", "check", "--strict", *archives, folder=tmp_path)
    (wheel,) = (each for each in archives if each.suffix == ".whl")
    with ZipFile(wheel) as found:
        assert package - {*found.namelist()} == set()

    alone, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    venv.create(alone, symlinks=True)
    elsewhere.mkdir()
    python = alone / "bin" / "python"
    ran(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=elsewhere)
    site = sysconfig.get_path("purelib", vars={"base": str(alone)})
    Path(site, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert str(alone) in ran(python, "-c", "import mpi4dl; print(mpi4dl.__file__)", folder=elsewhere)
    ran(alone / "bin" / "mpi4dl", *TRAIN, folder=elsewhere)
    assert (elsewhere / "run" / "config.toml").exists()
