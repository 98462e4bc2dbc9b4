"""Makes the pages of the site that follow from the code: `make docs`.

As a program it writes docs/reference/options.md from the declarations of all options. As a hook of mkdocs it adds the
reference of the public names, made of their docstrings, as the folder `api` of the site.
"""

import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

OPTIONS = Path(__file__).resolve().parent / "reference" / "options.md"
MODULES = (
    "mpi4dl",
    "mpi4dl.datasets",
    "mpi4dl.models",
    "mpi4dl.tasks",
    "mpi4dl.training.trainer",
    "mpi4dl.engine",
    "mpi4dl.checkpoints",
    "mpi4dl.parallel.plan",
    "mpi4dl.parallel.spatial",
    "mpi4dl.comm",
    "mpi4dl.torch_backend",
    "mpi4dl.options.config",
)
HEAD = """# Options

`python docs/reference.py` makes this page from the declarations in the code. Every option is a flag of a command
(`--image-size 512`), a key of a TOML file (`image_size = 512` below `[data]`) and a keyword argument of
[`mpi4dl.Trainer`](python.md#trainer) (`image_size=512`).

- `--config run.toml` reads a file. Flags override it.
- `--print-config` prints all options as such a file.
- `--help` prints the options of a command.

`python -m mpi4dl.train` is the same as `mpi4dl train`, and so for each command.

A dash as default means that the option is not set.
"""
TRAIN = """
## mpi4dl train and mpi4dl plan

    mpirun -n RANKS mpi4dl train --FLAG VALUE ...
    mpi4dl plan --FLAG VALUE ...
"""
EXPORT = """
## mpi4dl export

    mpi4dl export RUN_OR_WEIGHTS OUT

It writes weights for plain PyTorch and has no options. OUT ends in `.pt` or `.safetensors`. Of a run with `--ema` it
takes the average.
"""
TITLES = {
    "model": "Model",
    "data": "Data",
    "parallel": "Parallelism, memory and devices",
    "optimizer": "Optimizer and learning rate",
    "tuning": "Fine-tuning",
    "training": "Training",
    "learning": "Losses, metrics and best weights",
    "run": "Folder of the run, checkpoints and reports",
    "shown": "Options of plan: output",
    "searched": "Options of plan: search",
    "measuring": "Options of plan: measurement",
    "evaluating": "Options of evaluate",
    "predicting": "Options of predict",
    "inputs": "Model and images, of both",
    "placing": "Plan and devices, of both",
    "embedding": "Slides and files",
    "encoder": "Encoder",
    "work": "Threads and devices",
    "prompts": "Prompts",
    "choosing": "Sampling",
    "ranks": "Plan and precision",
    "batching": "Batch and cache",
    "serving": "Server",
    "cores": "Threads",
    "reading": "Slides",
    "outlining": "Tissue and output",
    "annotated": "Annotations",
    "composing": "Synthetic slides",
    "examining": "Messages and machine",
    "viewing": "Slides and address",
    "page": "Page and images",
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(item: Any) -> str:
    from mpi4dl.options.kinds import BOOLEAN

    value = "" if item.kind is BOOLEAN else f" {_cell(item.kind.metavar)}"
    flag = ", ".join([f"`{item.flag}{value}`", *(f"`{other}`" for other in item.flags[1:])])
    default = "-" if item.default_shown in ("none", '""', "{}", "[]") else f"`{_cell(item.default_shown)}`"
    text = _cell(item.help[0].upper() + item.help[1:])
    return f"| {flag} | {default} | {text} |"


def _tables(config: type, done: set[str]) -> Iterable[str]:
    """A heading and a table for each section of the config that is not done yet."""
    from mpi4dl.options.declare import options_of

    items = list(options_of(config).values())
    for section in dict.fromkeys(item.section for item in items):
        if section not in done:
            done.add(section)
            yield f"\n### {TITLES.get(section, section)}\n\n| Option | Default | Meaning |\n| --- | --- | --- |"
            yield from (_row(item) for item in items if item.section == section)


def _flags(values: Mapping[str, Any]) -> str:
    """The flags that give options these values, as a cell of a table."""
    from mpi4dl.options.config import Config
    from mpi4dl.options.declare import options_of

    options = options_of(Config)
    checked = {name: options[name].kind.check(raw) for name, raw in values.items()}
    return f"`{_cell(' '.join(word for name, value in checked.items() for word in options[name].words(value)))}`"


def _defaults() -> Iterable[str]:
    """A heading and a table of what AUTO is for each task."""
    from mpi4dl.tasks.task import TASKS

    yield "\n### Defaults of tasks\n"
    yield "Options whose default is `auto` follow from the task. Flags, files and presets override them, in this order."
    yield "The first lines of a run and `--print-config` show the result.\n"
    yield "| Task | Flags |\n| --- | --- |"
    yield from (f"| `{name}` | {_flags(task.defaults)} |" for name, task in TASKS.items())
    yield "\nThe learning rate and the options are for AdamW. `--optimizer SGD` has a rate of 0.01 and no options;"
    yield "another optimizer has PyTorch's default rate. With `--scheduler` or a constant rate there is no warm-up."
    yield "Only pictures are mirrored, not volumes and sequences. A resumed run keeps the values of its checkpoint."


def _presets() -> Iterable[str]:
    """A heading and a table of the presets."""
    from mpi4dl.options.presets import PRESETS

    yield "\n### Presets\n"
    yield "`--preset NAME` changes these defaults. Files and flags override them; `--print-config` shows the result."
    yield "`segment` needs a `--model` that makes masks, such as `unet`. `--weights none` trains from scratch."
    yield "Rates and decays of presets are for AdamW; another optimizer has its own.\n"
    yield "| Preset | Flags |\n| --- | --- |"
    yield from (f"| `{name}` | {_flags(values)} |" for name, values in PRESETS.items())


def options_page() -> str:
    """The text of docs/reference/options.md."""
    from mpi4dl import report, view
    from mpi4dl.doctor import DoctorConfig
    from mpi4dl.embed import EmbedConfig
    from mpi4dl.evaluate import EvaluateConfig
    from mpi4dl.generate import GenerateConfig
    from mpi4dl.plan import PlanConfig
    from mpi4dl.predict import PredictConfig
    from mpi4dl.serve import ServeConfig
    from mpi4dl.slides import COMMANDS

    lines = [HEAD.rstrip("\n"), TRAIN.rstrip("\n"), *_defaults(), *_presets(), *_tables(PlanConfig, set())]
    seeing: set[str] = set()
    lines += ["\n## mpi4dl evaluate and mpi4dl predict"]
    lines += ["\n    mpirun -n RANKS mpi4dl evaluate RUN --FLAG VALUE ..."]
    lines += [*_tables(EvaluateConfig, seeing), *_tables(PredictConfig, seeing)]
    lines += ["\n## mpi4dl embed"]
    lines += ["\n    mpirun -n RANKS mpi4dl embed --FLAG VALUE ..."]
    lines += [*_tables(EmbedConfig, set())]
    texts: set[str] = set()
    lines += ["\n## mpi4dl generate and mpi4dl serve"]
    lines += ["\n    mpirun -n RANKS mpi4dl generate RUN --FLAG VALUE ..."]
    lines += [*_tables(GenerateConfig, texts), *_tables(ServeConfig, texts)]
    for name, each in COMMANDS.items():
        lines += [f"\n## mpi4dl slides {name}", f"\n    mpirun -n RANKS mpi4dl slides {name} {each.words}"]
        lines += [*_tables(each.config, set())]
    lines += ["\n## mpi4dl doctor", "\n    mpirun -n RANKS mpi4dl doctor --FLAG VALUE ..."]
    lines += [*_tables(DoctorConfig, set())]
    for page, config in ((view, view.ViewConfig), (report, report.ReportConfig)):
        name = page.__name__.rpartition(".")[2]
        lines += [f"\n## mpi4dl {name}", f"\n    mpi4dl {name} {page.USAGE}", *_tables(config, set())]
    return "\n".join([*lines, EXPORT.rstrip("\n")]) + "\n"


def on_post_build(config: Any) -> None:
    """Add the reference of the public names to the site; mkdocs calls this."""
    import pdoc
    import pdoc.render

    import mpi4dl

    for module in map(import_module, MODULES):
        for name in getattr(module, "__all__", ()):
            setattr(module, name, getattr(module, name))  # where it comes when it is first used
    pdoc.render.configure(docformat="google", footer_text=f"mpi4dl {mpi4dl.__version__}", search=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Cannot determine where .* is taken from")  # members that PyTorch makes in C
        pdoc.pdoc(*MODULES, output_directory=Path(config["site_dir"]) / "api")


if __name__ == "__main__":
    OPTIONS.write_text(options_page(), encoding="utf-8")
