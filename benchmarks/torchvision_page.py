"""The page docs/reference/torchvision.md: text made of what benchmarks.torchvision_models measured."""

import math
from collections.abc import Mapping
from typing import Any

EXACT = 1e-10

HEAD = """# torchvision's models on tiles

This command makes this page:

    mpirun -n 4 python -m benchmarks.torchvision_models

It measures models that `docs/results/torchvision.json` does not have yet; `--only NAME,NAME` measures again. Versions:
torch {torch}, torchvision {torchvision}.

The page has every name of `torchvision.models.list_models()`, and the backbones of detection models. {num_exact} models are
exact. For {num_rules} all rules are known, {num_missing} lacks a rule, and {num_refused} are refused.
`mpi4dl.models.build(name, num_classes, **options)` builds a model, and so does `--model`.

| Result | Meaning |
| --- | --- |
| exact | In one training step on tiles in float64, the loss, every gradient and every buffer equal plain PyTorch's on the whole images. The column shows the largest difference, at most 1e-10. It is relative to the largest element of the tensor, and to 0.001 of the largest gradient's: gradients that vanish in exact arithmetic are rounding alone |
| rules known | Each operator of the forward pass has a rule for 2x2 tiles. The model has more than 150 million parameters, too many to compare here |
| no rule | An operator has no rule for tiles. Training on tiles stops with a message that names it. In stages and with replicas the model trains |
| refused | `mpi4dl.models.build` raises a ValueError with the reason |

Dropout and stochastic depth are off, initial values random, and classes 10. Outputs after the first, such as those of
auxiliary heads, count 0.4 in the loss. Images are (batch, channels, height, width); video has the number of frames before the
height. Models of more than 62 million parameters are on 1x2 tiles. *Units* are the parts between which a model can be cut into
stages (`--stages`), auxiliary heads included.

| model | million parameters | images | tiles | | largest difference | units |
| --- | ---: | --- | --- | --- | ---: | ---: |
"""  # noqa: E501

OF_BACKBONES = """
mpi4dl refuses detection models, but trains their backbones. `ssd300_vgg16.backbone` has the parameters that
`ssd300_vgg16` has under `backbone`, and returns a dict of feature maps.
"""


def page(results: Mapping[str, Any]) -> str:
    """The whole page: how it was made, a row for each model, and why some are refused."""
    models, versions = results["models"], results["environment"]
    outcomes = [row["outcome"] for row in models.values()]
    head = HEAD.format(
        torch=versions["torch"],
        torchvision=versions["torchvision"],
        num_exact=outcomes.count("exact"),
        num_rules=outcomes.count("rules"),
        num_missing=outcomes.count("no rule"),
        num_refused=outcomes.count("refused"),
    )
    lines = [row_of(name, models[name]) for name in sorted(models)]
    return head + "\n".join(lines) + "\n" + OF_BACKBONES + _notes(models)


def row_of(name: str, row: Mapping[str, Any]) -> str:
    """One line of the table."""
    if row["outcome"] == "refused":
        return f"| `{name}` | | | | refused | | |"
    words = {"rules": "rules known", "no rule": "**no rule**", "differs": f"**differs** in {row.get('where')}"}
    outcome = words.get(row["outcome"], row["outcome"])
    image = " x ".join(map(str, row["image"]))
    tiles = "x".join(map(str, row["grid"])) if "grid" in row else ""
    difference = f"{row['difference']:.0e}" if math.isfinite(row.get("difference", math.inf)) else ""
    atoms = row.get("atoms", "")
    return f"| `{name}` | {row['parameters'] / 1e6:.1f} | {image} | {tiles} | {outcome} | {difference} | {atoms} |"


def _notes(models: Mapping[str, Any]) -> str:
    """Why models are refused, lack a rule or cannot be cut: each reason once."""
    reasons: dict[str, list[str]] = {}
    for name, row in models.items():
        for kind, what in (("why", "Refused"), ("missing", "No rule for tiles"), ("whole", "Not cut into stages")):
            if kind in row:
                reason = row[kind].removeprefix(f"model {name!r} ").replace(name, "NAME")
                reasons.setdefault(f"{what}: {reason}.", []).append(f"`{name}`")
    notes = [f"- {', '.join(names)}. {reason}" for reason, names in sorted(reasons.items(), key=lambda item: item[1])]
    return "\n## Why\n\n" + "\n".join(notes) + "\n"
