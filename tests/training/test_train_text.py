"""The training command with --text: the losses of plain PyTorch by every plan, and going on by another one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.text.corpus import encode_corpus, find_documents, split_documents
from mpi4dl.datasets.text.dataset import TokenBatches, TokenDataset
from mpi4dl.datasets.text.tokenizer import ByteTokenizer
from mpi4dl.geometry import Box, Interval
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, plain_steps, read_metrics, run_train, said, words

SIZES = {"num_layers": 1, "hidden": 16, "num_heads": 2}
CONTEXT, BATCH = 12, 4
OPTIONS = ",".join(f"{key}={value}" for key, value in SIZES.items())
COMMON = (
    f"--model gpt --model-options {OPTIONS} --context {CONTEXT} --batch-size {BATCH} --num-workers 1 "
    "--val-fraction 0.3 --optimizer AdamW --lr 0.01 --lr-schedule constant --log-interval 1 "
    "--optimizer-options weight_decay=0.01 --no-tensorboard"
)


def exhaustive(plan: str) -> object:
    return pytest.param(plan, marks=pytest.mark.exhaustive)


PLANS = (
    exhaustive("--tensor 2"),
    exhaustive("--tiles 2 --data 2 --zero 1"),
    "--tensor 2 --data 2 --zero 3",
    "--stages 2 --microbatches 2",
    "--stages 2 --tensor 2 --balance flops",
    exhaustive("--stages 2 --balance measured"),
    exhaustive("--stages 2 --tiles 2,1 --balance memory --zero 2"),
    exhaustive(f"--stages 2 --balance 2,2 --model-options tied=false,{OPTIONS}"),
)


def documents_in(tokens: Tensor) -> Tensor:
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

    def losses() -> Iterator[Tensor]:
        for batch, _ in zip(loader.epoch(0), range(steps), strict=False):
            tokens = batch.tiles[0]
            logits = model(tokens, documents_in(tokens) if apart else None)
            yield F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())

    return plain_steps(torch.optim.AdamW(model.parameters(), lr=0.01), losses())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sample(1)
def test_text_by_every_plan(ranks: Ranks, corpus: Path, tmp_path: Path, plan: str) -> None:
    *losses, validation = read_metrics(
        run_train(ranks, tmp_path / "run", COMMON, "--text", corpus, "--max-steps 4", plan)
    )
    expected = plain_losses(corpus, tmp_path / "tokens", 4, "tied=false" not in plan)
    assert [each["loss"] for each in losses] == pytest.approx(expected, rel=1e-4)
    assert validation["bits_per_byte"] == pytest.approx(validation["loss"] / np.log(2), rel=0.1)  # ends are no bytes
    assert "accuracy" not in validation
    assert all(each["tokens_per_second"] > 0 and "images_per_second" not in each for each in losses)


def test_dry_runs_say_of_text_what_they_say_of_images(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    def dry_run(plan: str) -> str:
        flags = words(COMMON, "--text", corpus, "--run-folder", tmp_path / "run", plan, "--dry-run")
        return str(ranks(2).run(said, train, flags)[0])

    told = dry_run("--tensor 2")
    assert "tensor(2) x data(1), samples of 12 tokens, batches of 4" in told
    reduced = f"{BATCH * CONTEXT * SIZES['hidden'] * 4:,}"
    assert [line.split()[-1] for line in told.splitlines() if " linear " in line] == [reduced, reduced]
    assert "ranks that share features have " in told
    assert "--zero 0 (this plan)" in told
    told = dry_run(f"--stages 2 --model-options tied=false,{OPTIONS}")
    assert "tokens read of each batch" in told
    assert "rank 0: tokens 0-12 of samples 0-4" in told
    assert "units timed on their tiles" in told


@pytest.mark.parametrize("plan", ["--tiles 2 --tensor 2 --sequence", exhaustive("--data 2")])
def test_documents_apart(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    """No token sees another document; a model of tokens that two axes of ranks share ends by writing some."""
    short = tmp_path / "short"
    short.mkdir()
    for i in range(40):
        (short / f"{i:02}.txt").write_text("def f(x): return x"[i % 7 : i % 18 + 3])
    more = "--max-steps 4 --document-mask --eval-every none"
    run = run_train(ranks, tmp_path / "run", COMMON, "--text", short, more, plan)
    expected = plain_losses(short, tmp_path / "tokens", 4, True, True)
    assert losses_of(run) == pytest.approx(expected, rel=1e-4)
    assert expected != pytest.approx(plain_losses(short, tmp_path / "tokens", 4, True), rel=1e-4)


def test_a_run_goes_on_by_other_plans(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """Cut parameters are whole in checkpoints: begun by two ranks that share them, ended by one, and by ZeRO 3."""
    flags = (COMMON, "--text", corpus, "--eval-every none --max-steps")
    whole = losses_of(run_train(ranks, tmp_path / "whole", *flags, 4))
    begun = run_train(ranks, tmp_path / "begun", *flags, "2 --save-every 2 --tensor 2")
    for number, plan in enumerate(("--data 1", "--tensor 2 --data 2 --zero 3")):
        ended = run_train(ranks, tmp_path / str(number), *flags, "4 --resume", begun, plan)
        assert losses_of(ended) == pytest.approx(whole[2:], rel=1e-4)


def test_masked_tokens_of_byte_pairs(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    flags = (COMMON, "--model bert --text", corpus, "--task masked --tokenizer bpe:270 --max-steps 2")
    one, two = (run_train(ranks, tmp_path / str(count), *flags, f"--tensor {count}") for count in (1, 2))
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)
    assert "bits_per_byte" not in read_metrics(one)[-1]
    assert (one / "tokenizer.json").is_file()


@pytest.mark.exhaustive
def test_styles_of_a_file(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """Other matrices are cut, and the losses are the same."""
    styles = tmp_path / "styles.toml"
    styles.write_text('"blocks.*.feed_forward.up" = "column"\n"blocks.*.feed_forward.output" = "row"\n')
    flags = (COMMON, "--text", corpus, "--max-steps 2 --eval-every none --tensor 2 --tensor-styles", styles)
    run = run_train(ranks, tmp_path / "run", *flags)
    assert losses_of(run) == pytest.approx(plain_losses(corpus, tmp_path / "tokens", 2, True), rel=1e-4)
