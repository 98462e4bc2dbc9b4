"""README and the pages of docs/ say what works: scripts run as printed; commands, flags and links exist."""

import re
import shlex
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.common import options as benchmarks
from docs.check_prose import average, pages, problems, problems_of_code, sentences
from docs.reference import OPTIONS, options_page
from mpi4dl._commands import command_names
from mpi4dl.doctor import DoctorConfig
from mpi4dl.embed import EmbedConfig
from mpi4dl.evaluate import EvaluateConfig
from mpi4dl.generate import GenerateConfig
from mpi4dl.inference.options import Inference, placed
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import Config
from mpi4dl.options.declare import options_of, parse_options, with_values
from mpi4dl.plan import PlanConfig
from mpi4dl.predict import PredictConfig
from mpi4dl.report import ReportConfig
from mpi4dl.serve import ServeConfig
from mpi4dl.slides import COMMANDS as OF_SLIDES
from mpi4dl.training.trained import ModelOptions
from mpi4dl.view import ViewConfig
from tests.pool.job import mpirun
from tests.pool.zygote import ROOT
from tests.support.counting import memory_of_command

PAGES = pages()
START = re.compile(r"# (?:mpirun -n (\d+) )?python (\w+)\.py\n")
OURS = "|".join(command_names())
OTHERS = r"benchmarks (?:list|compare|run \w+)|(?:examples[./]|tools\.nets\.)\w+(?:\.py)?"
COMMAND = re.compile(
    rf"^(?: {{4}}(?:ExecStart=)?(?:mpirun -n (\d+) )?|srun )(?:mpi4dl ({OURS})|python (?:-m )?({OTHERS})|(make))\b"
    r"((?:.*\\\n)*.*)$",
    re.MULTILINE,
)
INLINE = re.compile(rf"`(?:mpirun -n (\d+) )?(?:mpi4dl ({OURS})|python -m (benchmarks run \w+))( [^`]*)`")
OWN_FILE = re.compile(r"\\\n| --config run\.toml")  # a file of the reader's options; and lines that continue
CONFIGS: dict[str, Any] = {
    "train": Config,
    "plan": PlanConfig,
    "evaluate": EvaluateConfig,
    "predict": PredictConfig,
    "embed": EmbedConfig,
    "generate": GenerateConfig,
    "serve": ServeConfig,
    "view": ViewConfig,
    "report": ReportConfig,
}
FOREIGN = {  # flags of other programs, by page
    "docs/how-to/migrate-from-mpi4dl.md": set(re.findall(r"--[\w-]+", PAGES["docs/how-to/migrate-from-mpi4dl.md"])),
    "docs/how-to/clusters.md": set("--allow-run-as-root --oversubscribe --bind-to --mca --nodes --mpi --signal".split())
    | set("--hostfile --map-by --nv --ntasks-per-node --cpus-per-task --cpu-bind --no-binary --no-cache-dir".split())
    | {"--shm-size"},
    "docs/how-to/watch-a-run.md": {"--logdir"},
    "docs/explanation/gpus.md": {"--openmpi", "--cpu", "--stages", "--page"},  # of benchmarks.gpu
    "docs/reference/failures.md": {"--pid"},
    "docs/how-to/cross-validate.md": {"--array"},
}


class Command(NamedTuple):
    """A command line of a page: `ranks` is what mpirun starts, `words` what follows the command's name."""

    page: str
    ranks: str
    name: str
    words: list[str]


def commands(pattern: re.Pattern[str]) -> list[Command]:
    return [
        Command(page, ranks, "".join(names), shlex.split(OWN_FILE.sub(" ", flags), comments=True))
        for page, text in PAGES.items()
        for ranks, *names, flags in pattern.findall(text.replace("$SLURM_ARRAY_TASK_ID", "0"))
        if not set(flags) & set("$")
    ]


COMMANDS = commands(COMMAND)
INLINE_COMMANDS = [command for command in commands(INLINE) if "--" in command.words[0] and command.words[1:]]
OF_RUNS = {"text", "scores", "trained", "notify"}  # scripts that need a run or images, with which test_pages runs them
MIGRATED = re.findall(r"`mpirun -n (\d+) \$([AR])([^`]*)`", PAGES["docs/how-to/migrate-from-mpi4dl.md"])


def scripts() -> dict[str, tuple[int, str]]:
    """The scripts of all pages by name: how many ranks, and the text. A block without a name continues the last."""
    found: dict[str, tuple[int, str]] = {}
    for text in PAGES.values():
        name = ""
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            start = START.match(block)
            if start:
                name, num_ranks = start[2], int(start[1] or 1)
                assert name not in found or found[name] == (num_ranks, block), f"two scripts {name}"
                found[name] = num_ranks, block
            elif name:
                found[name] = found[name][0], found[name][1] + block
    return found


def test_all_scripts_are_found() -> None:
    assert sorted(scripts().keys() - OF_RUNS) == ["grid", "own", "program", "stages", "tiles"]
    assert scripts().keys() > OF_RUNS
    assert all(text.count("\n") > 5 for _, text in scripts().values())


@pytest.mark.parametrize("name", sorted(scripts().keys() - OF_RUNS))
@pytest.mark.sample(1)
def test_a_script_runs_as_it_is_printed(name: str, tmp_path: Path) -> None:
    num_ranks, text = scripts()[name]
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    job = mpirun(num_ranks, str(script), folder=tmp_path)
    progress = re.compile(r"mpi4dl: .*, \d+0 s")  # on a machine that has other work
    assert job.code == 0, job.stdout + job.stderr
    assert [text for text in job.stderr.splitlines() if not progress.fullmatch(text)] == []
    assert job.stdout.count("StepResult(loss=") == (5 if name == "stages" else 0)
    assert job.stdout.count("layer4.1.conv2") == (1 if name == "grid" else 0)
    assert ("accuracy 1.000" in job.stdout) == (name == "own")


def test_adversarial_and_perceptual_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """In float64: the weights of both models after all steps of the example on two tiles."""
    double = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
    saving = """
import sys
if mpi4dl.world().rank == 0:
    torch.save([generator.state_dict(), discriminator.state_dict()], sys.argv[1])
"""
    text = (ROOT / "examples" / "gan.py").read_text().replace("ssd300_vgg16.backbone", "squeezenet1_1")
    (tmp_path / "double.py").write_text(double + text + saving)
    found = []
    for count in (1, 2):
        job = mpirun(count, "double.py", f"{count}.pt", folder=tmp_path)
        assert job.code == 0, job.stdout + job.stderr
        found.append((job.stdout, torch.load(tmp_path / f"{count}.pt")))
    (said, alone), (said_of_ranks, on_ranks) = found
    assert said == said_of_ranks
    for ours, plain in zip(on_ranks, alone, strict=True):
        for name, value in plain.items():
            assert torch.allclose(ours[name], value, rtol=0, atol=1e-9), name


def test_ranks_of_scripts_on_tiles_draw_the_same_images() -> None:
    for name in ("tiles", "grid", "stages"):
        before, _, drawn = scripts()[name][1].partition("torch.randn(")
        assert drawn
        assert "torch.manual_seed(0)" in before


@pytest.mark.parametrize("name", ["tiles", "own"])
def test_the_examples_are_printed_as_they_are(name: str) -> None:
    example = (ROOT / "examples" / f"{name}.py").read_text().partition('"""\n\n')[2]
    assert scripts()[name][1].partition("\n")[2] == example


def test_commands_are_found() -> None:
    names = [command.name for command in COMMANDS]
    assert names.count("train") >= 15
    assert len(MIGRATED) > 15
    assert set(CONFIGS) | {"make", "export", "doctor"} <= set(names)


@pytest.mark.parametrize(
    "command", [*COMMANDS, *INLINE_COMMANDS], ids=lambda command: " ".join([command.name, *command.words])[:60]
)
def test_a_command_is_one_that_there_is(command: Command) -> None:
    """Its flags have such values, and its plan has as many ranks as `mpirun` starts."""
    words, config = command.words, CONFIGS.get(command.name)
    if "..." in words or {"--FLAG", "[--FLAG"} & {*words}:
        return
    if command.name == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif command.name in ("train", "plan"):
        found = parse_options(config, words, "", "")
        assert found.parallel.plan == "auto" or command.ranks in ("", str(build_plan(found).num_ranks))
    elif command.name in ("evaluate", "predict"):
        found = parse_options(config, words[1:], "", "")
        ranks = int(command.ranks or 1)
        values, _ = placed(ModelOptions(), Inference(found.inputs, found.placing), ranks)
        assert build_plan(with_values(Config(), values)).num_ranks == ranks
    elif config is not None:
        parse_options(config, [*dropwhile(lambda word: not word.startswith("-"), words)], "", "")
    elif command.name.startswith("benchmarks run "):
        name = command.name.split()[-1]
        assert name in benchmarks.names()
        if not hasattr(benchmarks.load(name), "NEEDS") and "--help" not in words:
            benchmarks.parse(name, words)
    else:
        assert find_spec(module_of(command)) is not None


def module_of(command: Command) -> str:
    name = command.name.split()[0].removesuffix(".py").replace("/", ".")
    return name if "." in name or name == "benchmarks" else f"mpi4dl.{name}"


@pytest.mark.parametrize(("ranks", "model", "flags"), MIGRATED, ids=lambda text: text.strip())
def test_a_command_of_the_guide_for_mpi4dl_is_one_that_there_is(ranks: str, model: str, flags: str) -> None:
    page = PAGES["docs/how-to/migrate-from-mpi4dl.md"]
    common = re.search(rf'{model}="mpi4dl train (.*?)"', page, re.DOTALL)
    assert common is not None
    assert str(build_plan(parse_options(Config, shlex.split(common[1] + flags), "", "")).num_ranks) == ranks


def known_flags() -> set[str]:
    """All flags of the package's commands, of the benchmarks and of the examples."""
    flags = {"--help", "--config"}
    of_slides = [each.config for each in OF_SLIDES.values()]
    for config in (*CONFIGS.values(), DoctorConfig, *of_slides):
        for item in options_of(config).values():
            flags |= {item.flag, item.flag.replace("--", "--no-", 1)}
    for name in benchmarks.names():
        flags |= {option.flag for option in benchmarks.load(name).OPTIONS}
    sources = [ROOT / "benchmarks" / "__main__.py", *(ROOT / "examples").glob("*.py"), *(ROOT / "docs").glob("*.py")]
    sources.append(ROOT / "benchmarks" / "common" / "options.py")
    for source in sources:
        flags |= set(re.findall(r'"(--[a-z][\w-]*)"', source.read_text()))
    return flags


@pytest.mark.parametrize("page", PAGES)
def test_the_flags_modules_and_files_that_a_page_names_exist(page: str) -> None:
    text = PAGES[page]
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - FOREIGN.get(page, set())
    assert not flags - known_flags()
    assert set(re.findall(r"(?:^ +|[`=]|srun |mpirun -n \w+ )mpi4dl ([a-z]\w*)", text, re.MULTILINE)) <= set(
        command_names()
    )
    assert set(re.findall(r"benchmarks\s+run\s+([a-z]\w*)", text)) <= set(benchmarks.names())
    modules = set(re.findall(r"(?<![\w/])(?:mpi4dl|benchmarks|examples)(?:\.[a-z_]\w*)+", text))
    named = set(re.findall(r"`((?:docs|tests|tools|mpi4dl|examples|benchmarks)/[\w/.-]+)`", text))
    named |= {
        f"{module.replace('.', '/')}.py"
        for module in re.findall(r"python -m ((?:mpi4dl|benchmarks|examples)\.\w+)", text)
    }
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    assert all(module.count(".") < 8 for module in modules)


EXPLAINING = [page for page in PAGES if page.startswith("docs/explanation/") or page == "docs/architecture.md"]
FOREIGN_NAMES = {"base_model_tp_plan", "cudaFree", "CUDA_VISIBLE_DEVICES", "UCX_TLS"}  # of transformers, CUDA and UCX


def test_the_names_that_pages_explain_are_names_in_the_code() -> None:
    source = " ".join(path.read_text() for path in (ROOT / "mpi4dl").rglob("*.py"))
    known = {*re.findall(r"\w+", source), *FOREIGN_NAMES, "py"}
    for page in EXPLAINING:
        names = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", PAGES[page])
        assert {name for name in names if name.split(".")[-1] not in known} == set(), page


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", PAGES[page])):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), target


WORKSTATION = 16 << 30  # bytes, for all ranks of a command together
TRAINED = [
    command.words
    for command in COMMANDS
    if command.name in ("train", "plan")
    and "--FLAG" not in command.words
    and not any("my_code" in word or "own.py" in word or word in ("--search", "--ranks") for word in command.words)
]


@pytest.mark.parametrize("words", TRAINED, ids=lambda words: " ".join(words)[:60])
@pytest.mark.sample(3)
def test_an_example_fits_a_workstation(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images that are colour pictures of two classes, or texts of bytes; of slides as in the tutorial."""
    monkeypatch.chdir(ROOT)
    config = parse_options(PlanConfig, words, "", "")
    if config.slides.slides is not None and config.data.image_size == "auto":
        patches = config.slides.features is not None  # of 256 px
        config = with_values(config, {"image_size": (1, 64) if patches else (2048, 2048)})
    shape = (2, 3) if config.data.text is None else (257, 0)
    assert memory_of_command(config, build_plan(config), *shape) <= WORKSTATION


def test_the_reference_of_options_is_that_of_the_declarations() -> None:
    assert OPTIONS.read_text() == options_page(), "run python docs/reference.py"


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/clusters.md"])
def test_the_oldest_pytorch_is_the_one_that_the_installation_asks_for(page: str) -> None:
    [oldest] = re.findall(r"^    torch>=(\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert re.findall(r"PyTorch[\w ,]*? (\d\.\d+)", PAGES[page]) == [oldest]


def test_the_readme_is_short() -> None:
    assert PAGES["README.md"].count("\n") <= 200


@pytest.mark.parametrize("page", PAGES)
def test_prose_keeps_to_the_rules(page: str) -> None:
    assert list(problems(page, PAGES[page])) == []


LONG = "Rank 0 reads a file and " * 9 + "stops."


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (LONG, "55 words"),
        ("What does not fit is refused.", "relative clause"),
        ("Each rank visits a tile.", "visits"),
        (
            "Rank 0 reads a file, and all of the other ranks then receive its list of names from it in one message.",
            "average",
        ),
        ("What is a tile?", ""),
        ("Run this:\n\n    what visits the unit\n\n`visits` is a name.", ""),
        ("| a | b |\n| --- | --- |\n| each rank of so many ranks reads | " + LONG + " |", "55 words"),
    ],
)
def test_the_check_of_prose_finds(text: str, what: str) -> None:
    found = list(problems("a.md", text))
    assert any(what in each for each in found) if what else not found


def test_the_check_of_prose_looks_at_the_strings_of_code() -> None:
    code = '"""The module is told."""\ndef visit(): "Visits a unit."\nraise ValueError(f"{1} visits")\nx = "Held"'
    found = [problem.split(",")[0] for problem in problems_of_code("a.py", code)]
    assert found == ["a.py:1: 'is told'", "a.py:3: 'visits'"]


def test_sentences_are_counted_without_code_links_and_tables() -> None:
    text = "# Title\n\nOne [two](three.md) `four five`. Six!\n\n    seven eight\n\n| nine ten |\n\n- eleven twelve\n"
    assert [sentence for _, sentence in sentences(text)] == ["One two Code.", "Six!", "nine ten", "eleven twelve"]
    assert average(text) == 2.0
