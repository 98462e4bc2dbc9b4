"""U-Net has the size that public implementations print, and labels every pixel of an image of any size."""

import pytest
import torch

from mpi4dl.models.unet import UNet
from tests.models.counting import num_parameters, parameters_without_gradient


def test_parameter_count():
    with torch.device("meta"):
        assert num_parameters(UNet(num_classes=1)) == 31_037_633


@pytest.mark.parametrize("size", [(1, 1), (5, 2), (32, 48), (97, 131)])
def test_the_output_has_the_size_of_the_image(size):
    model = UNet(num_classes=3, in_channels=2, num_filters=4, depth=4).eval()
    assert model(torch.randn(2, 2, *size)).shape == (2, 3, *size)


@pytest.mark.parametrize("size", [(19,), (9, 5, 14)])
def test_sequences_and_volumes(size):
    model = UNet(num_classes=3, in_channels=2, num_filters=4, depth=3, dims=len(size)).eval()
    assert model(torch.randn(2, 2, *size)).shape == (2, 3, *size)
    with pytest.raises(ValueError, match="dims=4 is not possible"):
        UNet(dims=4)


@pytest.mark.parametrize("depth", [1, 3])
def test_an_odd_image_reaches_every_parameter(depth):
    model = UNet(num_filters=4, depth=depth)
    model(torch.randn(2, 3, 97, 131)).square().sum().backward()
    assert not parameters_without_gradient(model)


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


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="depth=0 and num_filters=64 must both be at least 1"):
        UNet(depth=0)
