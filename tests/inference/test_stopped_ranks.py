"""A rank that is stopped where no other rank's watchdog looks is noticed, in each job and at its end."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.inference.cases import train_nothing, write_images
from tests.pool.job import mpirun
from tests.support.commands import TINY
from tests.support.commands import write_images as write_classes

FROZEN = """
import os, signal, sys
from mpi4dl import {job}
from mpi4dl.comm import watchdog
import {module} as owner
from functools import reduce
watchdog.SILENT_SECONDS, watchdog.BEAT_SECONDS = 3.0, 1.0
*path, name = "{place}".split(".")
owner = reduce(getattr, path, owner)
place = getattr(owner, name)
def frozen(*arguments, **options):
    if os.environ["PMI_RANK"] == "1" and "{local}" in sys._getframe(1).f_locals:
        os.kill(os.getpid(), signal.SIGSTOP)
    return place(*arguments, **options)
setattr(owner, name, frozen)
{job}.main()
"""


def trained(folder: Path) -> list[str]:
    train_nothing(folder / "run")
    write_images(folder / "new", 2)
    return [str(folder / "run"), "--images", str(folder / "new")]


def to_evaluate(folder: Path) -> list[str]:
    train_nothing(folder / "run", classes=("dark", "light"))
    images = write_classes(folder / "new", count=2)
    return [str(folder / "run"), "--images", str(images), "--resamples", "0"]


def to_embed(folder: Path) -> list[str]:
    import torch

    from mpi4dl.datasets.slides.compose import Cohort
    from tests.support.tiny import tiny_resnet
    from tests.training.test_train_features import embedding

    cohort = folder / "cohort"
    Cohort(1, 1, 600).write(cohort, 0).rename(cohort / "s0.tif")
    (cohort / "slides.csv").write_text("case_id,slide_id,label\np,s0.tif,a\n")
    torch.save(tiny_resnet(9).state_dict(), cohort / "weights.pt")
    return embedding(cohort, folder / "out")


def to_train(folder: Path) -> list[str]:
    return [*TINY, "--tiles", "1x2", "--max-steps", "1", "--no-tensorboard", "--run-folder", str(folder / "run")]


MORE = partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("job", "module", "place", "local", "options", "printed"),
    [
        ("predict", "mpi4dl.comm.communicator", "Communicator.agree", "nothing", trained, "2 images looked at"),
        MORE("evaluate", "mpi4dl.comm.communicator", "Communicator.together", "told", to_evaluate, "evaluated on"),
        MORE("embed", "mpi4dl.inference.embedding", "Embedding.run", "asked", to_embed, "1 slide"),
        ("train", "mpi4dl.comm.shutdown", "Meeting.gathers", "watchman", to_train, "done"),
    ],
)
def test_a_rank_that_is_stopped_after_the_last_line_is_noticed(
    tmp_path: Path, job: str, module: str, place: str, local: str, options: Callable[[Path], list[str]], printed: str
) -> None:
    program = FROZEN.format(job=job, module=module, place=place, local=local)
    ended = mpirun(2, "-c", program, *options(tmp_path), timeout=120)
    assert printed in ended.stdout
    assert ended.code != 0
    assert ended.stderr.count("rank 1 of 2 has given no sign of life for 3 s") == 1
