"""Defaults for kinds of training: above those of tasks, and below files and flags."""

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
