"""Vision transformers, and networks for volumes, that know nothing of tiles: exact, and spread all the while."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator
from mpi4dl.models.resnet import resnet3d
from mpi4dl.models.unet import UNet
from tests.parallel.spatial.comparing import Arrangement, Case, Shape, compare, grid_of, tiled
from tests.parallel.spatial.test_memory import recording, saved_bytes
from tests.pool.ranks import Ranks

import_torchvision()
from torchvision.models import maxvit, swin_transformer, video, vision_transformer  # noqa: E402
from torchvision.models.video import resnet as video_resnet  # noqa: E402
from torchvision.models.video.swin_transformer import SwinTransformer3d, swin3d_t  # noqa: E402
from torchvision.ops import StochasticDepth  # noqa: E402


class Network(NamedTuple):
    """What makes a network, and a batch that it takes. `memory`: whether it stays spread to its last layer."""

    make: Callable[[], nn.Module]
    shape: Shape
    memory: bool = True


def swin(second: bool = False, window: int = 4) -> nn.Module:
    block = swin_transformer.SwinTransformerBlockV2 if second else swin_transformer.SwinTransformerBlock
    merging = swin_transformer.PatchMergingV2 if second else swin_transformer.PatchMerging
    return swin_transformer.SwinTransformer(
        [4, 4], 24, [2, 2], [2, 4], [window, window], stochastic_depth_prob=0.0, num_classes=5, block=block,
        downsample_layer=merging,
    )  # fmt: skip


def undisturbed(model: nn.Module) -> nn.Module:
    """The model without stochastic depth."""
    for module in model.modules():
        if isinstance(module, StochasticDepth):
            module.p = 0.0
    return model


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
    "resnet3d": Network(lambda: resnet3d(8, 5, num_filters=4), (2, 3, 9, 13, 11), False),
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
ARRANGEMENTS = [Arrangement(1, 2), Arrangement(2, 1), Arrangement(2, 2)]
OF_VOLUMES = [Arrangement(1, 2, depth=1), Arrangement(1, 1, depth=2), Arrangement(2, 2, depth=1)]
OF_VOLUMES += [Arrangement(2, 1, depth=2)]
MOST_MEMORY = 0.35  # of plain PyTorch's, on 2 x 2 tiles


def differences(comm: Communicator, network: str, arrangement: Arrangement) -> list[str]:
    torch.set_default_dtype(torch.float64)
    make, shape, _ = (NETWORKS | BUILDERS)[network]
    return compare(comm, Case(lambda: make().double(), (shape,), spread=False), shape, arrangement)


@pytest.mark.parametrize("network", [name for name in NETWORKS if name not in FOR_BOXES])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
@pytest.mark.sample(8)
def test_a_step_on_tiles_is_that_on_the_whole(ranks: Ranks, network: str, arrangement: Arrangement) -> None:
    assert ranks(arrangement.size).run(differences, network, arrangement) == [[]] * arrangement.size


@pytest.mark.parametrize("network", FOR_BOXES)
@pytest.mark.parametrize(
    "arrangement",
    [*OF_VOLUMES[1:2], *(pytest.param(a, marks=pytest.mark.exhaustive) for a in (*OF_VOLUMES[:1], *OF_VOLUMES[2:]))],
    ids=str,
)
@pytest.mark.sample(1)
def test_a_step_on_boxes_of_volumes_is_that_on_the_whole(ranks: Ranks, network: str, arrangement: Arrangement) -> None:
    assert ranks(arrangement.size).run(differences, network, arrangement) == [[]] * arrangement.size


@pytest.mark.exhaustive
@pytest.mark.parametrize("network", BUILDERS)
def test_a_step_of_networks_in_their_own_sizes(ranks: Ranks, network: str) -> None:
    volumes = len(BUILDERS[network].shape) == 5
    large = network in ("s3d", "swin3d_t")
    for arrangement in OF_VOLUMES if volumes and not large else OF_VOLUMES[:1] if volumes else ARRANGEMENTS:
        assert ranks(arrangement.size).run(differences, network, arrangement) == [[]] * arrangement.size


def kept(comm: Communicator, network: str) -> tuple[int, int]:
    """The bytes that autograd saves on this rank of 2 x 2, and of plain PyTorch, without parameters."""
    make, shape, _ = (NETWORKS | BUILDERS)[network]
    torch.set_default_dtype(torch.float32)
    model, image = make(), torch.randn(shape)
    counts = []
    for x in (tiled(image, grid_of(comm, Arrangement(2, 2))), image):
        with recording(saved := []):
            model(x)
        counts.append(saved_bytes(saved, list(model.parameters())))
    return counts[0], counts[1]


MEASURED = [name for name, network in NETWORKS.items() if network.memory]
IN_THEIR_SIZES = [
    pytest.param(name, marks=pytest.mark.exhaustive) for name, network in BUILDERS.items() if network.memory
]


@pytest.mark.parametrize("network", [*MEASURED, *IN_THEIR_SIZES])
def test_what_is_kept_for_backward_is_spread(ranks: Ranks, network: str) -> None:
    for ours, plain in ranks(4).run(kept, network):
        assert ours <= MOST_MEMORY * plain
