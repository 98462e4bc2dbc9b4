"""The planning command: what it prints and draws, and how it refuses; overviews themselves have their own tests."""

import errno
import io
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import PIL.Image
import pytest
import torch
from torch import Tensor, nn

import mpi4dl._progress
from mpi4dl._progress import CLEAR, ProgressLine
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.options import build
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse
from mpi4dl.options.sources import SyntheticSource
from mpi4dl.plan import main, training_flags
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT, python
from tests.support.commands import settled, write_images
from tests.support.tiny import TINY_RESNET, tiny_resnet

SMALL = ["--model", "small_resnet", "--image-size", "64"]
TINY = ["--model", TINY_RESNET, "--image-size", "64"]
STAGES = [*SMALL, "--stages", "2", "--microbatches", "4"]


FOUND = ("--replicas 2", "--tiles 1x2", "--stages 2")


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the command says what it does, which is no part of what it prints."""
    for name in ("QUIET_SECONDS", "FIRST_SECONDS"):
        monkeypatch.setattr(mpi4dl._progress, name, 1e9)


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one message that the command ends with, with exit code 2."""
    with pytest.raises(SystemExit) as left:
        main(flags)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpi4dl: ")
    return line.removeprefix("mpi4dl: ")


@pytest.mark.parametrize("name", ["resnet999", "timm/resnet999", "smp/UNett"])
def test_a_model_that_there_is_not_is_refused_before_data_is_read(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpi4dl.training.setup.open_samples", lambda config: pytest.fail("read data"))
    timm = SimpleNamespace(is_model=lambda name: False, list_models=lambda like="": ["resnet18"])
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", SimpleNamespace(MODEL_ARCHITECTURES_MAPPING={}))
    assert (name.partition("/")[2] or name) in refusal(capsys, "--model", name)


def test_it_says_what_would_be_trained_and_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    main([*STAGES, "--tiles", "1x2,1x1", "--balance", "flops", "--model-options", "pool=max"])
    lines = capsys.readouterr().out.splitlines()
    plan = "stages(2: 1x2 + 1x1 tiles) x data(1), microbatches(4), 1f1b"
    assert lines[0] == f"small_resnet, 177,178 parameters, on 3 ranks: {plan}, images of 64 x 64 px, batches of 4"
    assert lines[1] == (
        "start: mpirun -n 3 python -m mpi4dl.train --model small_resnet --image-size 64 --stages 2 --microbatches 4 "
        "--tiles 1x2,1x1 --balance flops --model-options pool=max"
    )
    assert lines[3].startswith("stage  ranks  tiles")
    assert "50 GFLOP/s a rank" in "".join(lines)
    assert lines[-2].startswith("rank 2 |")


def test_the_images_say_how_many_classes_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_images(tmp_path / "my slides", ("dark", "light", "between"))
    for more, num_classes in (([], 3), (["--num-classes", "10"], 10)):
        main([*TINY, *more, "--images", str(folder)])
        told = capsys.readouterr().out
        assert f"{sum(p.numel() for p in tiny_resnet(num_classes).parameters()):,} parameters" in told
        assert f"--images '{folder}'\n" in told


def refused(comm: Communicator, flags: list[str]) -> str:
    with pytest.raises(Refusal) as caught:
        train(comm, [*flags, "--no-tensorboard"])
    return str(caught.value)


UNTRAINABLE = [
    "--images /nonexistent",
    "--images {folder} --num-classes 1",
    "--images {folder} --batch-size 40",
    "--model unet",
    "--model resnet18 --model-options num_class=3",
    "--optimizer AdamWW",
    "--scheduler Step",
    "--scheduler OneCycleLR --scheduler-options max_lr=0.1,total_steps=3",
    "--scheduler-options gamma=1",
    "--low-precision-weights",
    "--batch-size 1 --data 2",
    "--loss bce",
    "--loss mse",
    "--loss focal --mixup 0.2",
    "--task multilabel",
    "--task survival --microbatches 2",
    "--freeze *",
    "--lr-of nothing*=1",
    "--unfreeze 1:*",
    "--aggregator mean",
]


@pytest.mark.parametrize("flags", UNTRAINABLE)
@pytest.mark.sample(7)
def test_what_training_refuses_is_not_planned(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: str
) -> None:
    folder = write_images(tmp_path / "slides")
    given = [*SMALL, "--run-folder", str(tmp_path / "run"), "--max-steps", "4", *flags.format(folder=folder).split()]
    num_ranks = 2 if "--data" in flags else 1
    (told,) = set(ranks(num_ranks).run(refused, given))
    assert re.sub(r"^\w+: (?=the model|--loss|targets)", "", refusal(capsys, *given)) == told


@pytest.mark.parametrize("flags", ["ASGD", "Adafactor", "SGD --optimizer-options fused=true"])
def test_optimizers_that_no_kernel_runs_on_shapes_are_planned(flags: str) -> None:
    main([*TINY, "--optimizer", *flags.split()])


OWN_LOSSES = """
from torch.nn import functional as F
def alone(outputs): return outputs.sum()
def of_each(outputs, targets): return F.cross_entropy(outputs, targets, reduction="none")
def pair(outputs, targets): return outputs.sum(), targets.sum()
def looking(outputs, targets): return F.cross_entropy(outputs, targets) if outputs.sum() < 1 else outputs.mean()
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alone", "takes 1 positional argument but 2 were given"),
        ("of_each", "the loss must be one number, but has shape (4,): take its mean"),
        ("pair", "the loss must be a tensor of one number, but is a tuple"),
        ("looking", None),
    ],
)
def test_an_own_loss_is_tried_on_the_labels_of_a_batch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, message: str | None
) -> None:
    (tmp_path / "own.py").write_text(OWN_LOSSES)
    given = [*TINY, "--loss", f"{tmp_path}/own.py:{name}"]
    if message is None:
        main(given)
    else:
        assert message in refusal(capsys, *given)


class _Turning(nn.Module):
    """Calls what no tensor that is spread has a rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.fft2(x).real.mean((2, 3)))


def test_an_operator_without_a_rule_is_seen_before_there_are_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build_model", lambda *_: _Turning())
    main(SMALL)
    assert "fft" in refusal(capsys, *SMALL, "--tiles", "1x2")


class Deciding(nn.Sequential):
    """Looks at a value, which there is none of before a step."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(tiny_resnet(num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_a_model_that_looks_at_values_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, ranks: Ranks
) -> None:
    flags = ["--model", f"{__file__}:Deciding", "--image-size", "64", "--tiles", "1x2"]
    main(flags)
    assert "tiles(1x2)" in capsys.readouterr().out
    ranks(2).run(train, [*flags, "--dry-run", "--run-folder", str(tmp_path / "run")])


@pytest.mark.parametrize(
    "flags", ["--task segment", "--optimizer AdamWW", "--scheduler Step", "--metrics none_such", "--monitor none_such"]
)
def test_the_search_refuses_what_no_plan_trains(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    given = [*TINY, *flags.split()]
    assert refusal(capsys, *given, "--ranks", "1") == refusal(capsys, *given)


def test_too_many_open_files_is_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "slides")

    monkeypatch.setattr(SyntheticSource, "open", fail)
    assert refusal(capsys, *SMALL) == "[Errno 24] Too many open files: 'slides'"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--timeline", "a.png", "--tiles", "2x2"], ["--tiles", "2x2"]),
        (["--mean", "-0.5", "--timeline=a.png", "--flip", "--ranks=3"], ["--mean", "-0.5", "--flip"]),
        (["--search", "--ranks", "4", "--memory=4GiB", "--lr", "1"], ["--lr", "1"]),
        (["--config", "my run.toml", "--no-flip"], ["--config", "my run.toml", "--no-flip"]),
    ],
)
def test_the_training_has_the_flags_that_are_not_the_plans(given: list[str], kept: list[str]) -> None:
    assert training_flags(given) == kept


def test_a_timeline_is_drawn_as_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*STAGES, "--timeline", str(tmp_path / "t.png")])
    assert capsys.readouterr().out.splitlines()[-1] == f"timeline: {tmp_path / 't.png'}"
    with PIL.Image.open(tmp_path / "t.png") as picture:
        assert min(picture.size) > 200
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10


def test_a_timeline_is_drawn_as_text(tmp_path: Path) -> None:
    main([*STAGES, "--timeline", str(tmp_path / "t.txt")])
    lines = (tmp_path / "t.txt").read_text().splitlines()
    assert [line[:8] for line in lines[:2]] == ["rank 0 |", "rank 1 |"]
    assert "bubble" in lines[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--timelins", "x.png"], "there is no flag --timelins; did you mean --timeline?"),
        (["--timeline", "x.pdf"], "--timeline x.pdf: the name must end in .png or .txt"),
        (["--timeline", "/nowhere/x.txt"], "--timeline /nowhere/x.txt: No such file or directory"),
        (["--search"], "--search, --scaling and --time-only need --ranks: for how many ranks to look"),
        (["--memory", "4GiB"], "--memory is what each of --ranks ranks has: say how many there are"),
        (["--memory", "4"], "--memory is '4', but must be a size such as 4GiB"),
        (["--rank-gflops", "2"], "there is no flag --rank-gflops; leave it out, or describe the machine by --machine"),
        (["--stages", "20"], "small_resnet: Sequential has 11 units, too few for 20 stages"),
        (["--stages", "2", "--balance", "3,4"], "small_resnet: balance 3,4 puts 7 units into 2 stages"),
        (["--stages", "2", "--tiles", "1x1,1x1,1x1"], "--tiles has 3 entries, but --stages 2 needs 1 for all"),
        (["--data", "8"], "--replicas 8 replicas cannot share a batch of 4: raise --batch-size"),
        (["--model", "smal_resnet"], "model 'smal_resnet' is unknown; the nearest names are 'small_resnet'"),
        (["--model-options", "depht=3"], "model 'small_resnet' has no option 'depht'; its options are"),
    ],
)
def test_what_cannot_be_is_refused_with_one_message(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *SMALL, *flags).startswith(message)


def test_units_are_timed_once(capsys: pytest.CaptureFixture[str]) -> None:
    main([*STAGES, "--tiles", "1x2,1x1"])
    first = capsys.readouterr().out
    assert "units timed on their tiles, on 1 thread here" in first
    main([*STAGES, "--tiles", "1x2,1x1"])
    assert capsys.readouterr().out == first


def test_the_search_names_plans_that_can_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--search", "--ranks", "2", "--memory", "4GiB", *TINY, "--batch-size", "2", "--lr", "0.5"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("plans for 2 ranks looked at, 0 of which need more than 4,096 MiB")
    commands = [line for line in lines if " mpirun -n 2 python -m mpi4dl.train " in line]
    assert all(" --lr 0.5 " in command and "--search" not in command for command in commands)
    assert {"--replicas 2", "--tiles 1x2", "--stages 2"} <= {flag for flag in FOUND for one in commands if flag in one}


def test_the_search_names_no_plan_whose_microbatch_batch_norm_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """A microbatch of a single sample, whose last images are of one pixel."""
    machine = Path(ROOT) / "examples" / "machines" / "lassen.toml"
    small = ["--model", "small_resnet", "--image-size", "32", "--batch-size", "2", "--machine", str(machine)]
    main(["--ranks", "2", *small, "--tiles", "1x2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "--tiles: searched, not kept as given; leave out --ranks to see the plan of these flags"
    commands = [line for line in lines if " mpirun -n 2 " in line]
    assert any("--tiles 1x2" in command for command in commands)
    assert not any("--microbatches 2" in command for command in commands)


def test_the_search_names_plans_for_images_of_their_own_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """A microbatch has one of them."""
    main(["--search", "--ranks", "2", *TINY, "--fit", "own", "--batch-size", "2"])
    commands = [line.partition(" mpi4dl.train ")[2] for line in capsys.readouterr().out.splitlines()]
    found = [parse(shlex.split(command)) for command in commands if command]
    assert {config.parallel.data for config in found} == {1, 2}
    for config in found:
        build_plan(config)


@pytest.mark.exhaustive
def test_ranks_and_memory_are_enough_to_be_told_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit as it is does so recomputed or streamed: on shapes, whatever the size of the image."""
    size = ["--model-options", "num_filters=4", "--image-size", "16384", "--batch-size", "1"]
    main(["--model", "small_resnet", *size, "--memory", "1GB", "--ranks", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("need more than 954 MiB")
    assert "stream " in lines[3]
    command = next(line for line in lines if line.startswith("1: "))
    assert command.startswith("1: mpirun -n 1 python -m mpi4dl.train --model small_resnet --model-options ")
    assert " --stream " in command
    assert "--memory" not in command
    shown = float(lines[3].split()[2].replace(",", ""))
    main([*command.split("mpi4dl.train ")[1].split()])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--zero") and "(this" in line]
    assert float(row.split()[-1].replace(",", "")) == pytest.approx(shown, rel=0.02)


def test_the_options_can_be_printed_for_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*STAGES, "--print-config"])
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    assert parse(["--config", str(tmp_path / "run.toml")]) == settled(STAGES)


def test_the_command_runs_as_a_module_without_mpi() -> None:
    code = (
        "import runpy, sys\nimport mpi4dl._progress as told\ntold.QUIET_SECONDS = told.FIRST_SECONDS = 1e9\n"
        f"sys.argv = ['plan', *{TINY}]\n"
        "runpy.run_module('mpi4dl.plan', run_name='__main__')\nprint('mpi4py' in sys.modules)"
    )
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "False"


def test_it_says_what_the_memory_of_a_rank_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Of weights of 2 bytes, gradients of 2, masters and Adam's state of 12, over two ranks."""
    flags = ["--precision", "bf16", "--low-precision-weights", "--optimizer", "Adam", "--data", "2", "--zero", "2"]
    options = "image_size=32,patch=8,num_layers=8,hidden=256,num_heads=4"
    main(["--model", "vit", "--image-size", "32", "--model-options", options, *flags])
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("memory of the rank that needs most"))
    rows = [line.replace(" (this plan)", "").split() for line in lines[begin + 2 : begin + 6]]
    assert [row[1] for row in rows] == ["0", "1", "2", "3"]
    assert "--zero 2 (this plan)" in lines[begin + 4]
    shares = [[float(cell.replace(",", "")) for cell in row[3:6]] for row in rows]
    weights = shares[0][0]
    for found, per_weight in zip(shares, [(1, 1, 6), (1, 1, 3), (1, 0.5, 3), (0.5, 0.5, 3)], strict=True):
        assert found == pytest.approx([weights * part for part in per_weight], rel=0.01)


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    (tmp_path / "texts").mkdir()
    for i in range(4):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i} words " * 20, encoding="utf-8")
    options = "num_layers=1,num_heads=2,hidden=16"
    flags = [
        "--text",
        str(tmp_path / "texts"),
        "--run-folder",
        str(tmp_path / "run"),
        "--context",
        "16",
        "--val-fraction",
        "0.6",
    ]
    return [*flags, "--model", "gpt", "--model-options", options]


def test_text_is_planned_with_what_ranks_share_of_layers(text: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*text, "--tensor", "2", "--data", "2", "--balance", "flops"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("on 4 ranks: tiles(1) x tensor(2) x data(2), samples of 16 tokens, batches of 4")
    (sums,) = (line for line in lines if line.startswith("ranks that share features"))
    assert sums.endswith("add up 0.0 MiB in a step; of that each sends 2 x 1 / 2 round a ring, 0.0 MiB")
    assert "  rank 3: tokens 0-16 of samples 2-4" in lines


SEARCHED = {
    "experts": ["--experts", "2"],
    "whole experts": ["--moe", "expert", "--tensor", "2", "--sequence"],
    "accumulated": ["--accumulate", "2", "--stages", "2", "--microbatches", "2", "--balance", "2,2"],
}


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.sample(1)
def test_the_commands_of_a_search_start(
    ranks: Ranks, text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Whatever plan the flags of the user have: those of a model with experts in particular."""
    given = [*text, "--model-options", "num_layers=1,num_heads=2,hidden=16,num_experts=4", *SEARCHED[name]]
    main([*given, "--ranks", "2", "--batch-size", "4"])
    lines = capsys.readouterr().out.splitlines()
    commands = [line.partition("mpi4dl.train ")[2] for line in lines if " mpirun -n 2 " in line]
    assert len(commands) > 3
    for command in commands[::9]:
        ranks(2).run(train, [*shlex.split(command), "--dry-run", "--run-folder", str(tmp_path / "run")])


def test_the_search_shares_layers_within_a_node(text: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*text, "--ranks", "2", "--batch-size", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:2] == ["tokens/s", "memory"]
    assert any(line.endswith("--tensor 2") for line in lines)
    assert not any("batch norm" in line for line in lines)
    main([*text, "--ranks", "2", "--ranks-per-node", "1", "--batch-size", "2"])
    assert "--tensor" not in capsys.readouterr().out
    assert refusal(capsys, *text, "--ranks", "3", "--ranks-per-node", "2").startswith("--ranks 3 are no multiple of")


def test_progress_is_told_while_the_command_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, in lines of a file, and in one line of a terminal that is empty in the end."""

    class Heard(io.StringIO):
        def __init__(self, terminal: bool) -> None:
            super().__init__()
            self.terminal, self.told = terminal, threading.Event()

        def isatty(self) -> bool:
            return self.terminal

        def write(self, text: str) -> int:
            written = super().write(text)
            if "3 of 20" in text:
                self.told.set()
            return written

    for terminal in (False, True):
        heard = Heard(terminal)
        with ProgressLine(heard, seconds=0.001) as progress:
            progress("plans", 3, 20)
            assert heard.told.wait(60)
        lines = heard.getvalue()
        assert ("\n" in lines, lines.endswith(CLEAR)) == (not terminal, terminal)
    assert capsys.readouterr() == ("", "")


def test_the_search_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(ProgressLine, "__call__", lambda self, *words: told.append((*words, 0, 0)[:3]))
    main(["--search", "--ranks", "2", *TINY, "--batch-size", "2"])
    total = told[-1][2]
    assert [done for _, done, among in told if among] == list(range(total))
    assert total > 2


QUIET = {
    "plan": ["plan", "--print-config"],
    "plan, help": ["plan", "--help"],
    "export, help": ["export", "--help"],
    "report, help": ["report", "--help"],
    "train, help": ["train", "--help"],
    "train, all help": ["train", "--help", "all"],
    "doctor, help": ["doctor", "--help"],
}


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.sample(3)
def test_a_command_whose_reader_is_gone_ends_in_silence(name: str) -> None:
    """As behind `head`, which closes its end of the pipe."""
    command, *flags = QUIET[name]
    arguments = [sys.executable, "-m", f"mpi4dl.{command}", *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # else argparse itself drops its help
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
    assert told == b""
    assert process.returncode in (0, 141)  # argparse drops what it cannot print of a long help


def test_all_passes_over_patches_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """An encoder of k norms takes k + 1 passes forward, and as often backward; FLOPs are those of all patches."""
    flags = ["--model", TINY_RESNET, "--image-size", "256", "--patches", "64", "--patches-at-once", "2"]
    told = []
    for batch in ("2", "4"):
        main([*flags, "--batch-size", batch, "--tiles", "1x2"])
        told.append(capsys.readouterr().out)
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in tiny_resnet(2).modules())
    assert f"{2 * norms + 2} times a step, {norms + 1} forward and {norms + 1} backward, with 8 tiles" in told[0]
    assert "with 16 tiles of a rank each time" in told[1]
    flops = [float(re.findall(r": ([\d.]+) GFLOP forward", each)[0]) for each in told]
    seconds = [float(re.findall(r"^([\d.]+) (?:s|ms), bubble", each, re.MULTILINE)[0]) for each in told]
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.01)
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.05)
    main([*flags, "--batch-size", "2", "--tiles", "1x2", "--stream-norm", "running"])
    assert "times a step" not in capsys.readouterr().out
