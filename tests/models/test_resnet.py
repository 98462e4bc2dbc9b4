"""The deep residual networks have the published sizes, the depth that they say, and take images of any size."""

import pytest
import torch
from torch import nn

from mpi4dl.models.resnet import resnet_v1, resnet_v2
from tests.models.counting import num_parameters, parameters_without_gradient


def num_weighted_layers(model: nn.Module) -> int:
    """Count convolutions and linear layers, as the papers do: without those on the shortcuts."""
    return sum(
        isinstance(module, nn.Conv2d | nn.Linear)
        for name, module in model.named_modules()
        if "shortcut" not in name and "projection" not in name
    )


# Depth and parameters in millions: table 6 of the first paper, whose shortcuts have no parameters.
@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (1202, 19.4)])
@pytest.mark.sample(2)
def test_v1_has_the_published_size(depth, millions):
    with torch.device("meta"):
        model = resnet_v1(depth)
    shortcuts = sum(num_parameters(module) for name, module in model.named_modules() if name.endswith("shortcut"))
    assert round((num_parameters(model) - shortcuts) / 1e6, 2 if millions < 1 else 1) == millions
    assert num_weighted_layers(model) == depth


# The counts that public implementations print for the paper's 1.7 M and 10.2 M.
@pytest.mark.parametrize(("depth", "parameters"), [(164, 1_703_258), (1001, 10_327_706)])
@pytest.mark.sample(1)
def test_v2_has_the_published_size(depth, parameters):
    with torch.device("meta"):
        model = resnet_v2(depth)
    assert num_parameters(model) == parameters
    assert num_weighted_layers(model) == depth


@pytest.mark.parametrize(("build", "depth", "channels"), [(resnet_v1, 14, 32), (resnet_v2, 20, 128)])
@pytest.mark.sample(1)
def test_an_odd_image_goes_through_and_reaches_every_parameter(build, depth, channels):
    model = build(depth, num_classes=5, num_filters=8, in_channels=2)
    logits = model(torch.randn(2, 2, 97, 131))
    logits.square().sum().backward()
    assert logits.shape == (2, 5)
    assert not parameters_without_gradient(model)
    assert model[:-1](torch.randn(2, 2, 97, 131)).shape == (2, channels, 25, 33)


@pytest.mark.parametrize(("build", "depth"), [(resnet_v1, 8), (resnet_v2, 11)])
def test_one_head_serves_images_of_all_sizes(build, depth):
    model = build(depth).eval()
    for size in [(1, 1), (3, 2), (40, 24)]:
        assert model(torch.randn(1, 3, *size)).shape == (1, 10)


def test_v2_passes_its_input_untouched_along_an_identity_shortcut():
    block = resnet_v2(20)[2]
    nn.init.zeros_(block.conv3.weight)
    x = torch.randn(2, 64, 5, 6)
    assert torch.equal(block(x), x)


def test_v2_projects_its_activated_input_where_the_shape_changes():
    block = resnet_v2(20).get_submodule("stage2_block1").eval()
    nn.init.zeros_(block.conv3.weight)
    x = torch.randn(2, 64, 5, 6)
    activated = (x / (1 + block.norm1.eps) ** 0.5).clamp(min=0)
    torch.testing.assert_close(block(x), block.projection(activated))


@pytest.mark.parametrize(
    ("build", "depth", "rule", "nearest"),
    [
        (resnet_v1, 21, "6n+2", "20 and 26"),
        (resnet_v1, 25, "6n+2", "20 and 26"),
        (resnet_v1, 2, "6n+2", "8 and 14"),
        (resnet_v2, 1000, "9n+2", "992 and 1001"),
        (resnet_v2, -3, "9n+2", "11 and 20"),
    ],
)
def test_an_illegal_depth_names_the_nearest_legal_ones(build, depth, rule, nearest):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        build(depth)
    assert str(caught.value) == (
        f"depth={depth} is not possible: {build.__name__} has depth {rule} with n >= 1; "
        f"the nearest legal depths are {nearest}"
    )
