"""Presets: defaults of many options for one kind of training, below files and flags."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from mpi4dl.options.config import OF_THE_TASK, Config, ConfigError, parse, to_toml
from mpi4dl.options.declare import from_keywords, options_of
from mpi4dl.options.kinds import AUTO
from mpi4dl.options.optimizers import by_steps
from mpi4dl.options.presets import PRESETS
from tests.support.commands import TINY, settled, train_command


def values(config: Config) -> dict[str, object]:
    return {name: getattr(getattr(config, item.section), name) for name, item in options_of(Config).items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_changes_its_options_alone_and_is_written_as_they_are(preset: str, tmp_path: Path) -> None:
    plain, found = values(parse([])), values(parse(["--preset", preset]))
    follows = {"preset", "std"}  # which is that of `mean`
    assert {name for name in plain if plain[name] != found[name]} - follows <= set(PRESETS[preset])
    assert sum(plain[name] != found[name] for name in PRESETS[preset]) >= len(PRESETS[preset]) - 1
    file = tmp_path / "run.toml"
    file.write_text(to_toml(parse(["--preset", preset])))
    assert values(parse(["--config", str(file)])) == found
    assert values(from_keywords(Config, {"preset": preset})) == found


def test_a_flag_overrides_a_file_which_overrides_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[optimizer]\nlr = 0.5\nwarmup = 3\n[training]\npreset = "finetune"\n')
    config = parse(["--config", str(file), "--lr", "0.25"])
    assert (config.optimizer.lr, config.optimizer.warmup, config.optimizer.clip_norm) == (0.25, 3, 1.0)
    assert parse(["--config", str(file), "--preset", "none"]).optimizer.clip_norm is None
    assert from_keywords(Config, {"preset": "mil", "patches": None}).model.patches is None


COSINE: dict[str, object] = {"optimizer": "AdamW", "lr_schedule": "cosine", "warmup": 0.05, "epochs": 10}
# Flags, and what is usual for their task.
USUAL: dict[str, dict[str, object]] = {
    "--task classify": {"lr": 1e-3, "optimizer_options": {"weight_decay": 0.05}, "flip": "horizontal"},
    "--task multilabel --optimizer AdamW": {"lr": 1e-3, "optimizer_options": {"weight_decay": 0.05}},
    "--task segment": {"lr": 1e-3, "optimizer_options": {"weight_decay": 0.01}, "flip": "horizontal"},
    "--task regress": {"flip": "none"},
    "--task survival": {"lr": 2e-4, "flip": "none"},
    "--image-size 16x16x16": {"flip": "none"},
    "--text stdlib": {"lr": 6e-4, "optimizer_options": {"weight_decay": 0.1, "betas": [0.9, 0.95]}, "epochs": 1},
    "--optimizer SGD": {"optimizer": "SGD", "lr": 0.01, "optimizer_options": {}},
    "--optimizer SGD --optimizer-options momentum=0.9": {"optimizer": "SGD", "optimizer_options": {"momentum": 0.9}},
    "--optimizer NAdam": {"optimizer": "NAdam", "lr": 2e-3, "optimizer_options": {}},
    "--optimizer torch.optim:Adagrad": {"optimizer": "torch.optim:Adagrad", "lr": 0.01, "optimizer_options": {}},
    "--optimizer-options betas=(0.8,0.9)": {"optimizer_options": {"betas": [0.8, 0.9]}, "lr": 1e-3},
    "--lr-schedule constant": {"lr_schedule": "constant", "warmup": 0},
    "--lr-schedule linear --warmup 7": {"lr_schedule": "linear", "warmup": 7},
    "--scheduler StepLR --flip": {"lr_schedule": "constant", "warmup": 0, "flip": "all"},
    "--preset gigapixel --task segment": {"lr": 1e-4, "flip": "all", "epochs": 50},
    "--preset finetune --lr 0.5": {"lr": 0.5, "epochs": 20},
    "--preset mil --optimizer SGD": {"optimizer": "SGD", "lr": 0.01, "optimizer_options": {}, "epochs": 50},
}


@pytest.mark.parametrize("flags", USUAL)
def test_what_nobody_gives_is_what_is_usual_for_the_task(flags: str) -> None:
    found = values(settled(flags.split()))
    expected = COSINE | USUAL[flags]
    assert {name: found[name] for name in expected} == expected
    assert AUTO not in [found[name] for name in OF_THE_TASK]


@pytest.mark.parametrize(
    ("argv", "flag"),
    [(["--preset", "fine-tune"], "--preset"), (["--warmup", "1.5"], "--warmup"), (["--warmup", "-1"], "--warmup")],
)
def test_what_is_no_preset_and_no_share_is_refused(argv: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        parse(argv)


@pytest.mark.parametrize(
    ("form", "warmup", "num_steps", "rising"),
    [
        ("cosine", 0.25, 20, 5),
        ("linear", 5, 20, 5),
        ("cosine", 0.01, 20, 1),
        ("constant", 0.01, 20, 1),
        ("cosine", 0.9, 1, 0),
        ("constant", 0.5, 1, 1),
        ("linear", 0.99, 10, 9),
    ],
)
def test_warm_up_takes_a_share_of_the_steps(form: str, warmup: float, num_steps: int, rising: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = by_steps(optimizer, form, warmup, num_steps)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:rising] == sorted(rates[:rising])
    assert all(rate < 1 for rate in rates[:rising])
    assert rates[rising : rising + 1] == [pytest.approx(1.0)] * (num_steps > rising)


SMALL = {
    "finetune": "--weights none",
    "mil": "--weights none --patches 16 --batch-size 2",
    "segment": "--model unet --model-options num_filters=4 --val-fraction 0.4 --images {masks}",
    "gigapixel": "--weights none --memory-limit 2GiB --stream-norm running --accumulate 1",
    "pretrain": "",
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.sample(1)
def test_a_run_begins_by_each_preset(preset: str, tmp_path: Path) -> None:
    flags = f"--preset {preset} --max-steps 2 --num-samples 16 --no-tensorboard --run-folder {tmp_path / 'run'}"
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
        for number in range(8):
            pixels = np.full((40, 40, 3), 30 * number, np.uint8) if kind == "images" else np.eye(40, dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(tmp_path / kind / f"{number}.png")
    job = train_command(1, *TINY, *flags.split(), *SMALL[preset].format(masks=tmp_path).split())
    assert job.code == 0, job.stdout + job.stderr
    assert f'preset = "{preset}"' in (tmp_path / "run" / "config.toml").read_text()
