"""Random runs of the training command: in parts, by several plans, each of which goes on where the last one stopped.

They have the metrics and the weights of one process that trains from beginning to end. Then the trained model evaluates
and predicts by a plan, as it does in one process, and as its last validation did.
"""

import atexit
import functools
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from hypothesis import assume
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.evaluate import evaluate
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.tensor import NoRule
from mpi4dl.predict import predict
from mpi4dl.train import train
from tests.pool.ranks import Ranks, RanksFailed
from tests.support.commands import read_metrics, truncate, write_images
from tests.support.short_runs import write_mixed_cohort
from tools.nets.fuzz.trainings import GRIDS, plans

SECONDS = 180.0
TOLERANCE = {"double": 1e-8, "single": 2e-3}
CHANNELS = 8
UNLIKE = ("images_per_second", "data_wait", "comm_wait", "peak_memory_bytes", "seconds")  # of any two runs


class ToDouble(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def net(num_classes: int, in_channels: int = 3, sides: int = 2, dense: bool = False, norm: str = "batch") -> nn.Module:
    """A small network in float64, so that results of any plan agree in many digits."""
    conv, pool = getattr(nn, f"Conv{sides}d"), getattr(nn, f"AdaptiveAvgPool{sides}d")

    def block(inputs: int, stride: int) -> list[nn.Module]:
        norms = {"batch": getattr(nn, f"BatchNorm{sides}d"), "group": lambda count: nn.GroupNorm(2, count)}
        return [conv(inputs, CHANNELS, 3, stride, 1), norms[norm](CHANNELS), nn.ReLU()]

    layers = [*block(in_channels, 1 if dense else 2), *block(CHANNELS, 1), *block(CHANNELS, 1)]
    if dense:
        return nn.Sequential(ToDouble(), *layers, conv(CHANNELS, num_classes, 1)).double()
    return nn.Sequential(ToDouble(), *layers, pool(1), nn.Flatten(), nn.Linear(CHANNELS, num_classes)).double()


class Stop:
    """A callback that stops a run behind a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any, result: Any) -> None:
        if run.engine.num_steps >= self.step:
            run.stop()


def __getattr__(name: str) -> Any:
    """`stop_behind_3` makes a callback that stops behind step 3."""
    if not name.startswith("stop_behind_"):
        raise AttributeError(name)
    return Stop(int(name.removeprefix("stop_behind_")))


# Data, written once in each process


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-data"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def images_of(data: str) -> Path:
    """A folder of the data."""
    folder, draws = _folder() / data, np.random.default_rng(3)
    if data == "classes":
        write_images(folder, ("dark", "light", "middle"), count=5, side_px=37)
        truncate(folder / "dark" / "2.png")
    elif data in ("labels", "numbers"):
        write_images(folder, ("pictures",), count=13, side_px=33)
        lines = ["file,age,size" if data == "numbers" else "file,red,round,late"]
        for number in range(13):
            several = draws.normal(50, 20, 2).round(2) if data == "numbers" else draws.integers(0, 2, 3)
            lines.append(f"{number}.png,{','.join(map(str, several))}")
        (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    elif data == "masks":
        for name in ("images", "masks"):
            (folder / name).mkdir(parents=True)
        for number in range(11):
            size = (30 + number, 41 - number)
            pixels = draws.integers(0, 256, (*size, 3), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
            mask = (pixels[..., 0] // 100).astype(np.uint8)
            mask[:3] = 255
            PIL.Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
    elif data == "volumes":
        for label in range(2):
            (folder / "ab"[label]).mkdir(parents=True)
            for number in range(6):
                size = [side + int(draws.integers(-2, 3)) for side in (8, 10, 9)]
                np.save(folder / "ab"[label] / str(number), draws.normal(9000 * label, 9000, size).astype(np.int16))
    else:
        folder.mkdir(parents=True)
        write_mixed_cohort(folder)
    return folder


NET = "--model tools.nets.fuzz.commands:net"
DATA: Mapping[str, str] = {
    "classes": f"{NET} --images {{folder}} --image-size 32x24 --on-bad-image skip",
    "labels": f"{NET} --images {{folder}} --image-size 23x32 --task multilabel",
    "numbers": f"{NET} --images {{folder}} --image-size 23x23 --task regress",
    "masks": f"{NET} --images {{folder}} --image-size 24x24 --ignore-index 255",
    "volumes": f"{NET} --images {{folder}} --image-size 7x9x8",
    "patches": (
        "--slides {folder}/slides.csv --mpp 0.5 --patches 64 --patches-at-once 7 --model small_resnet "
        "--val-fraction 0.34"
    ),
}
TO_PREDICT = {"masks": "--images {folder}/images", "patches": "--slides {folder}/slides.csv"}
OWN_OPTIONS = {"masks": "dense=true", "volumes": "sides=3"}
SINGLE = ("patches",)


@dataclass(frozen=True)
class Run:
    """A run of `flags` on some data, in parts: each a plan's flags, up to a step or to the end.

    `uses` are commands that use the trained model, each with the flags of a plan and its number of ranks.
    """

    data: str
    flags: str
    parts: tuple[tuple[str, int | None], ...]
    microbatches: int = 1
    uses: tuple[tuple[str, str, int], ...] = ()

    def flags_of(self, plan: str, stop: int | None, folder: Path) -> list[str]:
        """The command line of a part, which a callback stops behind a step."""
        common = "--num-workers 1 --log-interval 1 --no-tensorboard --memory-check none --save-every 1 --threads 1"
        words = f"{DATA[self.data].format(folder=images_of(self.data))} {common} {self.flags} {plan}".split()
        stopping = () if stop is None else ("--callbacks", f"tools.nets.fuzz.commands:stop_behind_{stop}")
        return [*words, *stopping, "--run-folder", str(folder)]

    @property
    def tolerance(self) -> float:
        return TOLERANCE["single" if self.data in SINGLE else "double"]


COMMANDS = {"train": train, "evaluate": evaluate, "predict": predict}


def run_part(comm: Communicator, flags: list[str], name: str = "train") -> str | None:
    """A body: one command; why it is refused if it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            COMMANDS[name](comm, flags)
        except (Refusal, ValueError, NoRule, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
    return None


def problem(ranks: Ranks, run: Run) -> str | None:
    """What is wrong; None if all is well; a text that begins with "refused: " if all ranks refused alike."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        plain = run.flags_of(f"--microbatches {run.microbatches}", None, folder / "plain")
        try:
            (said,) = ranks(1, SECONDS).run(run_part, plain)
        except RanksFailed as error:
            return f"in one process: {error}"
        if said is not None:
            return f"refused: in one process: {said}"
        for number, (plan, stop) in enumerate(run.parts):
            flags = [*run.flags_of(plan, stop, folder / "run"), *(("--resume", "auto") if number else ())]
            try:
                found = ranks(build_plan(parse(flags)).num_ranks, SECONDS).run(run_part, flags)
            except RanksFailed as error:
                return f"part {number}: {error}"
            if len(set(found)) > 1:
                return f"part {number}: ranks refuse differently: {found}"
            if found[0] is not None:
                return f"refused: {found[0]}"
        wrong = list(differences(folder / "run", folder / "plain", run.tolerance))
        for number, (name, plan, size) in enumerate(run.uses):
            told = []
            for count, words, out in ((1, "", f"{number} alone"), (size, plan, f"{number}")):
                flags = [str(folder / "plain"), *words.split(), *flags_of_use(run.data, name), "--out"]
                try:
                    found = ranks(count, SECONDS).run(run_part, [*flags, str(folder / out)], name)
                except RanksFailed as error:
                    return f"{name} {words}: {error}"
                if len(set(found)) > 1:
                    return f"{name} {words}: ranks refuse differently: {found}"
                if found[0] is not None:
                    return f"refused: {found[0]}"
                told.append(told_by(name, folder / out))
            wrong += [f"{name} {plan}: {said}" for said in unlike(told[1], told[0], run.tolerance)]
            if name == "evaluate":
                wrong += validated_otherwise(folder / "plain", told[0]["metrics"], run.tolerance)
        return "; ".join(wrong[:6]) or None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def flags_of_use(data: str, name: str) -> list[str]:
    """What a command is to look at, and how, whatever its plan."""
    if name == "evaluate":
        return "--resamples 20 --num-workers 1 --threads 1".split()
    images = TO_PREDICT.get(data, "--images {folder}").format(folder=images_of(data))
    return [*images.split(), "--num-workers", "1", "--threads", "1"]


def told_by(name: str, folder: Path) -> dict[str, Any]:
    """What a command has written, but for what says by which plan."""
    if name == "evaluate":
        (path,) = folder.glob("evaluation*.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return {key: value for key, value in found.items() if key not in ("plan", "records")}
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    found = {line["image"]: line for line in lines}
    pictures = {path.name: path.read_bytes() for path in folder.rglob("*.png") if "map" not in path.name}
    return {"lines": found, "pictures": pictures}


def unlike(mine: Any, wanted: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Where two values of JSON differ by more than rounding."""
    if isinstance(mine, dict) and isinstance(wanted, dict) and mine.keys() == wanted.keys():
        for key in mine:
            yield from unlike(mine[key], wanted[key], tolerance, f"{where}/{key}")
    elif isinstance(mine, list) and isinstance(wanted, list) and len(mine) == len(wanted):
        for number, pair in enumerate(zip(mine, wanted, strict=True)):
            yield from unlike(*pair, tolerance, f"{where}/{number}")
    elif not _alike(mine, wanted, tolerance):
        yield f"{where} is {mine!r:.80}, but in one process {wanted!r:.80}"


def validated_otherwise(run: Path, metrics: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    """What the last validation of a run measured otherwise than an evaluation of its last weights."""
    lines = read_metrics(run)
    last = lines[-1]
    if last["phase"] != "validation" or (run / "best.safetensors").exists():
        return
    for name in sorted(metrics.keys() & last.keys()):
        if not _alike(last[name], metrics[name]["value"], tolerance):
            yield f"{name} is {metrics[name]['value']}, but {last[name]} in the last validation"
    if not metrics.keys() & last.keys():
        yield f"no metric is both in {sorted(metrics)} and in {sorted(last)}"


def differences(one: Path, other: Path, tolerance: float) -> Iterator[str]:
    ours, plain = ({(m["phase"], m["step"]): m for m in read_metrics(folder)} for folder in (one, other))
    if list(ours) != list(plain):
        yield f"lines of {sorted(set(ours) ^ set(plain))} in one of both alone"
    for key in ours.keys() & plain.keys():
        mine, wanted = ({n: v for n, v in m[key].items() if n not in UNLIKE} for m in (ours, plain))
        for name in sorted(mine.keys() | wanted.keys()):
            if not _alike(mine.get(name), wanted.get(name), tolerance):
                yield f"{name} of {key}: {mine.get(name)}, but in one process {wanted.get(name)}"
    for name in ("model", "best"):
        files = [folder / f"{name}.safetensors" for folder in (one, other)]
        if files[0].exists() != files[1].exists():
            yield f"{name} in one of both alone"
        elif files[0].exists():
            yield from (f"{name}: {said}" for said in _weights(*map(load_file, files), tolerance))
    skipped = [(folder / "samples.csv").read_text() for folder in (one, other)]
    if skipped[0] != skipped[1]:
        yield "other samples"


def _alike(mine: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(mine, float) and isinstance(wanted, float):
        both = math.isnan(mine) and math.isnan(wanted)
        return both or math.isclose(mine, wanted, rel_tol=tolerance, abs_tol=tolerance)
    return bool(mine == wanted)


def _weights(mine: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> Iterator[str]:
    if mine.keys() != wanted.keys():
        yield f"in one of both alone: {sorted(mine.keys() ^ wanted.keys())}"
    for name in sorted(mine.keys() & wanted.keys()):
        one, other = mine[name].double(), wanted[name].double()
        most = float((one - other).abs().max()) if one.numel() else 0.0
        if not most <= tolerance * max(1.0, float(other.abs().max()) if other.numel() else 0.0):
            yield f"{name} is off by {most:.1e}"


# What is drawn

OPTIMIZERS = (
    "--optimizer SGD --lr 0.01 --optimizer-options momentum=0.9",
    "--optimizer AdamW --lr 0.003 --optimizer-options eps=0.01",
    "--optimizer RMSprop --lr 0.001 --optimizer-options eps=0.01",
)
CHOICES: tuple[tuple[str, ...], ...] = (
    OPTIMIZERS,
    ("--lr-schedule constant", "--lr-schedule cosine --warmup 2", "--lr-schedule linear --warmup 0.3",
     "--scheduler StepLR --scheduler-options step_size=1,gamma=0.5",
     "--scheduler ReduceLROnPlateau --scheduler-options patience=0,factor=0.5"),
    ("--clip-norm 0.1", "--clip-value 0.01"),
    ("--accumulate 2", "--accumulate 3"),
    ("--ema 0.8",),
    ("--label-smoothing 0.1",),
    ("--class-weights balanced",),
    ("--sampling balanced",),
    ("--flip all", "--flip none", "--flip horizontal"),
    ("--rotate half", "--rotate quarter", "--rotate-degrees 20"),
    ("--scale 0.8,1.3",),
    ("--random-crop", "--fit pad", "--fit crop"),
    ("--jitter 0.3",),
    ("--stain-jitter 0.1",),
    ("--mixup 0.4",),
    ("--eval-every none", "--eval-every 2"),
    ("--patience 1",),
    ("--loss focal", "--loss mse", "--loss bce", "--loss dice", "--loss l1"),
    ("--recompute",),
    ("--weight-decay-of *.bias=0", "--lr-of 1.*=0.001"),
    ("--freeze 1.*", "--freeze 1.*,2.* --unfreeze 2:1.*", "--eval-mode 2.*"),
    ("--on-bad-image error",),
    ("--seed 5",),
)  # fmt: skip
SLIDE_ONLY = (
    ("--aggregator gated-attention", "--aggregator mean", "--aggregator max"),
    ("--feature-norm batch",),
    ("--most-patches 9",),
    ("--stain-norm macenko", "--stain-norm reinhard"),
)
OF_NET = (
    "--freeze",
    "--eval-mode",
    "--lr-of",
    "--fit",
    "--mixup",
    "--random-crop",
    "--recompute",
)  # which patches do not take
BESIDE_PLANS = ("--offload cpu", "--offload disk", "--balance memory")


def flags_of_plan(plan: Plan) -> str:
    """The plan as one writes it."""
    grids = ",".join("x".join(map(str, tiles)) for tiles in plan.tiles)
    ways = ",".join(map(str, plan.batch_ways))
    words = [f"--stages {plan.num_stages} --tiles {grids} --batch-ways {ways} --data {plan.data} --zero {plan.zero}"]
    words.append(f"--microbatches {plan.microbatches} --schedule {plan.schedule} --chunks {plan.chunks}")
    return " ".join([*words, f"--bidirectional {plan.bidirectional}"])


@st.composite
def runs(draw: st.DrawFn) -> Run:
    data = draw(st.sampled_from([*DATA]))
    sides = 3 if data == "volumes" else 2
    groups = (*CHOICES, *(SLIDE_ONLY if data == "patches" else ()))
    chosen = draw(st.lists(st.sampled_from(range(1, len(groups))), max_size=6, unique=True))
    words = [draw(st.sampled_from(groups[number])) for number in (0, *sorted(chosen))]
    if data == "patches":
        assume(not any(word.startswith(OF_NET) for word in words))
    options = [OWN_OPTIONS[data]] if data in OWN_OPTIONS else []
    if data != "patches":
        options.append(f"norm={draw(st.sampled_from(['batch', 'group']))}")
        words.append(f"--val-fraction {draw(st.sampled_from([0.3, 0.5]))}")
    else:
        options.append("num_filters=4,norm=none")
    parts: list[tuple[str, int | None]] = []
    stop, count, needed = 0, draw(st.integers(1, 3)), 1
    microbatches = draw(st.integers(1, 2))
    for number in range(count):
        stages = 1 if data == "patches" else 3
        plan = draw(plans(stages, sides)) if data != "patches" else draw(of_patches())
        assume(plan.num_microbatches == microbatches)
        needed = max(needed, microbatches * plan.replicas * max(plan.batch_ways))
        stop += draw(st.integers(1, 3))
        beside = draw(st.sampled_from(["", "", *BESIDE_PLANS]))
        if draw(st.sampled_from([False, False, False, True])) and data not in ("patches",):
            beside += f" --stream {'x'.join(str(draw(st.integers(1, 2))) for _ in range(sides))}"
        parts.append((f"{flags_of_plan(plan)} {beside}".strip(), None if number == count - 1 else stop))
    batch = needed + draw(st.integers(0, 2)) if data != "patches" else needed
    words += [
        f"--batch-size {batch} --epochs {draw(st.integers(1, 3))} --model-options {','.join(options)}",
    ]
    uses = tuple(draw(st.lists(uses_of(data, sides), max_size=2)))
    return Run(data, " ".join(words), tuple(parts), microbatches, uses)


@st.composite
def uses_of(draw: st.DrawFn, data: str, sides: int) -> tuple[str, str, int]:
    """A command that uses the trained model, by a plan, and its number of ranks."""
    grid = draw(st.sampled_from(GRIDS[sides]))
    stages, replicas = draw(st.sampled_from([1, 1, 2] if data != "patches" else [1])), draw(st.integers(1, 2))
    size = math.prod(grid) * stages * replicas
    assume(size <= 4)
    words = [f"--tiles {'x'.join(map(str, grid))} --stages {stages} --data {replicas}"]
    words.append(f"--batch-size {replicas * draw(st.integers(1, 4))}")
    if draw(st.sampled_from([False, False, True])) and data != "patches":
        words.append(f"--stream {'x'.join(str(draw(st.integers(1, 2))) for _ in range(sides))}")
    return draw(st.sampled_from(["evaluate", "predict"])), " ".join(words), size


@st.composite
def of_patches(draw: st.DrawFn) -> Plan:
    tiles = draw(st.sampled_from(GRIDS[2]))
    return Plan(
        (tiles,), data=draw(st.sampled_from([1, 2])) if math.prod(tiles) < 3 else 1, zero=draw(st.integers(0, 3))
    )
