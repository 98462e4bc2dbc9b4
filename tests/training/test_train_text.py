"""The training command with --text: the losses of plain PyTorch by every plan, going on by another one, refusals."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.text import ByteTokenizer, TokenDataset, encode_corpus, find_documents, split_documents
from mpi4dl.datasets.text.dataset import TokenBatches
from mpi4dl.geometry import Box, Interval
from mpi4dl.options import build
from mpi4dl.options.config import parse
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, read_metrics

SIZES = {"num_layers": 1, "hidden": 16, "num_heads": 2}
CONTEXT, BATCH = 12, 4
OPTIONS = ",".join(f"{key}={value}" for key, value in SIZES.items())
COMMON = (
    f"--model gpt --model-options {OPTIONS} --context {CONTEXT} --batch-size {BATCH} --num-workers 1 "
    "--val-fraction 0.3 --optimizer AdamW --lr 0.01 --lr-schedule constant --log-interval 1 "
    "--optimizer-options weight_decay=0.01 --no-tensorboard"
).split()
PLANS = (
    pytest.param("--tensor 2", marks=pytest.mark.exhaustive),
    pytest.param("--tiles 2 --data 2 --zero 1", marks=pytest.mark.exhaustive),
    "--tensor 2 --data 2 --zero 3",
    "--stages 2 --microbatches 2",
    "--stages 2 --tensor 2 --balance flops",
    pytest.param("--stages 2 --balance measured", marks=pytest.mark.exhaustive),
    pytest.param("--stages 2 --tiles 2,1 --balance memory --zero 2", marks=pytest.mark.exhaustive),
    pytest.param(f"--stages 2 --balance 2,2 --model-options tied=false,{OPTIONS}", marks=pytest.mark.exhaustive),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, random = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    words = ["if", "else", "né", "for", "->", "return", "\n", "  ", "x"]
    for i in range(9):
        (root / f"{i}.txt").write_text(" ".join(random.choice(words, 40)), encoding="utf-8")
    return root


def documents_in(tokens: torch.Tensor) -> torch.Tensor:
    """The numbers of the documents of tokens (N, T), counted one by one."""
    found = torch.zeros_like(tokens)
    for i in range(1, tokens.shape[1]):
        found[:, i] = found[:, i - 1] + (tokens[:, i - 1] == ByteTokenizer.end)
    return found


def plain_losses(corpus: Path, folder: Path, steps: int, tied: bool, apart: bool = False) -> list[float]:
    """Those of a plain loop over the samples in the order of the seed, with documents `apart` or not."""
    file = encode_corpus(find_documents(corpus), ByteTokenizer(), folder)
    training, _ = split_documents(file, 0.3, 0)
    loader = Loader(
        TokenBatches(TokenDataset(training, CONTEXT)),
        None,
        BATCH,
        lambda samples: [Box(Interval(0, samples), Interval(0, CONTEXT))],
        shuffle=True,
        drop_last=True,
    )
    torch.manual_seed(0)
    model = models.build("gpt", None, vocabulary=257, context=CONTEXT, tied=tied, **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch, _ in zip(loader.epoch(0), range(steps), strict=False):
        optimizer.zero_grad()
        tokens = batch.tiles[0]
        logits = model(tokens, documents_in(tokens) if apart else None)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sample(1)
def test_text_by_every_plan(ranks: Ranks, corpus: Path, tmp_path: Path, plan: str) -> None:
    flags = [*COMMON, "--text", str(corpus), "--max-steps", "4"]
    flags += [*plan.split(), "--run-folder", str(tmp_path / "run")]
    ranks(build.build_plan(parse(flags)).num_ranks).run(train, flags)
    *losses, validation = read_metrics(tmp_path / "run")
    expected = plain_losses(corpus, tmp_path / "tokens", 4, "tied=false" not in plan)
    assert [each["loss"] for each in losses] == pytest.approx(expected, rel=1e-4)
    assert validation["bits_per_byte"] == pytest.approx(validation["loss"] / np.log(2), rel=0.1)  # ends are no bytes
    assert "accuracy" not in validation
    assert all(each["tokens_per_second"] > 0 and "images_per_second" not in each for each in losses)


def dry_run(comm: Communicator, flags: list[str]) -> str:
    with redirect_stdout(StringIO()) as said:
        train(comm, [*flags, "--dry-run"])
    return said.getvalue()


def test_dry_runs_say_of_text_what_they_say_of_images(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    flags = [*COMMON, "--text", str(corpus), "--run-folder", str(tmp_path / "run")]
    said = ranks(2).run(dry_run, [*flags, "--tensor", "2"])[0]
    assert "tensor(2) x data(1), samples of 12 tokens, batches of 4" in said
    reduced = f"{BATCH * CONTEXT * SIZES['hidden'] * 4:,}"
    assert [line.split()[-1] for line in said.splitlines() if " linear " in line] == [reduced, reduced]
    assert "ranks that share features have " in said
    assert "--zero 0 (this plan)" in said
    staged = ["--stages", "2", "--model-options", f"tied=false,{OPTIONS}"]
    said = ranks(2).run(dry_run, [*flags, *staged])[0]
    assert "tokens read of each batch" in said
    assert "rank 0: tokens 0-12 of samples 0-4" in said
    assert "units timed on their tiles" in said


@pytest.mark.parametrize(
    "plan", ["--tiles 2 --tensor 2 --sequence", pytest.param("--data 2", marks=pytest.mark.exhaustive)]
)
def test_documents_apart(ranks: Ranks, corpus: Path, tmp_path: Path, plan: str) -> None:
    """No token sees another document; a model of tokens that two axes of ranks share ends by writing some."""
    short = tmp_path / "short"
    short.mkdir()
    for i in range(40):
        (short / f"{i:02}.txt").write_text("def f(x): return x"[i % 7 : i % 18 + 3])
    flags = [*COMMON, "--text", str(short), "--max-steps", "4"]
    flags += ["--document-mask", *plan.split()]
    flags += ["--eval-every", "none", "--run-folder", str(tmp_path / "run")]
    ranks(build.build_plan(parse(flags)).num_ranks).run(train, flags)
    expected = plain_losses(short, tmp_path / "tokens", 4, True, True)
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
    assert expected != pytest.approx(plain_losses(short, tmp_path / "tokens", 4, True), rel=1e-4)


def test_a_run_goes_on_by_other_plans(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """Cut parameters are whole in checkpoints: begun by two ranks that share them, ended by one, and by ZeRO 3."""
    flags = [*COMMON, "--text", str(corpus), "--eval-every", "none"]
    whole = tmp_path / "whole"
    ranks(1).run(train, [*flags, "--max-steps", "4", "--run-folder", str(whole)])
    begun = tmp_path / "begun"
    ranks(2).run(train, [*flags, "--max-steps", "2", "--save-every", "2", "--tensor", "2", "--run-folder", str(begun)])
    for number, plan in enumerate(("--data 1", "--tensor 2 --data 2 --zero 3")):
        ended = tmp_path / str(number)
        more = ["--max-steps", "4", "--resume", str(begun), "--run-folder", str(ended), *plan.split()]
        ranks(build.build_plan(parse([*flags, *more])).num_ranks).run(train, [*flags, *more])
        assert losses_of(ended) == pytest.approx(losses_of(whole)[2:], rel=1e-4)


def test_masked_tokens_of_byte_pairs(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    flags = ["bert" if flag == "gpt" else flag for flag in COMMON] + ["--text", str(corpus), "--task", "masked"]
    flags += ["--tokenizer", "bpe:270", "--max-steps", "2"]
    for name, plan in (("one", ""), ("two", "--tensor 2")):
        run = [*flags, *plan.split(), "--run-folder", str(tmp_path / name)]
        ranks(2 if plan else 1).run(train, run)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    assert "bits_per_byte" not in read_metrics(tmp_path / "one")[-1]
    assert (tmp_path / "one" / "tokenizer.json").is_file()


@pytest.mark.exhaustive
def test_styles_of_a_file(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """Other matrices are cut, and the losses are the same."""
    styles = tmp_path / "styles.toml"
    styles.write_text('"blocks.*.feed_forward.up" = "column"\n"blocks.*.feed_forward.output" = "row"\n')
    flags = [
        *COMMON,
        "--text",
        str(corpus),
        "--max-steps",
        "2",
        "--eval-every",
        "none",
    ]
    flags += ["--tensor", "2", "--tensor-styles", str(styles), "--run-folder", str(tmp_path / "run")]
    ranks(2).run(train, flags)
    assert losses_of(tmp_path / "run") == pytest.approx(plain_losses(corpus, tmp_path / "tokens", 2, True), rel=1e-4)


REFUSED = {
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
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_trained(ranks: Ranks, corpus: Path, tmp_path: Path, flags: str) -> None:
    run = [*COMMON, "--text", str(corpus), *flags.split()]
    run += ["--run-folder", str(tmp_path / "run")]
    assert REFUSED[flags] in ranks(build.build_plan(parse(run)).num_ranks).run(refused, run)[0]


def refused(comm: Communicator, flags: list[str]) -> str:
    with pytest.raises(Refusal) as caught:
        train(comm, flags)
    return str(caught.value)


def test_images_are_no_text(tmp_path: Path) -> None:
    flags = ["--model", "gpt", "--num-samples", "8", "--run-folder", str(tmp_path / "run")]
    assert "--model gpt takes tokens, which --images have not" in refused(world(), flags)
