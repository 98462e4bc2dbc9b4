"""Vision transformers of libraries, cut over ranks by the tables for them, against plain PyTorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl._torchvision import import_torchvision
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import Task, check

import_torchvision()

from torchvision.models import SwinTransformer, VisionTransformer  # noqa: E402
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2  # noqa: E402

CLASSES, SIZE = 3, (16, 16)


def vision_transformer() -> nn.Module:
    return VisionTransformer(16, 4, num_layers=2, num_heads=4, hidden_dim=24, mlp_dim=20, num_classes=CLASSES)


def swin(heads: tuple[int, int] = (2, 4), **more: Any) -> nn.Module:
    """Windows that are shifted, and padded; two stages of blocks."""
    sizes: dict[str, Any] = more | {"patch_size": [2, 2], "embed_dim": 24, "depths": [2, 2], "num_heads": [*heads]}
    return SwinTransformer(**sizes, window_size=[3, 3], stochastic_depth_prob=0.0, num_classes=CLASSES)


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ViTConfig(**sizes, **dropout, image_size=16, patch_size=4, num_labels=CLASSES)
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "VisionTransformer": vision_transformer,
    "SwinTransformer": swin,
    "SwinTransformer, three ranks": partial(swin, (3, 6)),
    "SwinTransformer, version 2": partial(swin, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2),
    "ViTForImageClassification": hugging_face,
}
PLANS = {"SwinTransformer, three ranks": Plan(((1, 1),), tensor=3)}


def build(name: str) -> nn.Module:
    model = MODELS[name]().double()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)  # biases, and torchvision's head
    return model


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(getattr(outputs, "logits", outputs), targets)


def names_of_parts(engine: Engine) -> Callable[[], set[str]]:
    return lambda: set(engine.stages.layouts)


@pytest.mark.parametrize(
    "name",
    [name if name == "VisionTransformer" else pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS],
)
def test_tables_of_vision_transformers(ranks: Ranks, name: str) -> None:
    task = Task(partial(build, name), SIZE, loss=loss_of, num_steps=2)
    outcomes = check(ranks, task, PLANS.get(name, Plan(((1, 1),), tensor=2)), names_of_parts)
    assert len(outcomes[0].watched) >= 12  # of both blocks: those of queries and outputs, and of the layers between
