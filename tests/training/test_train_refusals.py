"""mpi4dl.train: what cannot be done is refused with one message, from one rank, that says what to do instead."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse
from mpi4dl.plan import plan
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import (
    TINY,
    another,
    losses_of,
    refusal,
    refused,
    run_train,
    train_command,
    truncate,
    words,
    write_images,
)
from tests.support.tiny import TINY_RESNET
from tests.training import test_train_features as features
from tests.training import test_train_slides as slides
from tests.training import test_train_streaming as streaming
from tests.training import test_train_text as text

# What is asked for before the flags of a case. Names in braces are of `data`.
BASES = {
    "images": f"{' '.join(TINY)} --data 2 --epochs 2 --num-samples 8",
    "axes": "--num-samples 8",
    "streaming": f"{streaming.COMMON} --num-samples 8",
    "text": f"{text.COMMON} --text {{corpus}}",
    "slides": f"--slides {{cohort}}/slides.csv {slides.COMMON}",
    "whole slides": f"--slides {{cohort}}/slides.csv {slides.OWN}",
    "features": f"--slides {{bags}}/slides.csv --features {{bags}}/features {features.TRAINING}",
}
# Flags, and a part of the message, in which dots stand for anything.
REFUSED: dict[str, dict[str, str]] = {
    "images": {
        "--config {keys}": "{keys}: there is no key batchsize in [data]; did you mean batch_size?",
        "--config {values}": '{values}: epochs in [training] is "three" (text), but must be a whole number of at '
        "least 1, or auto",
        "--data 1 --tiles 4x1 --image-size 3x64": "--tiles 4x1 cuts images into 4 tiles along their rows, of which "
        "they have only 3",
        "--images {nowhere}": "{nowhere}: no such file or folder",
        "--images {empty}": "{empty}/empty: this class has no images: add some, or remove the folder",
        "--images {images} --num-classes 2": "--num-classes 2, but the images have 3: a, b, c",
        "--model resnet19": "model 'resnet19' is unknown; the nearest names are ...'resnet18'",
        "--model gpt": "--model gpt takes tokens, which --images have not",
        "--optimizer AdamWW": "--optimizer AdamWW: torch.optim has no such class; did you mean AdamW?",
        "--scheduler CosineAnealingLR": "--scheduler CosineAnealingLR: torch.optim.lr_scheduler has no such class; "
        "did you mean CosineAnnealingLR?",
        "--optimizer AdamW --optimizer-options weight_decy=0.1": "--optimizer AdamW ...weight_decay?",
        "--model resnet_v2 --model-options dept=29": "model 'resnet_v2' has no option 'dept'; its options are 'depth'",
        "--model resnet_v2 --model-options depth=21": "depth=21 is not possible: resnet_v2 has depth 9n+2",
        "--model resnet_v2 --model-options depth=abc": "--model resnet_v2 does not take these options ...'abc'",
        "--optimizer AdamW --optimizer-options betas=0.9": "--optimizer AdamW does not take ...'betas': 0.9",
        "--optimizer AdamW --optimizer-options betas=[0.9]": "--optimizer AdamW does not take ...'betas': [0.9]",
        "--optimizer SGD --optimizer-options momentum=abc": "--optimizer SGD does not take ...'momentum': 'abc'",
        "--optimizer LBFGS": "--optimizer LBFGS ...closure",
        "--optimizer SparseAdam": "--optimizer SparseAdam ...dense gradients",
        "--scheduler StepLR": "--scheduler StepLR ...step_size",
        "--scheduler StepLR --scheduler-options step_size=abc": "--scheduler StepLR ...'step_size': 'abc'",
        "--scheduler StepLR --scheduler-options step_size=0": "--scheduler StepLR ...'step_size': 0",
        "--scheduler OneCycleLR --scheduler-options max_lr=0.1,total_steps=3": "--scheduler is for 3 steps, but there "
        "will be 4",
        "--batch-size 1": "--replicas 2 replicas cannot share a batch of 1: raise --batch-size",
        "--batch-size 9": "8 images to train on do not fill one batch of 9: choose a smaller --batch-size",
        "--device cuda": "device 'cuda' was asked for, but PyTorch sees no GPU here: use --device cpu",
        "--model unet": "the model's output has shape (4, 10, 32, 32), but --task classify...(batch, classes)",
        "--loss mse": "--loss mse takes ... shape (4, 10), and the targets (4,): ...cross_entropy for classes",
        "--loss bce": "--loss bce wants a 0 or 1 for each output...(4, 10), and targets (4,): ...cross_entropy",
        "--callbacks none": "--callbacks none must be my_code.py:NAME or package.module:NAME",
        "--lr 1e30": "step ...: the loss is not finite ...try a smaller --lr",
        "--model squeezenet1_0 --image-size 8": "too small",
    },
    "axes": {
        "--tiles 4": "--tiles 4 cuts along tokens, but what is trained on has the size 224x224",
        "--tiles 2x2x1 --image-size 64x64": "cuts along depth, rows, cols, but what is trained on has the size 64x64",
        "--tiles 2x1 --image-size 9x12x11 --model resnet18": "cannot take images of 3 x 9 x 12 x 11",
    },
    "streaming": {
        "--stream 4": "--stream 4: streaming cuts 1 axes, but images have 2",
        "--stream 2x400": "--stream 2x400: images of 144x144 pixels are too small for 2x400 tiles",
        "--stream 2x2 --stream-until none_such": "--stream 2x2: there is no 'none_such' in the first stage, whose",
        "--stream 2x2 --stream-until head": "--stream 2x2: the whole model would be streamed, up to head",
        "--stream auto": "--stream auto needs --memory-limit: the limit of a rank's memory, such as 6GiB",
        "--stream 2x2 --memory-limit 1GiB": "--memory-limit 1,024.0 MiB is for --stream auto, which chooses",
        "--stream auto --memory-limit 5MiB": "--stream auto: no tiles keep a rank within 5.0 MiB: the least would be",
        "--stream-until stem": "--stream-until stem says where streaming ends, but --stream is missing",
        "--patches 145": "--patch-size 145 of --model ...tiny_resnet: images of 144 x 144 px have no patches of 145 x",
        "--patches 32 --stream 2x2": "--stream is for images that the model sees whole",
        "--patches 32 --model squeezenet1_0 --model-options dropout=0.1": "it does not end in a linear layer of its "
        "classes",
        "--min-tissue 0.1": "--min-tissue 0.1 has no effect without --patch-size or --features: leave it out",
    },
    "text": {
        "--model gpt3": "model 'gpt3' is unknown; the nearest names are ...'gpt2'",
        "--tensor 2 --tensor-styles nowhere.toml": "--tensor-styles nowhere.toml: ",
        "--model resnet18": "--model resnet18 takes images, which --text has not",
        "--tensor 3": "has 2 heads of keys, which 3 ranks cannot share",
        "--stages 6": "GPT has 4 units, too few for 6 stages",
        "--tokenizer words": "--tokenizer words: must be bytes, or bpe:",
        "--num-classes 5": "--num-classes 5: of text it is that of different tokens, 257 here",
        "--stream 2x2": "--stream and --patch-size are for images, but --text was given",
        "--context 9999": "do not make one sample of context=9999",
        "--batch-size 400": "samples of text to train on do not fill one batch of 400",
        "--context 1 --tiles 2": "--tiles 2 cuts sequences into 2 tiles along their tokens, of which they have only 1",
    },
    "slides": {
        "--mpp 0.2": "coarser than",
        "--mpp 0.5 --level 1": "mpp and level both say",
        "--fit crop": "--fit crop is for whole images",
        "--mixup 0.2": "--mixup 0.2 mixes whole images",
        "--folds 1": "choose two folds or more",
        "--image-size 64": "more than --image-size 64x64",
        "--slide-column what": "what",
        "--images somewhere": "--slides and --images were both given",
        "--crops-each 4": "--crops-each is for windows of slides: say --fit crop, and --task segment or image",
        "--folds 3 --fold 7": "--fold 7 of --folds 3: choose",
        "--fold 1": "--fold 1 is one of several: say how many by --folds",
        "--max-side 4096": "there is no flag --max-side; leave it out",
    },
    "whole slides": {
        "--batch-size 2": "a microbatch has one",
        "--batch-size 1 --data 2": "--batch-size 2 and",
        "--batch-size 3 --data 2": "--batch-size 2 and",
        "--batch-size 2 --batch-ways 2": "--replicas alone",
        "--batch-size 1 --accumulate 2 --stages 2 --bidirectional 1": "leave it out",
        "--mixup 0.2": "--mixup",
        "--task segment --fit crop": "--image-size",
    },
    "features": {
        "--stream auto": "--stream",
        "--jitter 0.1": "--jitter",
        "--features nowhere": "no such folder of files of features",
        "--images somewhere": "--slides and --images were both given",
    },
}
SLOW = {"--stream auto --memory-limit 5MiB"}  # as plans of many tiles are tried


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, cohort: Path, corpus: Path) -> dict[str, Path]:
    """What the flags of cases name."""
    root = tmp_path_factory.mktemp("data")
    found = {name: root / name for name in ("nowhere", "empty", "images", "bags", "keys", "values")}
    write_images(found["images"], classes=("a", "b", "c"), count=4)
    write_images(found["empty"], count=2)
    (found["empty"] / "empty").mkdir()
    found["bags"].mkdir()
    features.bags(found["bags"])
    found["keys"].write_text("[data]\nbatchsize = 3\n")
    found["values"].write_text('[training]\nepochs = "three"\n')
    return {**found, "cohort": cohort, "corpus": corpus}


@pytest.mark.parametrize(
    ("base", "flags"),
    [
        pytest.param(base, flags, marks=[pytest.mark.exhaustive] * (flags in SLOW))
        for base, cases in REFUSED.items()
        for flags in cases
    ],
)
def test_what_cannot_be_done_is_refused_alike_on_all_ranks(
    ranks: Ranks, data: dict[str, Path], tmp_path: Path, base: str, flags: str
) -> None:
    argv = [*words(BASES[base].format(**data), flags.format(**data)), "--run-folder", str(tmp_path / "run")]
    num_ranks = 2 if base == "images" else 1  # where flags are no plan
    with suppress(ValueError):
        num_ranks = build_plan(parse(argv)).num_ranks
    (message,) = set(ranks(num_ranks).run(refused, train, argv))
    expected = REFUSED[base][flags].format(**data)
    assert re.search(".*".join(map(re.escape, expected.split("..."))), message), f"{message!r}\nnot {expected!r}"
    assert "\n" not in message


def test_a_plan_for_another_number_of_ranks_says_how_many(ranks: Ranks) -> None:
    (message,) = set(ranks(2).run(refused, train, [*TINY, "--tiles", "1x2", "--data", "2"]))
    assert message == (
        "tiles(1x2) x data(2) = 4 ranks, but mpirun started 2: start with mpirun -n 4, or change --tiles or --replicas"
    )


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


def refused_model(comm: Communicator, model: type[nn.Module], argv: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpi4dl.models.build", lambda *_, **__: model())
        return refused(comm, train, argv)


NO_RULE = r".*fft_fft2 in module Fourier has no exact rule for .*Either gather first"
NO_SIZE = r"(--model )?small_resnet: cannot take images of 3 x 32 x 32 \(channels, height, width\): expected 224 rows "
NO_SIZE += "but got 32$"


@pytest.mark.parametrize(
    ("model", "pattern", "flags"),
    [
        *((Fourier, NO_RULE, flags) for flags in ("", "--dry-run")),
        *((Particular, NO_SIZE, flags) for flags in ("", "--dry-run", "--data 1 --stages 2", "--data 1 --tiles 1x2")),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_its_own_words(
    ranks: Ranks, tmp_path: Path, model: type[nn.Module], pattern: str, flags: str
) -> None:
    argv = words(BASES["images"], "--model small_resnet --num-classes 2", flags, "--run-folder", tmp_path / "run")
    (message,) = set(ranks(2).run(refused_model, model, argv))
    assert re.match(pattern, message), message


# Jobs: one rank speaks, and the exit code is 2.


def test_a_mistake_of_one_rank_or_of_all_is_told_once() -> None:
    assert refusal(train_command(2, "--batchsize", "3")) == "there is no flag --batchsize; did you mean --batch-size?"
    job = train_command(1, *TINY, *another(1, *TINY, "--lrr", "0.2"))
    assert refusal(job) == "rank 1: there is no flag --lrr; did you mean --lr?"
    job = train_command(1, *TINY, "--lr", "0.1", *another(1, *TINY, "--lr", "0.2"))
    assert refusal(job) == (
        "the ranks were started differently: --lr is '0.1' on rank 0 but '0.2' on rank 1: "
        "start all ranks with the same command"
    )


def test_an_image_that_is_cut_off_is_named(tmp_path: Path) -> None:
    """It is found in the middle of training, by the rank that reads it, which need not be the one that speaks."""
    images = write_images(tmp_path / "images", count=2)
    bad = truncate(images / "light" / "1.png")
    (images / "light" / "0.png").unlink()
    flags = ("--batch-size", "2", "--run-folder", str(tmp_path / "run"))
    message = refusal(train_command(2, *TINY, "--tiles", "1x2", "--images", str(images), *flags))
    assert message == f"{bad}: cannot be decoded: image file is truncated; --on-bad-image skip leaves such images out"


SHORT = "--image-size 32 --batch-size 4 --num-workers 0 --val-fraction 0.4 --max-steps 1 --no-tensorboard".split()
DENSE = ("--model", "unet", "--model-options", "num_filters=4")
OTHER = ("--model", TINY_RESNET)  # whose outputs are no masks


@pytest.fixture
def masked(tmp_path: Path) -> tuple[str, ...]:
    """Flags of a folder of images and masks."""
    for kind in ("images", "masks"):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for number in range(8):
            pixels = np.full((32, 32, 3), 30 * number, np.uint8) if kind == "images" else np.eye(32, dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(tmp_path / "data" / kind / f"{number}.png")
    return "--images", str(tmp_path / "data")


def test_a_refused_run_leaves_no_folder(ranks: Ranks, masked: tuple[str, ...], tmp_path: Path) -> None:
    """So that the corrected command can name it again; and no run takes the folder of another one."""
    folder = tmp_path / "runs" / "one"
    flags = [*SHORT, *masked, "--tiles", "1x2", "--run-folder", str(folder)]
    for made_before in (False, True):
        if made_before:
            folder.mkdir(parents=True)
        for message in ranks(2).run(refused, train, [*flags, *OTHER]):
            assert "--model unet" in message
        assert folder.exists() == made_before
    ranks(2).run(train, [*flags, *DENSE])
    names = sorted(folder.iterdir())
    for message in ranks(2).run(refused, train, [*flags, *OTHER]):
        assert message.startswith(f"the run folder {folder} holds files already")
    assert sorted(folder.iterdir()) == names
    assert folder / "model.safetensors" in names


def planned(comm: Communicator, argv: list[str]) -> None:
    try:
        plan(argv)
    except ValueError as error:
        raise Refusal(str(error)) from error


@pytest.mark.parametrize(("act", "more"), [(planned, ()), (train, ("--dry-run",))])
@pytest.mark.sample(1)
def test_a_plan_of_outputs_that_are_no_masks_is_refused(
    ranks: Ranks, masked: tuple[str, ...], act: Callable[..., None], more: tuple[str, ...]
) -> None:
    flags = [*SHORT, *masked, *more]
    assert "--task segment" in ranks(1).run(refused, act, [*flags, *OTHER])[0]
    ranks(1).run(act, [*flags, *DENSE])


def test_a_loss_of_outputs_and_targets_takes_its_options(ranks: Ranks, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from torch.nn.functional import cross_entropy\n\n"
        "def loss(outputs, targets, scale=1.0):\n    return cross_entropy(outputs, targets) * scale\n"
    )
    flags = [*SHORT, *OTHER, "--num-samples", "16", "--loss", f"{own}:loss"]
    losses = []
    for scale in ("1.0", "3.0"):
        run = run_train(ranks, tmp_path / scale, *flags, "--loss-options", f"scale={scale}")
        losses.append(losses_of(run)[0])
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-3)
    assert "shift" in ranks(1).run(refused, train, [*flags, "--loss-options", "shift=1"])[0]
