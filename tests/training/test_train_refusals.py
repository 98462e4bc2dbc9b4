"""mpi4dl.train: what cannot be done is refused with one message, from one rank, that says what to do instead."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import TINY, another, refusal, train_command, truncate, write_images


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), classes=("a", "b", "c"), count=4)


def refused(comm: Communicator, *flags: str) -> str:
    """The message with which `train` stops this rank."""
    with pytest.raises(Refusal) as caught:
        train(comm, [*TINY, "--data", "2", "--epochs", "2", "--num-samples", "8", *flags])
    return str(caught.value)


def test_an_unknown_flag_names_the_nearest() -> None:
    assert refusal(train_command(2, "--batchsize", "3")) == "there is no flag --batchsize; did you mean --batch-size?"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[data]\nbatchsize = 3\n", "{file}: there is no key batchsize in [data]; did you mean batch_size?"),
        (
            '[training]\nepochs = "three"\n',
            '{file}: epochs in [training] is "three" (text), but must be a whole number of at least 1, or auto',
        ),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_the_key(ranks: Ranks, tmp_path: Path, toml: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(toml)
    assert ranks(2).run(refused, "--config", str(file)) == [message.format(file=file)] * 2


def test_a_plan_for_another_number_of_ranks_says_how_many() -> None:
    assert refusal(train_command(2, "--tiles", "1x2", "--data", "2")) == (
        "tiles(1x2) x data(2) = 4 ranks, but mpirun started 2: start with mpirun -n 4, or change --tiles or --replicas"
    )


def test_more_tiles_than_rows_are_refused(ranks: Ranks) -> None:
    message = "--tiles 4x1 cuts images into 4 tiles along their rows, of which they have only 3"
    assert ranks(4).run(refused, "--data", "1", "--tiles", "4x1", "--image-size", "3x64") == [message] * 4


def test_a_folder_that_is_missing_is_named(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    (message,) = set(ranks(2).run(refused, "--images", str(folder)))
    assert message.startswith(f"{folder}: no such file or folder")


def test_a_class_without_images_is_named(ranks: Ranks, tmp_path: Path) -> None:
    write_images(tmp_path)
    (tmp_path / "empty").mkdir()
    (message,) = set(ranks(2).run(refused, "--images", str(tmp_path)))
    assert message.startswith(f"{tmp_path / 'empty'}: this class has no images: add some, or remove the folder")


def test_an_image_that_is_cut_off_is_named(tmp_path: Path) -> None:
    """It is found in the middle of training, by the rank that reads it, which need not be the one that speaks."""
    images = write_images(tmp_path / "images", count=2)
    bad = truncate(images / "light" / "1.png")
    truncate(images / "light" / "0.png").unlink()
    flags = ("--batch-size", "2", "--run-folder", str(tmp_path / "run"))
    message = refusal(train_command(2, *TINY, "--tiles", "1x2", "--images", str(images), *flags))
    assert message == f"{bad}: cannot be decoded: image file is truncated; --on-bad-image skip leaves such images out"


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (("--model", "resnet19"), r"model 'resnet19' is unknown; the nearest names are .*'resnet18'.*"),
        (("--model", "gpt3", "--text", "stdlib"), r"model 'gpt3' is unknown; the nearest names are .*'gpt2'.*"),
        (
            ("--optimizer", "AdamWW"),
            r"--optimizer AdamWW: torch\.optim has no such class; did you mean AdamW\?",
        ),
        (
            ("--scheduler", "CosineAnealingLR"),
            r"--scheduler CosineAnealingLR: torch\.optim\.lr_scheduler has no such class; "
            r"did you mean CosineAnnealingLR\?",
        ),
        (("--optimizer", "AdamW", "--optimizer-options", "weight_decy=0.1"), r"--optimizer AdamW .*weight_decay\?"),
    ],
)
def test_an_unknown_name_gets_the_nearest(ranks: Ranks, flags: tuple[str, ...], pattern: str) -> None:
    (message,) = set(ranks(2).run(refused, *flags))
    assert re.fullmatch(pattern, message)


def test_a_run_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    job = train_command(2, *TINY, "--data", "2", "--run-folder", str(tmp_path))
    assert refusal(job).startswith(f"the run folder {tmp_path} holds files already")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_ranks_with_different_commands_are_refused() -> None:
    job = train_command(1, *TINY, "--lr", "0.1", *another(1, *TINY, "--lr", "0.2"))
    assert refusal(job) == (
        "the ranks were started differently: --lr is '0.1' on rank 0 but '0.2' on rank 1: "
        "start all ranks with the same command"
    )


def test_a_mistake_on_one_rank_is_told_by_that_rank() -> None:
    job = train_command(1, *TINY, *another(1, *TINY, "--lrr", "0.2"))
    assert refusal(job) == "rank 1: there is no flag --lrr; did you mean --lr?"


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (
            "--model resnet_v2 --model-options dept=29",
            "model 'resnet_v2' has no option 'dept'; its options are 'depth'",
        ),
        ("--model resnet_v2 --model-options depth=21", r"depth=21 is not possible: resnet_v2 has depth 9n\+2"),
        ("--model resnet_v2 --model-options depth=abc", "--model resnet_v2 does not take these options .*'abc'"),
        ("--optimizer AdamW --optimizer-options betas=0.9", "--optimizer AdamW does not take .*'betas': 0.9"),
        ("--optimizer AdamW --optimizer-options betas=[0.9]", r"--optimizer AdamW does not take .*'betas': \[0.9\]"),
        ("--optimizer SGD --optimizer-options momentum=abc", "--optimizer SGD does not take .*'momentum': 'abc'"),
        ("--optimizer LBFGS", "--optimizer LBFGS .*closure"),
        ("--optimizer SparseAdam", "--optimizer SparseAdam .*dense gradients"),
        ("--scheduler StepLR", "--scheduler StepLR .*step_size"),
        ("--scheduler StepLR --scheduler-options step_size=abc", "--scheduler StepLR .*'step_size': 'abc'"),
        ("--scheduler StepLR --scheduler-options step_size=0", "--scheduler StepLR .*'step_size': 0"),
        (
            "--scheduler OneCycleLR --scheduler-options max_lr=0.1,total_steps=3",
            "--scheduler is for 3 steps, but there will be 4",
        ),
        ("--batch-size 1", "--replicas 2 replicas cannot share a batch of 1: raise --batch-size"),
        ("--batch-size 9", "8 images to train on do not fill one batch of 9: choose a smaller --batch-size"),
        ("--device cuda", "device 'cuda' was asked for, but PyTorch sees no GPU here: use --device cpu"),
        ("--model unet", r"the model's output has shape \(4, 10, 32, 32\), but --task classify.*\(batch, classes\)"),
        ("--loss mse", r"--loss mse takes .* shape \(4, 10\), and the targets \(4,\): .*cross_entropy for classes"),
        ("--lr 1e30", "step [12]: the loss is not finite .*try a smaller --lr"),
        ("--model squeezenet1_0 --image-size 8", ".*too small"),
    ],
)
def test_options_that_cannot_work_are_refused_alike_on_all_ranks(
    ranks: Ranks, tmp_path: Path, flags: str, pattern: str
) -> None:
    folder = tmp_path / "run"
    (message,) = set(ranks(2).run(refused, *flags.split(), "--run-folder", str(folder)))
    assert re.match(pattern, message)


def test_fewer_classes_than_the_images_have_are_refused(ranks: Ranks, images: Path, tmp_path: Path) -> None:
    flags = ("--images", str(images), "--num-classes", "2", "--run-folder", str(tmp_path / "run"))
    (message,) = set(ranks(2).run(refused, *flags))
    assert re.match(r"--num-classes 2, but the images have 3: a, b, c", message)


class Fourier(nn.Module):
    """What no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(self.layer(x)).real.mean((2, 3))


class Particular(nn.Module):
    """What takes images of one size only, and says so as torchvision's vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 10, 1), nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.shape[2] == 224, f"expected 224 rows but got {x.shape[2]}\nin vain")
        return self.head(self.layer(x)).flatten(1)


def refused_model(comm: Communicator, model: type[nn.Module], *flags: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpi4dl.models.build", lambda *_, **__: model())
        return refused(comm, *flags)


@pytest.mark.parametrize("flags", ["", "--dry-run"])
def test_a_model_without_rules_is_refused_with_the_ways_out(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    (message,) = set(ranks(2).run(refused_model, Fourier, *flags.split(), "--run-folder", str(tmp_path / "run")))
    assert re.match(r".*fft_fft2 in module Fourier has no exact rule for .*Either gather first", message)


@pytest.mark.parametrize("flags", ["", "--dry-run", "--data 1 --stages 2", "--data 1 --tiles 1x2"])
def test_images_that_a_model_cannot_take_are_refused_in_its_own_words(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    more = (*flags.split(), "--run-folder", str(tmp_path / "run"))
    (message,) = set(ranks(2).run(refused_model, Particular, *more))
    reason = r"cannot take images of 3 x 32 x 32 \(channels, height, width\): expected 224 rows but got 32"
    assert re.fullmatch(rf"(--model )?small_resnet: {reason}", message)
