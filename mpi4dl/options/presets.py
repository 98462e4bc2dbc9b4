"""Defaults for kinds of training, and for published encoders: above those of tasks, and below files and flags."""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "finetune": {
        "weights": "pretrained",
        "mean": "imagenet",
        "lr": 1e-4,
        "optimizer_options": {"weight_decay": 0.05},
        "clip_norm": 1.0,
        "epochs": 20,
        "jitter": 0.2,
    },
    "mil": {
        "weights": "pretrained",
        "mean": "imagenet",
        "patches": 224,
        "aggregator": "gated-attention",
        "batch_size": 1,
        "flip": "all",
        "stream_norm": "frozen",
        "lr": 1e-4,
        "optimizer_options": {"weight_decay": 1e-5},
        "epochs": 50,
        "patience": 10,
    },
    "segment": {
        "task": "segment",
        "loss": "cross_entropy+dice",
        "lr": 1e-3,
        "optimizer_options": {"weight_decay": 0.01},
        "clip_norm": 1.0,
        "epochs": 50,
        "jitter": 0.2,
    },
    "gigapixel": {
        "weights": "pretrained",
        "mean": "imagenet",
        "batch_size": 1,
        "accumulate": 8,
        "fit": "crop",
        "flip": "all",
        "stream": "auto",
        "stream_norm": "frozen",
        "lr": 1e-4,
        "optimizer_options": {"weight_decay": 0.01},
        "epochs": 50,
    },
    "pretrain": {
        "lr": 5e-4,
        "optimizer_options": {"weight_decay": 0.05},
        "clip_norm": 1.0,
        "epochs": 100,
    },
}

IMAGENET: Mapping[str, Any] = {"mean": "imagenet", "std": "imagenet", "patches": 224, "mpp": 0.5}
OPTIMUS = {**IMAGENET, "mean": [0.707223, 0.578729, 0.703617], "std": [0.211883, 0.230117, 0.177517]}
CLIP = {
    **IMAGENET,
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
    "patches": 448,
}

# What published encoders of tiles of slides were trained with, by `model`.
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("uni", "uni2", "virchow", "virchow2", "gigapath"), IMAGENET),
    **dict.fromkeys(("hoptimus0", "hoptimus1"), OPTIMUS),
    "conch": CLIP,
}


def of_encoder(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the encoder that is the `model` of these values gives other options; of no such encoder nothing.

    Tiles and their resolution are of slides alone: other images may be tiles themselves.
    """
    model = values.get("model")
    if not isinstance(model, str) or model not in ENCODERS or values.get("features") is not None:
        return {}
    found = {"weights": "pretrained", **ENCODERS[model]}
    if values.get("mean") is not None:
        del found["std"]
    if values.get("slides") is None:
        del found["patches"]
    if values.get("slides") is None or any(values.get(name) is not None for name in ("magnification", "level")):
        del found["mpp"]
    return found
