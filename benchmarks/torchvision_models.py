"""Every model of torchvision on tiles against plain PyTorch: loss, all gradients and buffers of a step, in float64.

    python -m benchmarks run torchvision_models

writes docs/results/torchvision.json model by model, and docs/reference/torchvision.md from it. Models that the file has
already are not measured again, unless `--only` names them. It starts four ranks.

A model is built as `mpi4dl.models.build` does, its dropout and stochastic depth are switched off, and outputs after the
first, such as those of auxiliary heads, count 0.4 in the loss. Rank 0 first makes the step on the whole images by plain
PyTorch. Models of up to `--few` parameters then go on 2x2 tiles, larger ones on 1x2. For models beyond `--many` it only
looks for rules, on tensors without values. All of it takes 13 to 20 minutes on two cores, and up to 9 GiB of memory for
all ranks together (mvit_v1_b; 7.5 for VGG, and 7 for maxvit_t).
"""

import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.options import Option, Options
from benchmarks.common.results import environment
from benchmarks.common.turns import answer_turns

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mpi4dl.comm import Communicator

ROOT = Path(__file__).parent.parent
RANKS = 4
EXACT = 1e-10
NUM_CLASSES = 10
AUXILIARY = 0.4
PART = 2**22  # elements that are summed over ranks at a time
SMALL = (2, 3, 97, 75)

# Images that a model takes, and its options, by the beginnings of names, where it does not take SMALL ones.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "deeplabv3": (SMALL, {"aux_loss": True}),
    "fcn": (SMALL, {"aux_loss": True}),
    "inception_v3": ((2, 3, 299, 299), {}),
    "quantized_inception_v3": ((2, 3, 299, 299), {}),
    "maxvit_t": ((1, 3, 224, 224), {}),
    "vit_b_16": ((2, 3, 96, 96), {"image_size": 96}),
    "vit_b_32": ((2, 3, 96, 96), {"image_size": 96}),
    "vit_l_16": ((2, 3, 96, 96), {"image_size": 96}),
    "vit_l_32": ((2, 3, 96, 96), {"image_size": 96}),
    "vit_h_14": ((2, 3, 98, 98), {"image_size": 98}),
    "ssd": ((2, 3, 300, 300), {}),
    "mc3_18": ((2, 3, 7, 45, 38), {}),
    "r3d_18": ((2, 3, 7, 45, 38), {}),
    "r2plus1d_18": ((2, 3, 7, 45, 38), {}),
    "s3d": ((1, 3, 17, 224, 224), {}),
    "mvit": ((1, 3, 16, 224, 224), {}),
    "swin3d": ((1, 3, 8, 64, 64), {}),
}
OPTIONS = (
    Option("--only", str, "", "measure these anew: resnet18,ssd300_vgg16.backbone"),
    Option("--few", float, 62e6, "parameters of models that go on 2x2 tiles"),
    Option("--many", float, 150e6, "parameters of models that are compared at all"),
    Option("--page", Path, ROOT / "docs/reference/torchvision.md", "the page to write"),
)
OUT = ROOT / "docs/results/torchvision"  # the default of --out
QUICK = {"only": "squeezenet1_1", "out": Path("results/torchvision"), "page": Path("results/torchvision.md")}


def case_of(name: str) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape of the images, and the options, with which a model is compared."""
    for beginning, case in CASES.items():
        if name.startswith(beginning):
            return case
    return SMALL, {}


def build(name: str) -> "nn.Module":
    """The model with the values of one seed, in training mode, with all that draws random numbers switched off."""
    import torch

    from mpi4dl import models

    torch.manual_seed(0)
    model = models.build(name, NUM_CLASSES, **case_of(name)[1]).train()
    for module in model.modules():
        if type(module).__name__.startswith(("Dropout", "StochasticDepth")):
            module.p = 0.0
        if isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def loss_of(outputs: Any) -> "Tensor":
    """A weighted mean of all elements of the first output, and 0.4 times that of each other one."""
    import torch
    from torch.utils import _pytree as pytree

    from mpi4dl.parallel import spatial

    total = torch.zeros((), dtype=torch.float64)
    for number, output in enumerate(pytree.tree_leaves(outputs)):
        whole = spatial.gather(output)
        weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2 + number), dtype=torch.float64)
        total = total + (whole * weights).mean() * (AUXILIARY if number else 1.0)
    return total


def images_of(name: str) -> "Tensor":
    import torch

    return torch.randn(case_of(name)[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plain_step(name: str) -> dict[str, "Tensor"]:
    """The reference: the loss, and by name the gradients and the buffers, of one process with the whole images."""
    model = build(name).double()
    loss = loss_of(model(images_of(name)))
    loss.backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **{f"buffer {name}": b for name, b in model.named_buffers()}}


def tiled_step(comm: "Communicator", name: str, grid: tuple[int, int]) -> dict[str, "Tensor"]:
    """The same of the ranks of `comm`, each with its tiles. Collective."""
    from mpi4dl.parallel import spatial

    tiles = spatial.Grid(comm, *grid)
    model = build(name).double()
    loss = loss_of(model(spatial.shard(images_of(name), tiles)))
    (loss / tiles.size).backward()
    step = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()
            for part in parameter.grad.view(-1).split(PART):  # at once, it would be there twice
                comm.all_reduce(part)
            step[f"gradient of {name}"] = parameter.grad
    return {**step, **{f"buffer {name}": buffer for name, buffer in model.named_buffers()}}


def worst_difference(ours: dict[str, "Tensor"], plain: dict[str, "Tensor"]) -> tuple[float, str]:
    """The largest difference, relative to the largest element of what differs and to 0.001 of the largest gradient's,
    since gradients that vanish in exact arithmetic are rounding alone; and in what it is."""
    if ours.keys() != plain.keys():
        return float("inf"), f"only one of both has {min(ours.keys() ^ plain.keys())}"
    largest = max(float(value.abs().max()) for name, value in plain.items() if name.startswith("gradient"))
    worst = (0.0, "")
    for name, value in plain.items():
        if ours[name].shape != value.shape or ours[name].dtype != value.dtype:
            return float("inf"), f"shape or dtype of {name}"
        if value.numel():
            scale = float(value.abs().max()) + 1e-3 * (largest if name.startswith("gradient") else 1.0)
            error = float((ours[name] - value).abs().max()) / scale
            worst = max(worst, (error if error == error else float("inf"), name))
    return worst


def compared(comm: "Communicator", name: str, grid: tuple[int, int]) -> tuple[float, str]:
    """The worst difference of a step on tiles, on all ranks of `comm`; the reference waits on disk. Collective."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder, "plain.pt")
        with comm.together():
            if comm.rank == 0:
                torch.save(plain_step(name), reference)
        ours = tiled_step(comm, name, grid)
        worst = worst_difference(ours, torch.load(reference, mmap=True)) if comm.rank == 0 else None
        return comm.broadcast_object(worst)


def facts_of(name: str) -> dict[str, Any]:
    """What is known of a model without values: its size, whether it has rules, and in how many places it can be cut."""
    from mpi4dl.geometry import GridShape
    from mpi4dl.parallel import spatial
    from mpi4dl.parallel.pipeline.split import Cuttable, outline

    model = outline(lambda: build(name)).train()
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "image": case_of(name)[0]}
    try:
        spatial.require_rules(model, case_of(name)[0], GridShape(1, 2, 2))
    except spatial.NoRule as missing:
        facts["missing"] = str(missing).partition("Either gather first")[0].strip()
    try:
        facts["units"] = len(Cuttable(model))
    except ValueError as error:
        facts["whole"] = str(error)
    return facts


def row_of(comm: "Communicator", name: str, options: Options) -> dict[str, Any]:
    """A row of the table. Collective."""
    from mpi4dl.models import registry

    refused = None if name.endswith(registry.BACKBONE) else registry.refusal(name)
    if refused is not None:
        return {"outcome": "refused", "why": refused}
    with comm.together():
        facts = facts_of(name) if comm.rank == 0 else None
    facts = comm.broadcast_object(facts)
    if "missing" in facts or facts["parameters"] > options.many:
        return {**facts, "outcome": "no rule" if "missing" in facts else "rules"}
    grid = (2, 2) if facts["parameters"] <= options.few else (1, 2)
    part = comm.split(int(comm.rank >= grid[0] * grid[1]))
    found = (0.0, "")
    if comm.rank < part.size and comm.rank < grid[0] * grid[1]:
        found = compared(part, name, grid)
    worst, where = comm.broadcast_object(found)
    outcome = "exact" if worst <= EXACT else "differs"
    return {**facts, "outcome": outcome, "grid": grid, "difference": worst, "where": where}


def wanted(options: Options, rows: dict[str, Any]) -> list[str]:
    """Names of all models, those that are to be measured: builders of torchvision, and backbones of detection."""
    from mpi4dl import models
    from mpi4dl._torchvision import import_torchvision

    everything = {*import_torchvision().models.list_models(), *models.names(torchvision=True)} - {*models.names()}
    only = {name for name in options.only.split(",") if name}
    unknown = only - everything
    if unknown:
        raise SystemExit(f"--only {','.join(sorted(unknown))}: torchvision has no such model")
    return sorted(only or everything - rows.keys())


def work(options: Options) -> None:
    """Each turn compares the next model."""
    from mpi4dl.comm import world

    comm, names = world(), iter(options.worker)

    def turn() -> dict[str, Any]:
        began = time.perf_counter()
        row = row_of(comm, next(names), options)
        return {**row, "seconds": round(time.perf_counter() - began, 1)}

    answer_turns(turn, comm)


def run(options: Options) -> None:
    """Measure models one by one, saving after each, and write the page."""
    out = Path(f"{options.out}.json")
    saved = json.loads(out.read_text()) if out.exists() else {}
    rows: dict[str, Any] = saved.get("models", {})
    names = wanted(options, rows)
    conditions = options.conditions.found()
    measured = {key: conditions[key] for key in ("commit", "date", "machine", "mpi")}
    contestant = options.contestant("torchvision's models", RANKS, names)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        if names:
            contestant.start()
        for name in names:
            rows[name] = {**contestant.turn(), **measured}
            print(name, rows[name], flush=True)
            packages = {**environment(), "torchvision": version("torchvision")}
            content = {"environment": packages, "models": dict(sorted(rows.items()))}
            out.write_text(json.dumps(content, indent=1) + "\n")
    finally:
        contestant.stop()
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(json.loads(out.read_text())))
    print(f"saved {out} and {options.page}")


HEAD = """# torchvision's models on tiles

Of all names of `torchvision.models.list_models()`, and the backbones of detection models, {num_exact} are exact. For {num_rules} all
rules are known, {num_missing} lacks a rule, and {num_refused} are refused. This command makes this page and
[its data](../results/torchvision.json), which has a row for each model; `--only NAME,NAME` measures again:

    python -m benchmarks run torchvision_models

Versions: torch {torch}, torchvision {torchvision}. The last measurement was on {date}.

| Result | Meaning |
| --- | --- |
| exact | In one training step on tiles in float64, the loss, every gradient and every buffer equal plain PyTorch's, to 1e-10 of the largest element of the tensor, or of 0.001 of the largest gradient's |
| rules known | Each operator has a rule for tiles. The model has more than 150 million parameters, too many to compare here |
| no rule | An operator has no rule for tiles. In stages and with replicas the model trains |
| refused | `mpi4dl.models.build` raises a ValueError with the reason |

Dropout and stochastic depth are off, initial values random, and classes 10. Outputs after the first, such as those of
auxiliary heads, count 0.4 in the loss. Models of more than 62 million parameters are on 1x2 tiles, others on 2x2. *Units* are the
parts between which a model can be cut into stages (`--stages`), auxiliary heads included.

| Models | Number | Million parameters | Result | Largest difference | Units |
| --- | ---: | --- | --- | ---: | --- |
"""  # noqa: E501

OF_BACKBONES = """
mpi4dl refuses detection models, but trains their backbones. `ssd300_vgg16.backbone` has the parameters that
`ssd300_vgg16` has under `backbone`, and returns a dict of feature maps.
"""


def page(results: Mapping[str, Any]) -> str:
    """The whole page: how to make it, a row for each family of models, and why some are refused."""
    models, versions = results["models"], results["environment"]
    outcomes = [row["outcome"] for row in models.values()]
    dates = [row["date"] for row in models.values() if "date" in row]  # older files have none
    head = HEAD.format(
        torch=versions["torch"],
        torchvision=versions["torchvision"],
        date=max(dates, default="an unknown day")[:10],
        num_exact=outcomes.count("exact"),
        num_rules=outcomes.count("rules"),
        num_missing=outcomes.count("no rule"),
        num_refused=outcomes.count("refused"),
    )
    families: dict[str, list[Mapping[str, Any]]] = {}
    for name in sorted(models):
        if models[name]["outcome"] != "refused":
            families.setdefault(family_of(name), []).append(models[name])
    lines = [line_of(family, rows) for family, rows in sorted(families.items())]
    return head + "\n".join(lines) + "\n" + OF_BACKBONES + _notes(models)


def family_of(name: str) -> str:
    """The models of one row, by the beginning of their names."""
    if name.endswith(".backbone"):
        return "backbones of detection"
    return f"`{re.sub(r'(?<!v)[0-9]+$', '', name.split('_')[0])}`"


def line_of(family: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """One line of the table."""
    words = {"rules": "rules known", "no rule": "**no rule**"}
    counts = Counter(
        f"**differs** in {row.get('where')}"
        if row["outcome"] == "differs"
        else words.get(row["outcome"], row["outcome"])
        for row in rows
    )
    outcome = ", ".join(f"{count} {word}" if len(counts) > 1 else word for word, count in counts.items())
    differences = [row["difference"] for row in rows if math.isfinite(row.get("difference", math.inf))]
    worst = f"{max(differences):.0e}" if differences else ""
    parameters = between([f"{row['parameters'] / 1e6:.1f}" for row in rows])
    units = between([str(row.get("units", row.get("atoms", ""))) for row in rows])  # the name in older files
    return f"| {family} | {len(rows)} | {parameters} | {outcome} | {worst} | {units} |"


def between(numbers: Sequence[str]) -> str:
    least, most = min(numbers, key=float), max(numbers, key=float)
    return least if least == most else f"{least} to {most}"


def _notes(models: Mapping[str, Any]) -> str:
    """Why models are refused, lack a rule or cannot be cut: each reason once."""
    reasons: dict[str, list[str]] = {}
    for name, row in models.items():
        for kind, what in (("why", "Refused"), ("missing", "No rule for tiles"), ("whole", "Not cut into stages")):
            if kind in row:
                reason = row[kind].removeprefix(f"model {name!r} ").replace(name, "NAME")
                reasons.setdefault(f"{what}: {reason.rstrip('.')}.", []).append(f"`{name}`")
    notes = [f"- {', '.join(names)}. {reason}" for reason, names in sorted(reasons.items(), key=lambda item: item[1])]
    return "\n## Why\n\n" + "\n".join(notes) + "\n"
