"""One NVIDIA card, in half an hour: is all exact on it, how fast, and with how much memory, beside plain PyTorch?

    python -m benchmarks.gpu                                    all stages
    python -m benchmarks.gpu --stages environment,norms,exact   these alone; those of others stay, if of this commit
    python -m benchmarks.gpu --cpu                              the same at tiny sizes, without a card
    python -m benchmarks.gpu --openmpi PREFIX --stages direct   by a CUDA-aware Open MPI

It needs no network. Each job of a stage is a process group of its own, which is killed at the stage's limit. Ranks
share the card where there is but one. docs/results/gpu.json has each finding as soon as it is made; the page is made
from it. What jobs print to standard error is beside it, in a file whose name ends in .log.

Open MPI: its environment is yours to set, such as UCX_TLS, LD_LIBRARY_PATH of its UCX, or OMPI_ALLOW_RUN_AS_ROOT.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.common import options as declared
from benchmarks.common.charts import Lines, lines
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import save
from benchmarks.common.results import save_json
from mpi4dl.options.kinds import choice
from mpi4dl.training.measured import launcher, reason, stop

ROOT = Path(__file__).parent.parent
NEEDS = "an NVIDIA card"
GPU_TESTS = (
    "tests/comm/test_gpu.py",
    "tests/engine/test_memory.py",
    "tests/engine/test_gpu_training.py",
    "tests/fakegpu",
)
PYTEST = ("-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "--tb=short")
MODELS = ("small_resnet", "unet", "vit", "resnet50", "amoebanetd")
OPENMPI = {  # unless they are set: messages by UCX, which knows CUDA, and ranks that share cores
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_common_ucx_devices": "any",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
PRINTED_LINES = 12  # of a program's own output that a finding keeps
DONE, LEFT_OUT = "done", "left out without --openmpi"


class Job(NamedTuple):
    """So many ranks of a function of `gpu_jobs` with these settings, or of another program."""

    work: str
    ranks: int = 1
    settings: dict[str, Any] = {}  # noqa: RUF012
    program: tuple[str, ...] = ()
    wire: str = "staged"
    openmpi: bool = False

    def __str__(self) -> str:
        words = [self.work, *(f"{key} {value}" for key, value in self.settings.items()), f"ranks {self.ranks}"]
        return ", ".join(words)


class Stage(NamedTuple):
    """What jobs show, and the seconds that each of them has."""

    shows: str
    seconds: float
    jobs: Sequence[Job]


def stages_of(cpu: bool, sizes: Sequence[int]) -> dict[str, Stage]:
    """All stages, in their order."""
    timed = ("small_resnet",) if cpu else ("resnet50", "amoebanetd")
    ways = (("plain", 1), ("recompute", 1), ("rules", 1), ("engine", 1), ("engine", 2))
    arithmetic = ("float64",) if cpu else ("float64", "float32", "TF32")
    counts, middle, precisions = (1, 4 if cpu else 16), sizes[min(1, len(sizes) - 1)], ("bf16", "fp32")
    one = {"model": "small_resnet", "arithmetic": ("float64",)}

    def doctor(wire: str, openmpi: bool = False) -> Job:
        return Job("doctor", 2, {"wire": wire}, ("-m", "mpi4dl.doctor", "--gpu-wire", wire), openmpi=openmpi)

    def rules(*tables: str) -> list[Job]:
        return [Job("rules", 2, {"tables": tables, "turn": 0 if cpu else None})]

    def steps(model: str, how: str, ranks: int, of: Sequence[str], sizes: Sequence[int] = sizes, **more: Any) -> Job:
        return Job("steps", ranks, {"model": model, "how": how, "sizes": sizes, "precisions": of}, **more)

    streams = [("recompute", 1), *((f"stream {how}", 1) for how in ("running device", "exact device", "exact host"))]
    texts = [("fp32", 1), ("bf16", 1), ("int8", 1), ("fp32", 2)]
    return {
        "environment": Stage("the card, versions, and rates of copies", 120, [Job("environment")]),
        "norms": Stage("norms on two tiles, in float64", 120, rules("test_normalization.CASES")),
        "types": Stage("operators without autocast, in bf16 and in fp16: types and values", 120, [Job("types")]),
        "doctor": Stage("how GPU tensors go between ranks, and how fast", 120, [doctor("auto" if cpu else "staged")]),
        "exact": Stage(
            "tiles, replicas, ZeRO 3 and stages, two ranks on a card, against plain PyTorch on the CPU",
            300,
            [Job("exact", 2, {"model": model, "arithmetic": arithmetic}) for model in MODELS],
        ),
        "share": Stage("the same of four ranks on a card", 180, [Job("exact", 4, one)]),
        "rules": Stage("all tables of operators' rules on two tiles, in float64", 600, rules()),
        "resume": Stage("a resumed run has the bits of one that was not stopped", 120, [Job("resume", 2)]),
        "tests": Stage(
            "the tests of `make test-gpu`", 600, [Job("tests", 0, {}, (*PYTEST, *GPU_TESTS[: 1 if cpu else 4]))]
        ),
        "steps": Stage(
            "seconds and memory of a training step",
            300,
            [steps(m, how, n, precisions) for m in timed for how, n in ways],
        ),
        "profile": Stage(
            "launches, copies and waits of a step",
            120,
            [Job("profile", n, {"model": timed[0], "how": how, "size": middle}) for how, n in ways],
        ),
        "attention": Stage(
            "a step of a vision transformer whose tokens are spread over ranks",
            240,
            [
                steps("vit", how, n, precisions, [32 if cpu else 1024])
                for how, n in (("plain", 1), ("gather", 2), ("ring", 2))
            ],
        ),
        "generate": Stage(
            "tokens a second of one and of many texts, beside transformers",
            180,
            [
                *(Job("generate", n, {"precision": precision, "counts": counts}) for precision, n in texts),
                Job("transformers", 1, {"counts": counts}),
            ],
        ),
        "offload": Stage(
            "the optimizer's state on the card, on the host and on disk",
            120,
            [Job("offload", 2, {"where": where, "zero": 2}) for where in ("none", "cpu", "disk")],
        ),
        "stream": Stage(
            "images that go through the model tile by tile",
            240,
            [
                steps(timed[0], how, n, ("bf16",), [128 if cpu else 16384])
                for how, n in (*streams, ("stream exact host", 2))
            ],
        ),
        "direct": Stage(
            "a CUDA-aware Open MPI reads the card's memory",
            180,
            [
                doctor("auto", openmpi=True),
                Job("exact", 2, one, wire="direct", openmpi=True),
                steps(timed[0], "engine", 2, ("fp32",), wire="direct", openmpi=True),
            ],
        ),
    }


NAMES = tuple(stages_of(False, (1024,)))
OPTIONS = (
    Option("--stages", listed(choice(*NAMES)), ",".join(NAMES), "what to do"),
    declared.counts("--sizes", "1024,2048,4096,8192", "heights and widths of the images of timed steps, in pixels"),
    Option("--cpu", bool, False, "tiny sizes on the CPU, to see that all of it works"),
    Option("--openmpi", Path, None, "the folder in which a CUDA-aware Open MPI is installed, for the stage direct"),
    Option("--page", Path, ROOT / "docs/reference/gpu.md", "the page to write"),
)
OUT = ROOT / "docs/results/gpu"  # the default of --out
ON_CPU = {"sizes": "64,96", "out": Path("results/gpu"), "page": Path("results/gpu.md")}
QUICK = {"cpu": True, "stages": "environment,steps", **ON_CPU}
PRESETS = {"cpu": ON_CPU}


def check(options: Options) -> str | None:
    if options.openmpi is not None and not (options.openmpi / "bin/mpirun").is_file():
        return f"--openmpi {options.openmpi}: it has no bin/mpirun"
    if not options.cpu:
        import torch

        if not torch.cuda.is_available():
            return "PyTorch sees no GPU here: --cpu does the same at tiny sizes on the CPU"
    return None


def work(options: Options) -> None:
    """One rank of a job."""
    from benchmarks.common.gpu_jobs import work

    work(options.cpu, **options.worker)


def run(options: Options) -> None:
    """Do the stages, saving after each finding, and write the page."""
    results, log = Results(options), Path(f"{options.out}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    every = stages_of(options.cpu, options.sizes)
    with log.open("w+") as errors:
        for name in options.stages:
            for job in every[name].jobs:
                if job.openmpi and options.openmpi is None:
                    results.end(name, job, LEFT_OUT, 0.0)
                else:
                    results.take(name, job, every[name].seconds, errors)
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(json.loads(results.path.read_text())))
    print(f"saved {options.page}")
    save(options, results.content, results.figures())
    failed = [row["job"] for row in results.ended if row["outcome"] not in (DONE, LEFT_OUT)]
    if failed:
        raise SystemExit(f"not done, as {options.page} says: {'; '.join(failed)}")


class Results:
    """What the chosen stages have found so far; other stages keep what the file has of them, of the same commit."""

    def __init__(self, options: Options) -> None:
        self.options, self.path = options, Path(f"{options.out}.json")
        saved = json.loads(self.path.read_text()) if self.path.exists() else {}
        same = saved.get("conditions", {}).get("commit") == options.conditions.found()["commit"]
        before = saved["results"] if saved and same else {}
        self.found = [row for row in before.get("measurements", []) if row["stage"] not in options.stages]
        self.ended = [row for row in before.get("jobs", []) if row["stage"] not in options.stages]

    @property
    def content(self) -> dict[str, Any]:
        return {"jobs": self.ended, "measurements": self.found}

    def save(self) -> None:
        kept = {"benchmark": self.options.name, "settings": self.options.settings(), **self.content}
        save_json(self.path, {"conditions": self.options.conditions.found(), "results": kept})

    def take(self, stage: str, job: Job, seconds: float, errors: IO[str]) -> None:
        """Do a job, and take each finding as it comes."""
        began, start = time.monotonic(), errors.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command_of(self.options, job),
            env=environment_of(self.options, job),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        printed: list[str] = []
        with process:
            try:
                for line in lines_until(process.stdout, began + seconds):
                    self.hear(stage, line, printed)
                code = process.wait(max(0.1, began + seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                stop(process)
        if printed:
            self.found.append(
                {"stage": stage, "ranks": job.ranks, "job": str(job), "printed": printed[-PRINTED_LINES:]}
            )
        errors.seek(start)
        self.end(stage, job, outcome_of(code, errors.read(), seconds), time.monotonic() - began)

    def hear(self, stage: str, line: str, printed: list[str]) -> None:
        """Save what a line of a job says: a finding, or what a program says in other ways."""
        if not line.startswith('{"ranks": '):  # as `Card.tell` writes it
            printed.append(line)
            return
        self.found.append({"stage": stage, **json.loads(line)})
        print(f"{stage}: {line}", flush=True)
        self.save()

    def end(self, stage: str, job: Job, outcome: str, seconds: float) -> None:
        row = {"stage": stage, "job": str(job), "outcome": outcome, "job_seconds": round(seconds, 1)}
        self.ended.append(row)
        print(f"{stage}: {job}: {outcome} ({seconds:.0f} s)", flush=True)
        self.save()

    def figures(self) -> dict[str, Any]:
        """Seconds and memory of steps by size, for each model and precision."""
        timed = [row for row in self.found if row["stage"] == "steps" and "seconds" in row]
        panels = []
        for model, precision in sorted({(row["model"], row["precision"]) for row in timed}):
            its = [row for row in timed if (row["model"], row["precision"]) == (model, precision)]
            title = f"{model}, {precision}"
            for key, label in (("seconds", "seconds a step"), ("mebibytes", "MiB of a rank")):
                panels.append(Lines(its, "size", key, way_of, "px", label, title, log="xy"))
        return {"": lines(panels, "training steps on one card")} if panels else {}


def outcome_of(code: int | None, errors: str, seconds: float) -> str:
    """How a job ended, in words; without a code it was killed at its limit."""
    if code is None:
        return f"killed at its limit of {seconds:g} s"
    return f"failed: {reason(code, errors)}" if code else DONE


def way_of(row: dict[str, Any]) -> str:
    return f"{row['how']}, 2 ranks" if row["ranks"] == 2 else row["how"]


def command_of(options: Options, job: Job) -> list[str]:
    """The command line of a job."""
    told = {"wire": job.wire, "name": job.work, "settings": job.settings}
    start = launcher(job.ranks) if job.ranks else []
    if job.openmpi:
        start[0] = str(options.openmpi / "bin/mpirun")
    return [*start, sys.executable, *(job.program or options.contestant("", job.ranks, told).arguments)]


def environment_of(options: Options, job: Job) -> dict[str, str]:
    """This process's environment, in which the checkout is found; with that of an Open MPI."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    if not job.openmpi:
        return found
    (library, *_) = sorted((options.openmpi / "lib").glob("libmpi.so*"))
    path = os.pathsep.join([str(options.openmpi / "bin"), found.get("PATH", "")])
    return {**OPENMPI, **found, "PATH": path, "MPI4PY_LIBMPI": str(library)}


def lines_until(pipe: IO[bytes] | None, deadline: float) -> Iterator[str]:
    """The lines that a process writes until it closes the pipe, or until then."""
    assert pipe is not None
    rest = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        read = os.read(pipe.fileno(), 1 << 16)
        *whole, rest = (rest + read).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole if line.strip())
        if not read:
            return


HEAD = """# What one card showed

This page was written by

    python -m benchmarks.gpu

on {card}, driver {driver}, torch {torch}, CUDA {cuda}, {mpi}, commit {commit}, {date}. `docs/results/gpu.json` has
all figures.

| Stage | What it shows | Outcome | Wrong, or the largest error in float64 |
| --- | --- | --- | --- |
"""


def page(saved: dict[str, Any]) -> str:
    """The whole page: what each stage shows and how it ended, and a table of the findings of each."""
    results, conditions = saved["results"], saved["conditions"]
    rows = results["measurements"]
    facts = next((row for row in rows if row["stage"] == "environment"), {})
    unknown = dict.fromkeys(("driver", "torch", "cuda"), "unknown") | {"card": "no card (CPU)"}
    text = HEAD.format(**unknown | facts | {key: conditions[key] for key in ("mpi", "commit", "date")})
    for name, stage in stages_of(False, (1024,)).items():
        outcomes = [row["outcome"] for row in results["jobs"] if row["stage"] == name]
        text += f"| {name} | {stage.shows} | {summary(outcomes)} | {worst([r for r in rows if r['stage'] == name])} |\n"
    for name in NAMES:
        its = [{key: value for key, value in row.items() if key != "stage"} for row in rows if row["stage"] == name]
        text += f"\n## {name}\n\n{markdown(over_plain(its))}" if its else ""
    return text


def summary(outcomes: Sequence[str]) -> str:
    """How the jobs of a stage ended."""
    done = outcomes.count(DONE)
    others = [cell(each) for each in dict.fromkeys(outcomes) if each != DONE]
    return "; ".join([f"{done} of {len(outcomes)} jobs" if others else DONE, *others]) if outcomes else "not run"


def worst(rows: Sequence[dict[str, Any]]) -> str:
    """What a stage found to be wrong, and the largest error in float64 beside plain PyTorch."""
    errors = [row["error"] for row in rows if "error" in row and row.get("arithmetic", "float64") == "float64"]
    counts = [row["num_wrong"] for row in rows if "num_wrong" in row]
    words = [f"{sum(counts)} wrong"] if counts else []
    return "; ".join([*words, f"{max(errors):.0e}"] if errors else words)


def over_plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of steps with their seconds over those of plain PyTorch at the same size and precision."""
    keys = ("model", "precision", "size", "tokens")
    plain = {
        tuple(row.get(key) for key in keys): row["seconds"]
        for row in rows
        if row.get("how") == "plain" and "seconds" in row
    }
    for row in rows:
        beside = plain.get(tuple(row.get(key) for key in keys))
        if beside and "seconds" in row:
            row["over plain"] = row["seconds"] / beside
    return rows  # fmt: skip


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table with a column for each key that a row has."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = [f"| {' | '.join(keys)} |", f"|{' --- |' * len(keys)}"]
    return "\n".join([*head, *(f"| {' | '.join(cell(row.get(key, '')) for key in keys)} |" for row in rows)]) + "\n"


def cell(value: Any) -> str:
    """A value in a table: numbers in three digits, lists and tables in words."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        value = [f"{key}: {each}" for key, each in value.items()]
    words = "; ".join(map(cell, value)) if isinstance(value, list) else str(value)
    return " ".join(words.replace("|", "\\|").split())


if __name__ == "__main__":
    from benchmarks.__main__ import run as run_benchmark

    run_benchmark("gpu", sys.argv[1:])
