"""mpi4dl.train: a run records itself, repeats itself, and is the same for every plan."""

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.datasets import Batch, Loader
from mpi4dl.geometry import Interval
from mpi4dl.options.config import Config, parse
from mpi4dl.options.data import build_views
from mpi4dl.options.sources import source_of
from mpi4dl.results.formats import read_object
from mpi4dl.results.names import PORTRAIT
from mpi4dl.runs.folder import RunSnapshot
from mpi4dl.train import train
from tests.datasets.sharing import Share
from tests.pool.job import Finished
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT
from tests.support.commands import read_metrics, run_train, said, settled, train_command, truncate, write_images
from tests.support.tiny import TINY_RESNET, tiny_resnet

RUN = (
    f"--model {TINY_RESNET} --model-options num_filters=8 --image-size 70x62 --batch-size 4 --num-workers 1 --epochs 2 "
    "--val-fraction 0.3 --log-interval 2 --optimizer SGD --lr 0.005 --optimizer-options momentum=0.9 --flip "
    "--jitter 0.2 --random-crop --scheduler ExponentialLR --scheduler-options gamma=0.5"
).split()
TILES_2x2 = ("--tiles", "2x2")
REPORTED = (2, 3, 4, 6)  # every second step, and the last one of each epoch
SINGLE = 1e-4
WEIGHTS = "model.safetensors"
MOST_MODULES = 167
STEP_LINE = (
    r"step \d+ of 6  epoch [12]  loss [\d.]+  [\d.]+ images/s  data wait [\d.]+ %  comm wait [\d.]+ %  "
    r"peak memory \d+ MiB(  \d+ \w+ left)?"
)
VALIDATION_LINE = (
    r"step \d+  epoch [12]  validation loss [\d.]+  accuracy [\d.]+(  (balanced accuracy|f1|auc) [\d.]+){3}"
)


class Recorded(NamedTuple):
    """A run under mpirun: how the job ended, the flags without those of its plan and folder, and the folder."""

    job: Finished
    flags: tuple[str, ...]
    folder: Path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """18 images, of which 6 validate: 3 steps of 4 images in each of 2 epochs, and a last batch of 2."""
    images = write_images(tmp_path_factory.mktemp("images") / "pictures", count=9)
    folder = tmp_path_factory.mktemp("runs") / "first"
    flags = (*RUN, "--images", str(images))
    return Recorded(train_command(4, *flags, *TILES_2x2, "--verbose", "--run-folder", str(folder)), flags, folder)


def test_a_run_says_how_it_goes_in_plain_lines(recorded: Recorded) -> None:
    job, _, folder = recorded
    assert (job.code, job.stderr) == (0, "")
    title, goal, classes, split, shown, start, *lines, done = job.stdout.splitlines()
    assert title == (
        f"{TINY_RESNET}, 4,906 parameters, on 4 ranks: tiles(2x2) x data(1), images of 70 x 62 px, batches of 4, cpu"
    )
    assert goal == (
        "task classify, loss cross_entropy, SGD, momentum 0.9, learning rate 0.005 by ExponentialLR, "
        "6 steps in 2 epochs"
    )
    assert classes == "13 images to train on + 5 to validate with, in 2 classes: dark (6 + 3), light (7 + 2)"
    assert split == "split stratified by label"
    assert shown == (
        "images of 40x46 px (8 of 13 looked at) are resized to 70x62 from random crops, validated whole; --fit crop "
        "would show windows of that size"
    )
    assert re.sub(r" [\d.]+ s", "", start) == "start: imports, plan, samples, model, engine, folder, first step"
    kinds = [re.sub(r"\d.*", "", line.split("epoch")[1][4:]).strip() for line in lines]
    assert kinds == ["loss", "loss", "validation loss"] * 2
    assert all(re.fullmatch(VALIDATION_LINE if "validation" in line else STEP_LINE, line) for line in lines)
    assert re.fullmatch(rf"done: validation accuracy [\d.]+, 6 steps in \d+ s; see {folder}", done)


def test_the_folder_holds_everything_about_the_run(recorded: Recorded) -> None:
    job, flags, folder = recorded
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("events.out.tfevents."))
    logs = [f"log-rank{rank}.txt" for rank in range(4)]
    files = [".lock", "checkpoints", "config.toml", "metrics.jsonl", "model.json", PORTRAIT, WEIGHTS, "samples.csv"]
    files += ["measures.json", "versions.json"]
    assert names == sorted([*files, *logs])
    portrait = RunSnapshot.of(read_object(folder / PORTRAIT))
    assert (portrait.num_steps, portrait.timeline, len(portrait.memory)) == (6, None, 4)
    shapes = {name: math.prod(value.shape) for name, value in load_file(folder / WEIGHTS).items()}
    assert sum(values for _, values, _ in portrait.modules) == sum(shapes.values())
    trained = sum(size for name, size in shapes.items() if name.endswith((".weight", ".bias")))
    assert sum(trained for _, _, trained in portrait.modules) == trained
    for rank in portrait.memory:  # on tiles alike on all ranks: float32, and a momentum
        assert rank["gradients"] == rank["optimizer"] == 4 * trained
        assert 0 <= rank["parameters and buffers"] - 4 * sum(shapes.values()) < 4096
        assert rank["activations and the rest"] > 0
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["mpi"]
    assert versions["command"][3:] == [*flags, *TILES_2x2, "--verbose", "--run-folder", str(folder)]
    log = (folder / "log-rank0.txt").read_text()
    assert all(f"INFO mpi4dl: {line}\n" in log for line in job.stdout.splitlines())
    metrics = read_metrics(folder)
    assert [(m["phase"], m["step"], m["epoch"]) for m in metrics] == [
        ("train", 2, 1), ("train", 3, 1), ("validation", 3, 1), ("train", 4, 2), ("train", 6, 2), ("validation", 6, 2),
    ]  # fmt: skip
    for m in metrics:
        assert m["phase"] == "validation" or (
            m["images_per_second"] > 0
            and 0 <= m["data_wait"] <= 1
            and 0 < m["comm_wait"] < 1
            and m["peak_memory_bytes"] > 0
        )


def test_tensorboard_shows_the_numbers_and_the_first_images(recorded: Recorded) -> None:
    events = EventAccumulator(str(recorded.folder))
    events.Reload()
    for metric in read_metrics(recorded.folder):
        for name in metric.keys() - {"phase", "step"}:
            found = {e.step: e.value for e in events.Scalars(f"{metric['phase']}/{name}")}
            assert found[metric["step"]] == pytest.approx(metric[name])
    (samples,) = events.Images("samples")
    shown = np.asarray(PIL.Image.open(io.BytesIO(samples.encoded_image_string)))
    first = next(whole_batches(settled(recorded.flags), 0)).tiles[0] * 0.25 + 0.5
    assert shown.shape == (70, 4 * 62, 3)
    expected = (first.clamp(0, 1) * 255).permute(2, 0, 3, 1).reshape(shown.shape).numpy()
    assert np.abs(shown - expected).max() <= 1.01


def whole_batches(config: Config, epoch: int, training: bool = True) -> Iterator[Batch]:
    """The batches of one process that reads whole images."""
    datasets = source_of(config).open()
    views = build_views(config, 3, "resize")
    height, width = config.data.image_size
    share = Share(Interval(0, height), Interval(0, width))
    which, order = (0, {"shuffle": True, "drop_last": True}) if training else (1, {})
    options: dict[str, Any] = {"on_bad_image": "report", **order}
    batch_size, seed = config.data.batch_size, config.training.seed
    yield from Loader(datasets[which], views[which], batch_size, share, seed=seed, **options).epoch(epoch)


def readable(batch: Batch) -> tuple[Tensor, Tensor]:
    """The images of a batch, and their labels, without those that cannot be read."""
    keep = [position for position in range(len(batch.indices)) if position not in batch.errors]
    return batch.tiles[0][keep], batch.labels[keep]


def validate(model: torch.nn.Module, config: Config) -> dict[str, float]:
    """Loss and accuracy of a plain model."""
    model.eval()
    total, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for batch in whole_batches(config, 0, training=False):
            tile, labels = readable(batch)
            outputs = model(tile)
            best, second = outputs.topk(2).values.unbind(1)
            assert (best - second).min() > 100 * SINGLE  # otherwise rounding decides the accuracy
            total += float(F.cross_entropy(outputs, labels, reduction="sum"))
            correct += int((outputs.argmax(1) == labels).sum())
            count += len(labels)
    return {"loss": total / count, "accuracy": correct / count}


def plain_run(flags: Sequence[str], one_cycle: bool = False) -> list[dict[str, float]]:
    """What the run reports of losses and accuracies, by a plain PyTorch loop."""
    config = settled(flags)
    torch.manual_seed(config.training.seed)
    model = tiny_resnet(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    every_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    every_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=6) if one_cycle else None
    found: list[dict[str, float]] = []
    step = 0
    for epoch in range(config.training.epochs):
        model.train()
        losses: list[float] = []
        for batch in whole_batches(config, epoch):
            optimizer.zero_grad()
            tile, labels = readable(batch)
            loss = F.cross_entropy(model(tile), labels)
            loss.backward()
            optimizer.step()
            if every_step is not None:
                every_step.step()
            losses.append(float(loss.detach()))
            step += 1
            if step in REPORTED:
                found.append({"loss": sum(losses) / len(losses)})
                losses = []
        if every_step is None:
            every_epoch.step()
        found.append(validate(model, config))
    return found


def assert_same_numbers(metrics: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for found, known in zip(metrics, expected, strict=True):
        assert {name: found[name] for name in known} == pytest.approx(known, rel=SINGLE)


def test_the_run_is_the_run_of_a_plain_pytorch_loop(recorded: Recorded) -> None:
    assert_same_numbers(read_metrics(recorded.folder), plain_run(recorded.flags))


def test_a_schedule_of_steps_goes_on_at_every_step(ranks: Ranks, recorded: Recorded, tmp_path: Path) -> None:
    cycle = "--scheduler OneCycleLR --scheduler-options max_lr=0.01,total_steps=6 --tiles 1x2"
    found = read_metrics(run_train(ranks, tmp_path / "run", *recorded.flags, cycle))
    assert_same_numbers(found, plain_run(recorded.flags, one_cycle=True))
    assert found[-1]["loss"] != pytest.approx(read_metrics(recorded.folder)[-1]["loss"], rel=0.001)


def test_the_weights_load_into_the_plain_model(recorded: Recorded) -> None:
    torch.manual_seed(99)
    model = tiny_resnet(2, 8)
    assert load_model(model, recorded.folder / WEIGHTS) == (set(), [])
    with safe_open(recorded.folder / WEIGHTS, "pt") as file:
        assert file.metadata()["classes"] == '["dark", "light"]'
        assert json.loads(file.metadata()["mpi4dl"]) == json.loads((recorded.folder / "model.json").read_text())
    assert_same_numbers(read_metrics(recorded.folder)[-1:], [validate(model, settled(recorded.flags))])


PLANS = ["--tiles 1x1", "--tiles 1x2 --data 2", "--tiles 3x1", "--data 3", "--stages 2 --tiles 1x2,1x1"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sample(2)
def test_every_plan_gives_the_same_numbers(ranks: Ranks, recorded: Recorded, tmp_path: Path, plan: str) -> None:
    found = read_metrics(run_train(ranks, tmp_path / "run", *recorded.flags, plan))
    assert_same_numbers(found, [
        {name: m[name] for name in ("loss", "accuracy") if name in m} for m in read_metrics(recorded.folder)
    ])  # fmt: skip


@pytest.mark.parametrize("more", ["--stream 2x1", "--patch-size 8 --aggregator mean"])
def test_weights_of_low_precision_are_streamed(ranks: Ranks, recorded: Recorded, tmp_path: Path, more: str) -> None:
    """Streamed tiles are planned without values, on a device that has no autocast."""
    found = []
    for number, flags in enumerate(("", "--precision bf16 --low-precision-weights")):
        run = run_train(ranks, tmp_path / str(number), *recorded.flags, more, flags, "--max-steps 2")
        found.append([m["loss"] for m in read_metrics(run) if m["phase"] == "train"])
    assert found[1] == pytest.approx(found[0], rel=0.05)
    assert found[1] != found[0]


def test_the_recorded_configuration_repeats_the_run_to_the_last_bit(
    ranks: Ranks, recorded: Recorded, tmp_path: Path
) -> None:
    file = recorded.folder / "config.toml"
    asked = [*recorded.flags, *TILES_2x2, "--run-folder", str(recorded.folder)]
    assert parse(["--config", str(file)]) == settled(asked)
    run = run_train(ranks, tmp_path / "run", "--config", file)
    assert [m["loss"] for m in read_metrics(run)] == [m["loss"] for m in read_metrics(recorded.folder)]
    assert (run / WEIGHTS).read_bytes() == (recorded.folder / WEIGHTS).read_bytes()


def test_images_that_cannot_be_read_are_left_out_counted_and_logged(ranks: Ranks, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", count=9)
    bad = [truncate(images / name) for name in ("dark/1.png", "light/2.png", "light/5.png", "light/6.png")]
    flags = (*RUN, "--images", str(images), "--on-bad-image", "skip", "--seed", "4")
    folder = run_train(ranks, tmp_path / "run", *flags, "--tiles 1x2 --data 2")
    assert_same_numbers(read_metrics(folder), plain_run(flags))
    for rank in range(4):
        log = (folder / f"log-rank{rank}.txt").read_text()
        for path in bad:
            assert log.count(f"WARNING mpi4dl.training.input_pipeline: skipped: {path}: cannot be decoded") == 1
    assert ", 4 unreadable images skipped; see" in (folder / "log-rank0.txt").read_text()


def printed(program: str) -> list[str]:
    """The lines that a program of Python prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_rank_without_tiles_imports_few_modules(tmp_path: Path) -> None:
    """What is not asked for is not imported: a compiler, stages, streaming, experts, texts, or plans' estimates."""
    flags = ["--run-folder", str(tmp_path / "run"), *RUN, "--optimizer", "AdamW", "--max-steps", "1"]
    flags += ["--model", "small_resnet"]
    flags += ["--optimizer-options", "weight_decay=0.1"]
    program = (
        f"import sys; from mpi4dl.train import main\nmain({flags})\n"
        "print(*(name for name in sys.modules if name.startswith(('mpi4dl.', 'torch._dynamo.eval_frame'))))"
    )
    modules = printed(program)[-1].split()
    assert "torch._dynamo.eval_frame" not in modules
    # The options of a run are one list of declarations, whose sections every run needs.
    modules = [name for name in modules if not name.startswith("mpi4dl.options.sections.")]
    assert "mpi4dl.engine.engine" in modules
    assert len(modules) <= MOST_MODULES, modules
    off = ("streaming", "experts", "split", "trace", "costs", "estimate", "text", "texts", "cutting")
    inside = [name for name in modules if not name.startswith("mpi4dl.datasets.")]
    assert [name for name in inside if any(f".{part}." in f"{name}." for part in off)] == []


def test_the_printed_configuration_is_read_back(tmp_path: Path) -> None:
    flags = ["--tiles", "1x2", "--lr", "0.3", "--model-options", "pool=max", "--no-flip"]
    job = train_command(2, *flags, "--print-config")
    assert (job.code, job.stderr) == (0, "")
    assert job.stdout.count("[model]") == 1
    (tmp_path / "run.toml").write_text(job.stdout)
    assert parse(["--config", str(tmp_path / "run.toml")]) == settled(flags)


def test_a_dry_run_says_what_training_would_take_and_trains_nothing(
    ranks: Ranks, recorded: Recorded, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    wide = "--model-options", "num_filters=32"
    flags = [*recorded.flags, *wide, *TILES_2x2, "--run-folder", str(folder), "--dry-run"]
    title, head, *lines = ranks(4).run(said, train, flags)[0].splitlines()
    count = sum(p.numel() for p in tiny_resnet(2, 32).parameters())
    assert title == recorded.job.stdout.splitlines()[0].replace("4,906", f"{count:,}")
    assert re.match(r"module +operator +output +halo bytes +messages", head)
    stem = next(line for line in lines if line.startswith("stem.0"))
    halo_bytes, messages = stem.split()[3:5]
    assert int(halo_bytes.replace(",", "")) > 0
    assert int(messages) == 3
    memory = next(line for line in lines if line.startswith("--zero 0 (this plan)"))
    assert memory.split()[4:7] == ["0", *2 * [f"{4 * count / 2**20:.1f}"]]
    assert lines[-1] == "dry run: 6 steps were not made"
    assert not folder.exists()
