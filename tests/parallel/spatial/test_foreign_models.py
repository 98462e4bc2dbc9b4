"""Transformers and networks for volumes of timm and monai, which know nothing of tiles, are exact on them.

The packages are those of the extra `foreign`; what is not installed is not collected.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator
from tests.parallel.spatial.comparing import Arrangement, Case, Shape, compare
from tests.pool.ranks import Ranks

pytestmark = pytest.mark.exhaustive
SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
WINDOWS: dict[str, Any] = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "num_classes": 5}
IMAGE: Shape = (2, 3, 64, 64)


def timm(name: str, **options: Any) -> nn.Module:
    import_torchvision()
    import timm

    return timm.create_model(name, num_classes=5, **options)


def of_timm(module: str, name: str, *args: Any, **options: Any) -> nn.Module:
    import_torchvision()
    import timm

    return getattr(getattr(timm.models, module), name)(*args, **options)


def monai(name: str, *args: Any, **options: Any) -> nn.Module:
    from monai.networks import nets

    return getattr(nets, name)(*args, **options)


OF_TIMM: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "vit": (lambda: of_timm("vision_transformer", "VisionTransformer", 64, 8, **SMALL), IMAGE),
    "vit without a token": (
        lambda: of_timm(
            "vision_transformer", "VisionTransformer", 64, 8, global_pool="avg", class_token=False, **SMALL
        ),
        IMAGE,
    ),
    "vit with registers": (
        lambda: of_timm("vision_transformer", "VisionTransformer", 64, 8, reg_tokens=4, qk_norm=True, **SMALL),
        IMAGE,
    ),
    "swin": (lambda: of_timm("swin_transformer", "SwinTransformer", 64, 4, drop_path_rate=0.0, **WINDOWS), IMAGE),
    "swin v2": (
        lambda: of_timm("swin_transformer_v2", "SwinTransformerV2", 64, 4, drop_path_rate=0.0, **WINDOWS),
        IMAGE,
    ),
    "mixer": (lambda: of_timm("mlp_mixer", "MlpMixer", 5, 64, patch_size=8, num_blocks=2, embed_dim=32), IMAGE),
    "maxvit": (lambda: timm("maxvit_rmlp_pico_rw_256", img_size=64, depths=(1, 1, 1, 1)), IMAGE),
    "deit": (lambda: timm("deit_tiny_patch16_224", img_size=64, depth=2), IMAGE),
    "beit": (lambda: timm("beit_base_patch16_224", img_size=64, depth=1), IMAGE),
    "pvt": (lambda: timm("pvt_v2_b0", drop_path_rate=0.0), IMAGE),
    "coat": (lambda: timm("coat_lite_tiny", img_size=64, drop_path_rate=0.0), IMAGE),
    "edgenext": (lambda: timm("edgenext_xx_small", drop_path_rate=0.0), IMAGE),
}
OF_MONAI: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "unet": (lambda: monai("UNet", 3, 1, 2, (4, 8, 8), (2, 2)), (1, 1, 12, 12, 8)),
    "unet of sequences": (lambda: monai("UNet", 1, 1, 2, (4, 8, 8), (2, 2)), (1, 1, 36)),
    "segresnet": (lambda: monai("SegResNet", 3, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,)), (1, 1, 10, 12, 8)),
    "dynunet": (lambda: monai("DynUNet", 3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 8, 8]), (1, 1, 12, 12, 8)),
    "vit": (
        lambda: monai("ViT", 1, (16,) * 3, 8, 24, 32, 2, 2, classification=True, num_classes=3),
        (1, 1, 16, 16, 16),
    ),
    "unetr": (
        lambda: monai("UNETR", 1, 2, (32,) * 3, feature_size=4, hidden_size=24, mlp_dim=32, num_heads=2),
        (1, 1, 32, 32, 32),
    ),
    "swinunetr": (
        lambda: monai("SwinUNETR", 1, 2, feature_size=12, depths=(2,) * 4, num_heads=(2,) * 4, spatial_dims=3),
        (1, 1, 64, 32, 32),
    ),
}
FOUND = {package: networks for package, networks in {"timm": OF_TIMM, "monai": OF_MONAI}.items() if find_spec(package)}
NAMES = [(package, name) for package, networks in FOUND.items() for name in networks]
ARRANGEMENTS = {
    1: (Arrangement(2), Arrangement(4)),
    2: (Arrangement(1, 2), Arrangement(2, 2)),
    3: (Arrangement(2, 1, depth=1), Arrangement(1, 1, depth=2)),
}


def differences(comm: Communicator, package: str, name: str, arrangement: Arrangement) -> list[str]:
    make, shape = FOUND[package][name]
    torch.set_default_dtype(torch.float64)

    def without_dropout() -> nn.Module:
        model = make().double()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return compare(comm, Case(without_dropout, (shape,), spread=False), shape, arrangement)


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_step_on_tiles_is_that_on_the_whole(ranks: Ranks, package: str, name: str) -> None:
    _, shape = FOUND[package][name]
    for arrangement in ARRANGEMENTS[len(shape) - 2]:
        found = ranks(arrangement.size).run(differences, package, name, arrangement)
        assert found == [[]] * arrangement.size, arrangement
