"""Unmodified models on tiles: a step is that of plain PyTorch on the whole, and transformers stay spread all the while.

Models are ours, torchvision's, and those of timm and monai (the extra `foreign`), which know nothing of tiles.
"""

import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl import models
from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator
from mpi4dl.models.resnet import resnet_v1
from mpi4dl.models.unet import UNet
from mpi4dl.parallel import spatial
from mpi4dl.parallel.costs.meter import SavedTensors
from tests.parallel.spatial.comparing import Arrangement, Case, Shape, compare, grid_of, sum_gradients, tiled
from tests.pool.ranks import Ranks, on_ranks

import_torchvision()
from torchvision.models import maxvit, swin_transformer, video, vision_transformer  # noqa: E402
from torchvision.models.video import resnet as video_resnet  # noqa: E402
from torchvision.models.video.swin_transformer import SwinTransformer3d, swin3d_t  # noqa: E402
from torchvision.ops import StochasticDepth  # noqa: E402

GRIDS = [(2, 2), (1, 4), (4, 1), (1, 2), (2, 1)]
SLOW = ("resnet50", "densenet121", "convnext_tiny", "fcn_resnet50")
SLOWEST = ("densenet121", "resnet50", "swin_t", "swin_v2_t", "fcn_resnet50", "convnext_tiny")


class Network(NamedTuple):
    """What makes a network, and a batch that it takes. `memory`: whether it stays spread to its last layer."""

    make: Callable[[], nn.Module]
    shape: Shape
    memory: bool = True


class Checkpointed(nn.Module):
    """A block that is computed again in backward; running statistics are then updated twice."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Classifier(nn.Module):
    """Branches, a loop, a slice and a head: what a compiler unrolls, guards and fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = convolution(x).relu()
        x = self.norm(x) + x.mean((2, 3), keepdim=True) if x.shape[-1] > 2 else x
        return self.head(F.gelu(x[:, :, 1:]).amax((2, 3)))


def checkpointed() -> nn.Module:
    model = models.build("resnet_v1", 10, depth=8, num_filters=8)
    for name, block in model.named_children():
        if "block" in name:
            setattr(model, name, Checkpointed(block))
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet50": {},
    "densenet121": {},
    "mobilenet_v3_small": {"dropout": 0.0},
    "efficientnet_b0": {"dropout": 0.0, "stochastic_depth_prob": 0.0},
    "convnext_tiny": {"stochastic_depth_prob": 0.0},
    "regnet_y_400mf": {},
    "fcn_resnet50": {},
    "amoebanetd": {"num_layers": 3, "num_filters": 32},
    "resnet_v2": {"depth": 29},
    "unet": {"num_filters": 8},
    "small_resnet": {"pool": "max"},
    "swin_t": {},
    "swin_v2_t": {},
}
OURS = {
    **{
        name: Network(lambda name=name, options=options: models.build(name, 10, **options), (1, 3, 97, 131))
        for name, options in OPTIONS.items()
    },
    "checkpointed": Network(checkpointed, (1, 3, 65, 99)),
    "compiled": Network(lambda: torch.compile(Classifier(), backend="eager"), (2, 3, 10, 9)),
}


def swin(second: bool = False, window: int = 4) -> nn.Module:
    block = swin_transformer.SwinTransformerBlockV2 if second else swin_transformer.SwinTransformerBlock
    merging = swin_transformer.PatchMergingV2 if second else swin_transformer.PatchMerging
    return swin_transformer.SwinTransformer(
        [4, 4], 24, [2, 2], [2, 4], [window, window], stochastic_depth_prob=0.0, num_classes=5, block=block,
        downsample_layer=merging,
    )  # fmt: skip


def small_video_resnet() -> nn.Module:
    makers = [video_resnet.Conv3DSimple, video_resnet.Conv3DNoTemporal, video_resnet.Conv2Plus1D] * 2
    return video_resnet.VideoResNet(video_resnet.BasicBlock, makers[:4], [1] * 4, video_resnet.BasicStem, 5)


NETWORKS = {
    "vit": Network(lambda: vision_transformer.VisionTransformer(64, 8, 2, 4, 96, 192, num_classes=5), (2, 3, 64, 64)),
    "vit of odd patches": Network(
        lambda: vision_transformer.VisionTransformer(72, 8, 1, 4, 32, 64, num_classes=5), (2, 3, 72, 72), False
    ),
    "swin": Network(swin, (2, 3, 64, 96)),
    "swin, padded": Network(lambda: swin(window=7), (2, 3, 75, 93), False),
    "swin v2": Network(lambda: swin(second=True), (2, 3, 64, 64)),
    "maxvit": Network(lambda: maxvit.MaxVit((64, 64), 16, 4, [16, 32], [2, 1], 8, 0.0, num_classes=5), (2, 3, 64, 64)),
    "swin3d": Network(
        lambda: SwinTransformer3d([2, 4, 4], 24, [2, 2], [2, 4], [4, 4, 4], stochastic_depth_prob=0.0, num_classes=5),
        (1, 3, 9, 64, 64),
    ),
    "unet3d": Network(lambda: UNet(3, 2, num_filters=4, depth=2, dims=3), (2, 2, 9, 13, 11), False),
    "resnet3d": Network(lambda: resnet_v1(8, 5, num_filters=4, dims=3), (2, 3, 9, 13, 11), False),
    "video resnet": Network(small_video_resnet, (2, 3, 7, 37, 42), False),
}
FOR_BOXES = ("video resnet", "unet3d", "resnet3d")
BUILDERS = {
    **{
        name: Network(lambda name=name: getattr(video, name)(weights=None, num_classes=5), (2, 3, 7, 45, 38), False)
        for name in ("r3d_18", "mc3_18", "r2plus1d_18")
    },
    "s3d": Network(lambda: video.s3d(weights=None, num_classes=5, dropout=0.0), (1, 3, 17, 224, 224), False),
    "vit_b_16": Network(
        lambda: vision_transformer.VisionTransformer(224, 16, 2, 12, 768, 3072, num_classes=5), (1, 3, 224, 224)
    ),
    "swin_t": Network(lambda: undisturbed(swin_transformer.swin_t(num_classes=5)), (1, 3, 224, 224)),
    "swin_v2_t": Network(lambda: undisturbed(swin_transformer.swin_v2_t(num_classes=5)), (1, 3, 256, 256)),
    "maxvit_t": Network(lambda: undisturbed(maxvit.maxvit_t(num_classes=5)), (1, 3, 224, 224)),
    "swin3d_t": Network(lambda: undisturbed(swin3d_t(num_classes=5)), (1, 3, 8, 112, 112), False),
}
ON_TILES = [Arrangement(1, 2), Arrangement(2, 1), Arrangement(2, 2)]
OF_VOLUMES = [Arrangement(1, 2, depth=1), Arrangement(1, 1, depth=2), Arrangement(2, 2, depth=1)]
OF_VOLUMES += [Arrangement(2, 1, depth=2)]
OF_DIMS = {
    1: (Arrangement(2), Arrangement(4)),
    2: (Arrangement(1, 2), Arrangement(2, 2)),
    3: (Arrangement(2, 1, depth=1), Arrangement(1, 1, depth=2)),
}
MOST_MEMORY = 0.35  # of plain PyTorch's, on 2 x 2 tiles


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
FOREIGN = {
    f"{package}: {name}": Network(make, shape)
    for package, networks in {"timm": OF_TIMM, "monai": OF_MONAI}.items()
    for name, (make, shape) in networks.items()
    if find_spec(package)
}


def differences(
    comm: Communicator, network: str, arrangement: Arrangement, size: tuple[int, ...] | None = None
) -> list[str]:
    torch.set_default_dtype(torch.float64)
    make, shape, _ = (OURS | NETWORKS | BUILDERS | FOREIGN)[network]
    shape = shape if size is None else (*shape[:2], *size)
    return compare(comm, Case(lambda: undisturbed(make().double()), (shape,), spread=False), shape, arrangement)


def undisturbed(model: nn.Module) -> nn.Module:
    """The model without dropout and stochastic depth: other tests hold what these do."""
    for module in model.modules():
        if isinstance(module, StochasticDepth | nn.Dropout):
            module.p = 0.0
    return model


def check(ranks: Ranks, network: str, arrangement: Arrangement, size: tuple[int, ...] | None = None) -> None:
    assert ranks(arrangement.num_ranks).run(differences, network, arrangement, size) == [[]] * arrangement.num_ranks


def everywhere() -> Iterator[Any]:
    """Every model on every grid; all but the slowest always on 2x2, or on one of the others in turn if quick."""
    for number, name in enumerate(OPTIONS):
        for i, (rows, cols) in enumerate(GRIDS):
            always = i == (1 + number % 4 if number % 2 and name not in SLOW else 0)
            marks = [] if always and name not in SLOWEST else [pytest.mark.exhaustive]
            yield pytest.param(name, Arrangement(rows, cols), marks=marks, id=f"{name}-{rows}x{cols}")


@pytest.mark.parametrize(("network", "arrangement"), [*everywhere()])
@pytest.mark.sample(4)
def test_a_step_of_our_models_is_that_on_the_whole(ranks: Ranks, network: str, arrangement: Arrangement) -> None:
    check(ranks, network, arrangement)


@pytest.mark.parametrize("size", [(64, 64), (33, 70)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("network", ["resnet18", "unet", "amoebanetd"])
@pytest.mark.sample(1)
def test_other_sizes(ranks: Ranks, network: str, size: tuple[int, int]) -> None:
    check(ranks, network, Arrangement(2, 2), size)


def test_checkpointed_blocks(ranks: Ranks) -> None:
    check(ranks, "checkpointed", Arrangement(2, 2))


@pytest.mark.exhaustive
def test_a_compiled_model(ranks: Ranks) -> None:
    check(ranks, "compiled", Arrangement(2, 1))


# Smooth ones: where a ReLU's input is zero to rounding, plain PyTorch differs from itself as much.
@pytest.mark.parametrize("network", [pytest.param("convnext_tiny", marks=pytest.mark.exhaustive), "efficientnet_b0"])
@on_ranks(4)
def test_single_precision(comm: Communicator, network: str) -> None:
    """float32 against the exact step: 1e-4 of each gradient, or of a tenth of the largest."""
    torch.manual_seed(0)
    make, shape, _ = OURS[network]
    grid, ours, image = spatial.Grid(comm, 2, 2), undisturbed(make()), torch.randn(shape)
    exact = copy.deepcopy(ours).double()
    found, wanted = spatial.gather(ours(spatial.shard(image, grid))), exact(image.double())
    weights = torch.randn_like(wanted)
    losses = (found * weights.float()).sum(), (wanted * weights).sum()
    (losses[0] / comm.size).backward()
    losses[1].backward()
    sum_gradients(ours, grid.comm)
    with torch.no_grad():
        assert abs(float(losses[0] - losses[1])) <= 1e-4 * float((wanted * weights).abs().sum())
    largest = max(float(p.grad.abs().max()) for p in exact.parameters() if p.grad is not None)
    for (name, a), b in zip(ours.named_parameters(), exact.parameters(), strict=True):
        assert float((a.grad - b.grad).abs().max()) <= 1e-4 * max(float(b.grad.abs().max()), 0.1 * largest), name


@pytest.mark.parametrize("network", [name for name in NETWORKS if name not in FOR_BOXES])
@pytest.mark.parametrize("arrangement", ON_TILES, ids=str)
@pytest.mark.sample(8)
def test_a_step_on_tiles_is_that_on_the_whole(ranks: Ranks, network: str, arrangement: Arrangement) -> None:
    check(ranks, network, arrangement)


@pytest.mark.parametrize("network", FOR_BOXES)
@pytest.mark.parametrize(
    "arrangement",
    [*OF_VOLUMES[1:2], *(pytest.param(a, marks=pytest.mark.exhaustive) for a in (*OF_VOLUMES[:1], *OF_VOLUMES[2:]))],
    ids=str,
)
@pytest.mark.sample(1)
def test_a_step_on_boxes_of_volumes_is_that_on_the_whole(ranks: Ranks, network: str, arrangement: Arrangement) -> None:
    check(ranks, network, arrangement)


@pytest.mark.exhaustive
@pytest.mark.parametrize("network", BUILDERS)
def test_a_step_of_networks_in_their_own_sizes(ranks: Ranks, network: str) -> None:
    volumes = len(BUILDERS[network].shape) == 5
    large = network in ("s3d", "swin3d_t")
    for arrangement in OF_VOLUMES if volumes and not large else OF_VOLUMES[:1] if volumes else ON_TILES:
        check(ranks, network, arrangement)


@pytest.mark.exhaustive
@pytest.mark.parametrize("network", FOREIGN)
def test_a_step_of_networks_of_timm_and_monai(ranks: Ranks, network: str) -> None:
    for arrangement in OF_DIMS[len(FOREIGN[network].shape) - 2]:
        check(ranks, network, arrangement)


MEASURED = [name for name, network in NETWORKS.items() if network.memory]
IN_THEIR_SIZES = [
    pytest.param(name, marks=pytest.mark.exhaustive) for name, network in BUILDERS.items() if network.memory
]


@pytest.mark.parametrize("network", [*MEASURED, *IN_THEIR_SIZES])
@on_ranks(4)
def test_what_is_kept_for_backward_is_spread(comm: Communicator, network: str) -> None:
    """Bytes that autograd saves, without parameters."""
    make, shape, _ = (NETWORKS | BUILDERS)[network]
    torch.set_default_dtype(torch.float32)
    model, image = make(), torch.randn(shape)
    counts = []
    for x in (tiled(image, grid_of(comm, Arrangement(2, 2))), image):
        saved = SavedTensors(model.parameters())
        with saved.counting():
            model(x)
        counts.append(saved.num_bytes)
    assert counts[0] <= MOST_MEMORY * counts[1]
