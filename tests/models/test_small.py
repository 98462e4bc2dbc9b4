"""The small network is small, and with maximum pooling it finds an object wherever it is."""

import pytest
import torch

from mpi4dl.models.resnet import small_resnet
from tests.models.counting import num_parameters, parameters_without_gradient


def image_with_square(row: int, column: int) -> torch.Tensor:
    image = torch.zeros(1, 3, 768, 768)
    image[:, :, row : row + 60, column : column + 60] = torch.tensor([0.6, 0.4, 0.2]).reshape(3, 1, 1)
    return image


def test_it_is_small():
    assert 100_000 < num_parameters(small_resnet()) < 300_000


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_an_odd_image_goes_through_and_reaches_every_parameter(pool):
    model = small_resnet(num_classes=3, in_channels=4, pool=pool)
    logits = model(torch.randn(4, 4, 97, 131))
    logits.square().sum().backward()
    assert logits.shape == (4, 3)
    assert not parameters_without_gradient(model)
    assert model[:-1](torch.randn(2, 4, 97, 131)).shape == (2, 64, 4, 5)


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


def test_an_unknown_pooling_names_the_known_ones():
    with pytest.raises(ValueError, match=r"pool='sum' is unknown: choose 'avg' .* or 'max'"):
        small_resnet(pool="sum")
