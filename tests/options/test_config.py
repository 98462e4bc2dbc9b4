"""The command line and the file of a run: what overrides what, what is refused and how, and what is written back."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl.options.config import Config, ConfigError, parse, shared_options, to_toml
from mpi4dl.options.declare import options_of, tables_of_file
from tests.support.brute_force import patient

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a run.toml and returns its path."""

    def to_file(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return to_file


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return str(caught.value)


def test_no_argument_at_all_gives_the_defaults() -> None:
    config = parse([])
    assert config == Config()
    assert config.data.image_size == (224, 224)
    assert config.parallel.tiles == ((1, 1),)
    assert config.model.model_options == {}
    assert config.training.max_steps is None


def test_flags_set_every_kind_of_option() -> None:
    line = (
        "--model unet --model-options depth=29,pool=max --image-size 768x1024 --batch-size 8 --no-flip --random-crop "
        "--tiles 2x3 --data 2 --lr=1e-3 --optimizer-options betas=(0.9,0.99) --clip-norm 1 --max-steps 5 "
        "--eval-every none --precision bf16 --run-folder runs/a --no-tensorboard"
    )
    config = parse(line.split())
    assert config.model.model == "unet"
    assert config.model.model_options == {"depth": 29, "pool": "max"}
    assert (config.data.image_size, config.data.batch_size) == ((768, 1024), 8)
    assert (config.data.flip, config.data.random_crop) == ("none", True)
    assert (config.parallel.tiles, config.parallel.data) == (((2, 3),), 2)
    assert (config.optimizer.lr, config.optimizer.clip_norm) == (1e-3, 1.0)
    assert config.optimizer.optimizer_options == {"betas": [0.9, 0.99]}
    assert (config.training.max_steps, config.training.eval_every) == (5, None)
    assert config.training.precision == "bf16"
    assert (config.run.run_folder, config.run.tensorboard) == ("runs/a", False)


def test_flags_override_the_file_which_overrides_the_defaults(write: Write) -> None:
    file = write("[data]\nbatch_size = 16\nflip = false\nimage_size = 512\n[model]\nmodel_options = { depth = 11 }\n")
    config = parse(["--config", file, "--batch-size", "32", "--flip"])
    assert (config.data.batch_size, config.data.flip) == (32, "all")
    assert config.data.image_size == (512, 512)
    assert config.model.model_options == {"depth": 11}
    assert config.data.num_samples == Config().data.num_samples
    assert parse(["--config", file, "--model-options", ""]).model.model_options == {}


def test_every_leaf_is_a_unique_name_with_a_default_that_it_would_accept() -> None:
    options = options_of(Config)
    assert len(options) == sum(len(fields(section.default_factory)) for section in fields(Config))  # type: ignore
    for item in options.values():
        assert item.kind.check(item.kind.raw(item.default)) == item.default
        assert item.help


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--batchsize 4", "there is no flag --batchsize; did you mean --batch-size?"),
        ("--batch_size=4", "there is no flag --batch_size; did you mean --batch-size?"),
        ("--epoch 3", "there is no flag --epoch; did you mean --epochs?"),
        ("--no-flop", "there is no flag --no-flop; did you mean --no-flip?"),
        ("--confg a.toml", "there is no flag --confg; did you mean --config?"),
        ("--qqqq 3", "there is no flag --qqqq; --help all lists every flag"),
        ("--lost mse", "there is no flag --lost; did you mean --loss?"),
        ("--output x", "there is no flag --output; use --run-folder x"),
        ("--samples x", "there is no flag --samples; did you mean --num-samples?"),
        ("--workers=3", "there is no flag --workers; use --num-workers 3"),
        ("--strict yes", "--strict takes no value, but 'yes' follows it: write --strict or --no-strict alone"),
        ("--no-strict=yes", "--strict takes no value: write --strict or --no-strict alone"),
        ("--no-flip=yes", "--no-flip takes no value: write --flip or --no-flip alone"),
        ("--flip up", "--flip is 'up', but must be one of auto, none, horizontal, all"),
        ("--context 16 32", "--context takes one value, but '32' follows it: it must be a whole number of at least 1"),
        ("--help trainig", "--help trainig: there is no group trainig; did you mean training?"),
        ("--seed 9223372036854775808", "--seed is '9223372036854775808', but must be a whole number from 0 to 9223372036854775807"),  # noqa: E501
        ("--config /dev/null", "--config /dev/null: it is no regular file, but a pipe, a device or a folder"),
        ("resnet50", "the argument 'resnet50' belongs to no flag; values follow their flag, as in --epochs 3"),
        ("--batch-size four", "--batch-size is 'four', but must be a whole number of at least 1"),
        ("--batch-size 0", "--batch-size is '0', but must be a whole number of at least 1"),
        ("--fit stretch", "--fit is 'stretch', but must be one of auto, resize, crop, pad, own"),
        ("--tiles 2x2x2x2", "--tiles is '2x2x2x2', but must be grids such as 2x2 (rows x columns), or 2x2x1 (depth first) of volumes and 4 of sequences, or one for each stage such as 2x2,1x2,1x1"),  # noqa: E501
        ("--max-steps 0", "--max-steps is '0', but must be a whole number of at least 1, or none"),
        ("--val-fraction 1", "--val-fraction is '1', but must be a number between 0 and 1"),
        ("--lr -1", "--lr is '-1', but must be a number of at least 0, or auto"),
        ("--lr", "--lr has no value: it must be a number of at least 0, or auto"),
        ("--config", "argument --config: expected one argument; --help all lists every flag"),
        ("--config none.toml", "--config none.toml: No such file or directory"),
    ],
)  # fmt: skip
def test_a_bad_command_line_is_refused(argv: str, message: str) -> None:
    assert refusal(*argv.split()) == message


@pytest.mark.parametrize("levels", [21, 400, 2000, 100_000])
def test_nests_beyond_all_use_are_refused(write: Write, levels: int) -> None:
    nested = "[" * levels + "]" * levels
    file = write(f"[model]\nmodel_options = {{ a = {nested} }}\n")
    assert refusal("--config", file).startswith(
        (f"{file} is not valid TOML: maximum recursion depth exceeded", f"{file}: model_options in [model] is ")
    )
    message = refusal("--model-options", f"a={nested}")
    assert message.endswith(f"but must be {options_of(Config)['model_options'].kind.wanted}")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refusal("--config", str(tmp_path / "pipe")) == (
        f"--config {tmp_path / 'pipe'}: it is no regular file, but a pipe, a device or a folder"
    )


def test_bad_keyword_arguments_are_refused_with_an_example() -> None:
    message = refusal("--model-options", "depth")
    assert message.startswith("--model-options is 'depth', but must be keyword arguments such as depth=29,pool=max")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\nseed = 0\n", "the key seed belongs in [training], not [data]"),
        ("[data]\nbatch_size = '4'", 'batch_size in [data] is "4" (text), but must be a whole number of at least 1'),
        ("[data]\nflip = 1", "flip in [data] is 1 (a whole number), but must be one of auto, none, horizontal, all"),
        ("[data]\nrandom_crop = 1", "random_crop in [data] is 1 (a whole number), but must be true or false"),
        ("[data]\nmean = true", "mean in [data] is true (a boolean), but must be one of imagenet, half, measured, or a number, one for each channel such as 0.4,0.5,0.6"),  # noqa: E501
        ("[model]\nmodel = 3.5", "model in [model] is 3.5 (a number), but must be a name, or an own one such as my_code.py:build"),  # noqa: E501
        ("[data]\nfit = 2020-01-01", "fit in [data] is 2020-01-01 (date), but must be one of auto, resize, crop, pad, own"),  # noqa: E501
        ("[data]\nbatchsize = 4", "there is no key batchsize in [data]; did you mean batch_size?"),
        ("[data]\nqqqq = 4", "there is no key qqqq in [data]"),
        ("batch_size = 4", "the key batch_size belongs in the section [data]"),
        ("[trainning]\nseed = 1", "there is no section [trainning]; did you mean training?"),
        ("[qqqq]\n", "there is no section [qqqq]; the sections are model, data, slides, parallel, optimizer, tuning, training, learning, run"),  # noqa: E501
        ("model = 'unet'", '[model] must be a section, but is "unet" (text)'),
        ("[run]\nprint_config = true", "print_config is a flag only; give --print-config on the command line"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(write: Write, text: str, message: str) -> None:
    file = write(text)
    assert refusal("--config", file) == f"{file}: {message}"


def test_a_file_that_is_no_toml_is_refused_with_the_place(write: Write, tmp_path: Path) -> None:
    file = write("[data]\nbatch_size 4\n")
    assert refusal("--config", file).startswith(f"{file} is not valid TOML: ")
    assert "line 2" in refusal("--config", file)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in refusal("--config", str(tmp_path / "binary.toml"))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As Notepad of Windows writes it."""
    (tmp_path / "marked.toml").write_text("[data]\nbatch_size = 4\n", "utf-8-sig")
    assert tables_of_file(str(tmp_path / "marked.toml"), "--config") == {"data": {"batch_size": 4}}


names = st.text(min_size=1).filter(lambda text: text.strip())
keywords = st.dictionaries(
    st.from_regex("[a-z_]{1,5}", fullmatch=True),
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.integers(), max_size=2),
    max_size=3,
)


@settings(patient, max_examples=60)
@given(
    names, keywords, st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.floats(0, 1e30), st.sampled_from(("auto", "none", "all")),
    st.none() | st.integers(1), st.none() | names.filter(lambda text: text != "none"),
)  # fmt: skip
def test_a_written_file_gives_the_equal_config_back(
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    options: dict[str, object],
    pair: tuple[int, int],
    lr: float,
    flip: str,
    steps: int | None,
    folder: str | None,
) -> None:
    config = Config()
    config = replace(
        config,
        model=replace(config.model, model=model, model_options=options),
        data=replace(config.data, image_size=pair, flip=flip),
        parallel=replace(config.parallel, tiles=(pair, (1, 1)), batch_ways=pair),
        optimizer=replace(config.optimizer, lr=lr),
        training=replace(config.training, max_steps=steps),
        run=replace(config.run, run_folder=folder),
    )
    file = tmp_path_factory.mktemp("round") / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8", newline="")
    assert parse(["--config", str(file)]) == config


def test_the_file_of_a_run_is_readable_and_complete() -> None:
    text = to_toml(parse(["--tiles", "2x2", "--model-options", "depth=29", "--print-config"]))
    assert text.startswith('[model]\nmodel = "resnet18"\nnum_classes = "none"\nmodel_options = { depth = 29 }\n')
    assert '\n\n[data]\nimages = "synthetic"\n' in text
    assert '\n\n[parallel]\ntiles = "2x2"\n' in text
    assert all(f"\n{item.public} = " in text for item in options_of(Config).values() if not item.flag_only)
    assert "print_config" not in text


def test_what_the_ranks_must_agree_on() -> None:
    ours = shared_options(Config())
    assert ours["lr"] == '"auto"'
    assert ours == shared_options(parse([]))
    assert shared_options(parse(["--lr", "0.02"])) == ours | {"lr": "0.02"}
    assert shared_options(parse(["--model-options", "a=1,b=2"])) == shared_options(
        parse(["--model-options", "b=2,a=1"])
    )
    assert shared_options(parse(["--run-folder", "elsewhere", "--num-workers", "9"])) == ours


def test_a_config_can_be_sent_to_other_ranks() -> None:
    config = parse(["--model-options", "depth=29"])
    assert pickle.loads(pickle.dumps(config)) == config


def test_help_lists_every_flag_by_section_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--help", "all"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    sections = [text.index(f"\n{section.name}:\n") for section in fields(Config)]
    assert sections == sorted(sections)
    assert all(f"  {item.flag}" in text for item in options_of(Config).values())
    assert "--strict, --no-strict" in text
    assert "(default: 1x1)" in " ".join(text.split())


def test_parsing_imports_neither_torch_nor_mpi() -> None:
    """This is what keeps `--help` instant."""
    code = (
        "import sys; from mpi4dl.options.config import parse; parse(['--tiles', '2x2']); "
        "print([name for name in ('torch', 'mpi4py', 'numpy', 'tqdm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=os.environ)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
