"""The examples' configurations are ones that the training command takes, and name what exists."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from mpi4dl import models
from mpi4dl.options import build
from mpi4dl.options.config import Config
from mpi4dl.options.models import build_model
from mpi4dl.options.optimizers import build_optimizer, build_schedule
from tests.pool.zygote import ROOT
from tests.support.commands import settled

FILES = sorted((ROOT / "examples").glob("*.toml"))
NUM_CLASSES = 2


def configured(file: Path) -> Config:
    """Of slides, which are not there, it has the size of slides of 256 px."""
    sized = ["--image-size", "256"] if "\n[slides]\n" in file.read_text() else []
    return settled(["--config", str(file), *sized])


def test_there_is_an_example() -> None:
    assert ROOT / "examples" / "tissue.toml" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_example_names_what_exists(file: Path) -> None:
    config = configured(file)
    assert config != Config()
    assert config.model.model in models.names(torchvision=True)
    model = build_model(config, NUM_CLASSES, 3)
    optimizer = build_optimizer(config, model.parameters())
    build_schedule(config, optimizer)
    assert type(optimizer).__name__ == config.optimizer.optimizer
    of_tokens = config.data.text is not None
    samples = torch.zeros(2, config.data.context, dtype=torch.int64) if of_tokens else torch.zeros(2, 3, 64, 64)
    assert model.eval()(samples).shape == ((*samples.shape, NUM_CLASSES) if of_tokens else (2, NUM_CLASSES))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_makefile_starts_as_many_ranks_as_an_example_needs(file: Path) -> None:
    config, makefile = configured(file), (ROOT / "Makefile").read_text()
    plan = build.build_plan(config)
    assert plan.problem(plan.num_ranks, config.data.image_size, config.samples_per_step) is None
    for name, value in reversed(re.findall(r"^(\w+) [?:]?= (.*)$", makefile, re.MULTILINE)):
        makefile = makefile.replace(f"$({name})", value)
    started = re.search(rf"mpirun -n (\d+) \S+ -m mpi4dl.train --config {file.relative_to(ROOT)}\n", makefile)
    assert started is not None
    assert int(started[1]) == plan.num_ranks


def test_the_images_of_the_tissue_example_are_what_its_program_writes() -> None:
    """`make train` writes them into the folder that the configuration reads, in the size that it trains at."""
    config = configured(ROOT / "examples" / "tissue.toml")
    assert f"{config.data.images}: $(STAMP)" in (ROOT / "Makefile").read_text()
    program = importlib.import_module("examples.tissue_slides")
    assert config.data.image_size == (program.DEFAULT_SIZE_PX, program.DEFAULT_SIZE_PX)
    assert len(program.CLASSES) == NUM_CLASSES
    assert set(program.PARTS) == {"train", "val"}
