"""Convolutional models: published sizes, images of any size, every parameter learns; and what is each one's own."""

from collections import Counter

import pytest
import torch
from torch import nn

from mpi4dl import models
from mpi4dl.models.amoebanet import NORMAL_CELL, REDUCTION_CELL, Cell, CellTable, FactorizedReduce
from mpi4dl.models.layers import initialize_convolutions
from mpi4dl.models.resnet import resnet_v1, resnet_v2, small_resnet
from mpi4dl.models.unet import UNet
from tests.models.counting import num_parameters, parameters_without_gradient


@pytest.mark.parametrize(
    ("name", "options", "millions", "decimals"),
    [
        # Of AmoebaNet-D those of GPipe, of ResNet v2 and U-Net those that public implementations print.
        *(
            ("amoebanetd", {"num_layers": layers, "num_filters": filters}, millions, decimals)
            for layers, filters, millions, decimals in [
                (18, 208, 81.5, 1),
                (18, 416, 319.0, 1),
                (18, 544, 542.7, 1),
                (36, 544, 1060, -1),
                (72, 512, 1840, -1),
            ]
        ),
        ("resnet_v2", {"depth": 164}, 1.703258, 6),
        ("resnet_v2", {"depth": 1001}, 10.327706, 6),
        ("unet", {"num_classes": 1}, 31.037633, 6),
        ("small_resnet", {}, 0.2, 1),
    ],
)
def test_models_have_the_published_sizes(name, options, millions, decimals):
    with torch.device("meta"):
        model = models.build(name, **options)
    assert round(num_parameters(model) / 1e6, decimals) == millions
    if name == "amoebanetd":
        assert len(model) == options["num_layers"] + 6
    if name == "resnet_v2":
        assert num_weighted_layers(model) == options["depth"]


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


@pytest.mark.parametrize(
    ("name", "options", "features"),
    [
        ("amoebanetd", {"num_layers": 3, "num_filters": 32}, None),
        ("resnet_v1", {"depth": 14, "num_filters": 8}, (32, 25, 33)),
        ("resnet_v2", {"depth": 20, "num_filters": 8}, (128, 25, 33)),
        ("small_resnet", {"pool": "avg"}, (64, 4, 5)),
        ("small_resnet", {"pool": "max"}, (64, 4, 5)),
        ("unet", {"num_filters": 4, "depth": 1}, None),
        ("unet", {"num_filters": 4, "depth": 3}, None),
    ],
)
def test_an_odd_image_goes_through_and_reaches_every_parameter(name, options, features):
    model, images = models.build(name, 5, in_channels=4, **options), torch.randn(4, 4, 97, 131)
    logits = model(images)
    logits.square().sum().backward()
    assert logits.shape == ((4, 5, 97, 131) if name == "unet" else (4, 5))
    assert not parameters_without_gradient(model)
    assert features is None or model[:-1](images).shape == (4, *features)


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("amoebanetd", {"num_layers": 3, "num_filters": 32}, [(1, 1), (2, 7), (64, 64), (97, 131)]),
        ("resnet_v1", {"depth": 8}, [(1, 1), (3, 2), (40, 24)]),
        ("resnet_v2", {"depth": 11}, [(1, 1), (3, 2), (40, 24)]),
        ("unet", {"num_filters": 4}, [(1, 1), (5, 2), (32, 48), (97, 131)]),
        ("unet", {"num_filters": 4, "depth": 3, "dims": 1}, [(19,)]),
        ("unet3d", {"num_filters": 4}, [(9, 5, 14)]),
    ],
)
def test_images_of_all_sizes_go_through(name, options, sizes):
    build = UNet if "dims" in options else lambda **options: models.build(name, **options)
    model = build(num_classes=5, in_channels=2, **options).eval()
    for size in sizes:
        assert model(torch.randn(2, 2, *size)).shape == ((2, 5, *size) if "unet" in name else (2, 5))
    if name == "amoebanetd":  # a normal cell keeps the size: only the last reduction lies between the two
        for size in sizes:
            pair = model[:-1](torch.randn(2, 2, *size))
            assert [tuple(x.shape[2:]) for x in pair] == [tuple(-(-n // 32) for n in size)] * 2


def test_convolutions_keep_the_variance_of_gradients():
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.Linear(64, 2))
    linear = model[1].weight.clone()
    initialize_convolutions(model)
    assert model[0].weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)
    assert torch.equal(model[1].weight, linear)


class Scale(nn.Module):
    """Stands in for an operation: multiplies by a number that tells which one it was."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def windows(operation: nn.Module) -> str:
    """Name an operation by the convolutions and poolings in it: 'conv 1x1, conv 3x3'."""
    found = []
    for module in operation.modules():
        if isinstance(module, nn.Conv2d):
            found.append("conv {}x{}".format(*module.kernel_size))
        elif isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
            found.append(f"{'max' if isinstance(module, nn.MaxPool2d) else 'avg'} {module.kernel_size}")
    return ", ".join(found)


def marked_cell(table: CellTable, stride: int, factors: list[int]) -> Cell:
    """A cell whose operations only multiply, and whose inputs are left as they are."""
    cell = Cell(table, previous_channels=4, current_channels=4, channels=4, stride=stride, previous_is_larger=False)
    cell.match_current = nn.Identity()
    cell.operations = nn.ModuleList(Scale(factor) for factor in factors)
    return cell


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            NORMAL_CELL,
            {"": 2, "conv 1x1": 3, "conv 1x1, conv 1x7, conv 7x1, conv 1x1": 2, "max 3": 2, "avg 3": 1},
        ),
        (
            REDUCTION_CELL,
            {
                "": 2,
                "conv 1x1": 1,
                "conv 1x1, conv 3x3, conv 1x1": 1,
                "conv 1x1, conv 1x7, conv 7x1, conv 1x1": 1,
                "max 2": 2,
                "max 3": 2,
                "avg 3": 1,
            },
        ),
    ],
)
def test_cells_have_the_published_operations(table, expected):
    stride = 1 if table is NORMAL_CELL else 2
    cell = Cell(table, previous_channels=8, current_channels=8, channels=8, stride=stride, previous_is_larger=False)
    assert Counter(map(windows, cell.operations)) == expected


def test_the_normal_cell_is_wired_as_published():
    a, b, c, d, e, f, g, h, i, j = factors = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    previous, current = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3, 5)
    first, output = marked_cell(NORMAL_CELL, 1, factors)((previous, current))
    s2 = a * previous + b * previous
    s3 = c * previous + d * current
    s4 = e * current + f * current
    s5 = g * s2 + h * s2
    s6 = i * previous + j * s5
    assert first is current
    torch.testing.assert_close(output, torch.cat([current, s3, s4, s6], dim=1))


def test_the_reduction_cell_is_wired_as_published():
    a, b, c, d, e, f, g, h, i, j = factors = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    previous, current = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3, 5)
    first, output = marked_cell(REDUCTION_CELL, 2, factors)((previous, current))
    s2 = a * current + b * current
    s3 = c * s2 + d * previous
    s4 = e * s2 + f * s2
    s5 = g * s3 + h * previous
    s6 = i * s2 + j * s3
    assert first is current
    torch.testing.assert_close(output, torch.cat([s4, s5, s6], dim=1))


def test_factorized_reduce_sees_the_even_and_the_odd_pixels():
    reduce = FactorizedReduce(1, 2).eval()
    nn.init.ones_(reduce.straight.weight)
    nn.init.ones_(reduce.shifted.weight)
    x = torch.arange(1.0, 21.0).reshape(1, 1, 5, 4)
    even, odd = (reduce(x) * (1 + reduce.norm.eps) ** 0.5)[0]
    torch.testing.assert_close(even, torch.tensor([[1.0, 3.0], [9.0, 11.0], [17.0, 19.0]]))
    torch.testing.assert_close(odd, torch.tensor([[6.0, 8.0], [14.0, 16.0], [0.0, 0.0]]))


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


def image_with_square(row: int, column: int) -> torch.Tensor:
    image = torch.zeros(1, 3, 768, 768)
    image[:, :, row : row + 60, column : column + 60] = torch.tensor([0.6, 0.4, 0.2]).reshape(3, 1, 1)
    return image


def test_the_position_of_an_object_does_not_matter():
    model = small_resnet().eval()
    here, there = model(image_with_square(352, 320)), model(image_with_square(384, 416))
    nowhere = model(torch.zeros(1, 3, 768, 768))
    torch.testing.assert_close(here, there)
    assert not torch.allclose(here, nowhere)


def test_the_two_poolings_differ_in_the_head_only():
    mean, maximum = small_resnet(pool="avg").eval(), small_resnet(pool="max").eval()
    maximum.load_state_dict(mean.state_dict())
    image = torch.randn(2, 3, 97, 131)
    features = mean[:-1](image)
    torch.testing.assert_close(mean(image), mean[-1].linear(features.flatten(2).mean(2)))
    torch.testing.assert_close(maximum(image), mean[-1].linear(features.flatten(2).max(2).values))


def test_what_is_cropped_is_beyond_the_image():
    """An odd image gives what the one-pixel-larger image gives, if its edge holds what the network pads with."""
    model = UNet(num_filters=4, depth=1).double().eval()
    # Only the way through the bottom is kept, and only its 1x1 parts, so that no 3x3 window looks over the edge.
    for block in (model.encoder[0], model.bottom, model.decoder[0]):
        for convolution in (block[0], block[3]):
            convolution.weight.data[:, :, [0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 0, 2, 0, 1, 2]] = 0
    image = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    odd = image[:, :, :7, :5]
    torch.testing.assert_close(model(odd)[:, :, :6, :4], model(image)[:, :, :6, :4])


def test_fx_traces_it_without_fixing_the_size():
    model = UNet(num_filters=4, depth=2).eval()
    traced = torch.fx.symbolic_trace(model)
    for size in [(33, 47), (16, 20)]:
        image = torch.randn(1, 3, *size)
        assert torch.equal(traced(image), model(image))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("amoebanetd", {"num_layers": 4}, r"num_layers=4 .* choose 3, 6, 9"),
        ("amoebanetd", {"num_filters": 30}, r"num_filters=30 .* choose a multiple of 4 that is at least 8"),
        ("small_resnet", {"pool": "sum"}, r"pool='sum' is unknown: choose 'avg' .* or 'max'"),
        ("unet", {"depth": 0}, "depth=0 and num_filters=64 must both be at least 1"),
        *(
            (
                name,
                {"depth": depth},
                rf"^depth={depth} is not possible: {name} has depth {rule} with n >= 1; the nearest legal depths are "
                rf"{nearest}$",
            )
            for name, depth, rule, nearest in [
                ("resnet_v1", 21, r"6n\+2", "20 and 26"),
                ("resnet_v1", 25, r"6n\+2", "20 and 26"),
                ("resnet_v1", 2, r"6n\+2", "8 and 14"),
                ("resnet_v2", 1000, r"9n\+2", "992 and 1001"),
                ("resnet_v2", -3, r"9n\+2", "11 and 20"),
            ]
        ),
    ],
)
def test_what_is_not_possible_says_what_is(name, options, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, **options)
    with pytest.raises(ValueError, match="dims=4 is not possible"):
        UNet(dims=4)


def test_a_small_resnet_without_norms_begins_as_its_shortcuts() -> None:
    model = small_resnet(norm="none")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    x = torch.rand(2, 16, 9, 9)
    assert torch.equal(model.stage1_block1(x), x)
    assert model(torch.zeros(1, 3, 64, 64)).equal(model.head.linear.bias[None])  # glass, where `mean` is 1
    with pytest.raises(ValueError, match="norm='group'"):
        small_resnet(norm="group")  # type: ignore[arg-type]
