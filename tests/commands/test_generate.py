"""The generating command: what a trained run goes on with is the same by every plan, and that of plain PyTorch."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpi4dl import models
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.datasets.text.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from mpi4dl.export import export
from mpi4dl.generate import generate
from mpi4dl.text.loading import find_trained, hold_text_model
from mpi4dl.text.options import Ranks as Ranking
from mpi4dl.text.products import PackedWeight
from mpi4dl.train import train
from tests.pool.ranks import Ranks

SIZES = {"num_layers": 2, "hidden": 16, "num_heads": 2}
CONTEXT = 24
OPTIONS = ",".join(f"{key}={value}" for key, value in SIZES.items())
TRAINED = (
    f"--model gpt --model-options {OPTIONS} --context {CONTEXT} --batch-size 4 --num-workers 1 --val-fraction 0.3 "
    "--optimizer AdamW --lr 0.05 --epochs 3 --save-every epoch --keep 1 --eval-every none --no-tensorboard"
).split()
PROMPT = "if né"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on a text in which each word tells the next: of bytes, of byte pairs, and without a checkpoint."""
    root = tmp_path_factory.mktemp("generate")
    (root / "texts").mkdir()
    for i in range(9):
        (root / "texts" / f"{i}.txt").write_text("if né: return 1\nelse: yield €\n" * (i + 3), encoding="utf-8")
    common = [*TRAINED, "--text", str(root / "texts")]
    train(world(), [*common, "--run-folder", str(root / "bytes")])
    train(world(), [*common, "--tokenizer", "bpe:270", "--run-folder", str(root / "pairs"), "--document-mask"])
    train(world(), [*common, "--save-every", "none", "--run-folder", str(root / "bare"), "--ema", "0.99"])
    return root


def said(comm: Communicator, *argv: str) -> str:
    with redirect_stdout(StringIO()) as out:
        generate(comm, argv)
    return out.getvalue()


@torch.no_grad()
def plain(run: Path, prompt: str, num_tokens: int) -> str:
    """What a plain loop over the exported weights goes on with."""
    pairs = (run / "tokenizer.json").exists()
    tokenizer: Tokenizer = BPETokenizer.load(run / "tokenizer.json") if pairs else ByteTokenizer()
    export(run, run.parent / f"{run.name}.pt")
    model = models.build("gpt", None, vocabulary=tokenizer.vocabulary, context=CONTEXT, **SIZES).eval()
    model.load_state_dict(torch.load(run.parent / f"{run.name}.pt"))
    tokens = tokenizer.encode(prompt).tolist()
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] == tokenizer.end:
            break
    return tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("run", "plan"),
    [
        ("bytes", "--data 1"),
        ("pairs", "--tensor 2"),
        ("bare", "--stages 2"),
        pytest.param("bytes", "--data 2", marks=pytest.mark.exhaustive),
        pytest.param("pairs", "--stages 2 --tensor 2", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.sample(2)
def test_greedy_text_by_every_plan(ranks: Ranks, folder: Path, run: str, plan: str) -> None:
    argv = [str(folder / run), "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "12", *plan.split()]
    num_ranks = 4 if plan.count("2") == 2 else 2 if "2" in plan else 1
    assert ranks(num_ranks).run(said, *argv)[0] == plain(folder / run, PROMPT, 12) + "\n"


def test_text_is_that_of_the_average(folder: Path) -> None:
    argv = [str(folder / "bare"), "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "12"]
    assert said(world(), *argv) == plain(folder / "bare", PROMPT, 12) + "\n"
    stored = load_file(folder / "bare" / "ema.safetensors")
    held, _ = hold_text_model(world(), find_trained(world(), folder / "bare"), Ranking())
    (module,) = held.modules_of.values()
    own = {name: x.plain() if isinstance(x, PackedWeight) else x for name, x in module.state_dict().items()}
    there = [name for name in stored if name in own]
    assert len(there) > 10
    assert all(torch.equal(own[name], stored[name]) for name in there)
    last = load_file(folder / "bare" / "model.safetensors")
    assert any(not torch.equal(value, last[name]) for name, value in stored.items())


def test_many_prompts_as_json(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text('"if né"\n\n{"prompt": "else:", "id": 7}\n')
    argv = [str(folder / "bytes"), "--prompts", str(folder / "prompts.jsonl"), "--num-samples", "2", "--json"]
    argv += ["--max-tokens", "9", "--seed", "3", "--stop", r"\n"]
    found: list[dict[str, Any]] = [json.loads(line) for line in said(world(), *argv).splitlines()]
    assert [(each["prompt"], each["sample"]) for each in found] == [(p, n) for p in ("if né", "else:") for n in (0, 1)]
    assert all(each["usage"]["completion_tokens"] == len(each["tokens"]) <= 9 for each in found)
    assert not any("\n" in each["text"] for each in found)
    assert [json.loads(line) for line in said(world(), *argv).splitlines()] == found
    two = said(world(), *[each for each in argv if each != "--json"])
    assert two == "".join(f"--- {e['prompt']!r}, sample {e['sample'] + 1}\n{e['prompt']}{e['text']}\n" for e in found)


def test_a_rank_computes_with_the_threads_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    said(world(), str(folder / "bytes"), "--prompt", PROMPT, "--max-tokens", "1", "--threads", "3")
    assert asked == [3]


def test_a_checkpoint_continues_a_prompt(folder: Path) -> None:
    (checkpoint,) = (folder / "bytes" / "checkpoints").glob("step-*")
    argv = [str(checkpoint), "--prompt", PROMPT]
    assert said(world(), *argv, "--temperature", "0", "--max-tokens", "5") == plain(folder / "bytes", PROMPT, 5) + "\n"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "name the folder of a run, or a checkpoint first"),
        (["nowhere"], "nowhere: there is no such file or folder"),
        (["bytes", "--tensor", "2"], "tensor(2) x data(1) = 2 ranks, but mpirun started 1"),
        (["bytes", "--tensr", "2"], "there is no flag --tensr; did you mean --tensor?"),
        (["bytes", "--top-p", "1.5"], "--top-p is '1.5', but must be a number greater than 0 and at most 1"),
        (["bytes", "--prompt", "x" * 24], "the prompt has 24 tokens, but prompt and generated tokens together"),
        (["bytes", "--prompts", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["bytes", "--prompt", "x", "--prompts", "y"], "--prompt and --prompts both say what the prompt is"),
        (["bytes", "--no-average"], "there is no flag --no-average; name the file model.safetensors"),
        (["bytes", "--prompts", "bytes/config.toml"], "line 1 of bytes/config.toml is no JSON"),
        (["bytes", "--prompts", "numbers.jsonl"], "line 1 of numbers.jsonl is no prompt"),
        (["bytes", "--stop", '["a", 3]'], "--stop is '[\"a\", 3]', but must be a text"),
        (["unfinished"], "unfinished has no weights yet"),
        (["images"], "--model resnet18 was trained on images: it writes no text"),
        (["other"], "fits to nothing of the model"),
    ],
)
def test_what_cannot_be_generated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], complaint: str
) -> None:
    monkeypatch.chdir(folder)
    config = (folder / "bytes" / "config.toml").read_text()
    for name, text in (
        ("unfinished", config),
        ("images", '[model]\nmodel = "resnet18"\n'),
        ("other", config.replace("hidden = 16", "hidden = 32")),
    ):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.toml").write_text(text)
    (folder / "other" / "model.safetensors").write_bytes((folder / "bare" / "model.safetensors").read_bytes())
    (folder / "numbers.jsonl").write_text("3\n")
    with pytest.raises(Refusal) as caught:
        generate(world(), argv)
    assert complaint in str(caught.value)


SPOIL = """
import torch
class Spoil:
    def on_step_end(self, run, result):
        if run.engine.num_steps == 2:
            with torch.no_grad():
                next(run.engine.stages.parameters()).view(-1)[0] = float("nan")
"""


def test_checkpoints_with_nan_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their checksums are right: they were written so."""
    (tmp_path / "spoil.py").write_text(SPOIL)
    (tmp_path / "texts").mkdir()
    for i in range(9):
        (tmp_path / "texts" / f"{i}.txt").write_text("else: yield 1\n" * 9)
    flags = [*TRAINED, "--text", str(tmp_path / "texts")]
    flags += ["--run-folder", str(tmp_path / "run"), "--save-every", "2", "--callbacks", f"{tmp_path}/spoil.py:Spoil"]
    flags += ["--lr-schedule", "constant", "--warmup", "0"]
    train(world(), [*flags, "--max-steps", "2"])
    capsys.readouterr()
    generate(world(), [str(tmp_path / "run"), "--max-tokens", "1"])
    assert "NaN or infinite, the first in " in capsys.readouterr().err
    with pytest.raises(Refusal):
        train(world(), [*flags, "--max-steps", "3", "--resume", "auto"])
    assert "NaN or infinite, the first in " in capsys.readouterr().out
