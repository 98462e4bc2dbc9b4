"""Patches of images, which of them are tissue, and what is left of a model without its head."""

import pytest
import torch
from torch import nn

from mpi4dl import models
from mpi4dl.models.patches import AGGREGATORS, PatchModel, chosen, cut, headless, tissue


def test_patches_come_row_by_row() -> None:
    images = torch.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    found = cut(images, 2)
    assert found.shape == (2 * 2 * 3, 3, 2, 2)
    assert torch.equal(found[0], images[0, :, :2, :2])
    assert torch.equal(found[4], images[0, :, 2:4, 2:4])
    assert torch.equal(found[11], images[1, :, 2:4, 4:6])


def test_tissue_is_what_has_a_colour() -> None:
    grey = torch.rand(1, 1, 4, 4).expand(1, 3, 4, 4)
    half = grey.clone()
    half[0, 0, :2] += 1.0
    assert tissue(torch.cat([grey, half]), 0.5).tolist() == [0.0, 0.5]


def test_an_image_without_tissue_keeps_its_first_best_patch() -> None:
    assert chosen(torch.tensor([0.0, 0.3, 0.3, 0.2]), 0.5).tolist() == [1]
    assert chosen(torch.zeros(3), 0.5).tolist() == [0]
    assert chosen(torch.tensor([0.5, 0.3, 0.6]), 0.5).tolist() == [0, 2]


@pytest.mark.parametrize("num_classes", [1, 2, 3])
@pytest.mark.parametrize("name", ["mean", "max"])
def test_what_patches_add_to_the_logit(name: str, num_classes: int) -> None:
    """Without the bias and the covariates they sum to it; one feature counts for the patch that it is of."""
    torch.manual_seed(1)
    aggregator, features = AGGREGATORS[name](8, num_classes, num_covariates=2).double(), torch.randn(5, 8).double()
    covariates = torch.tensor([0.5, 2.0], dtype=torch.float64)
    with torch.no_grad():
        found, logits = aggregator.contribution(features, covariates), aggregator(features, covariates)
        rest = aggregator(torch.zeros(1, 8).double(), covariates)
    number = int(logits.argmax())
    expected = (logits - rest).diff() if num_classes == 2 else (logits - rest)[number]
    assert found.sum().item() == pytest.approx(expected.item(), abs=1e-12)
    weight = aggregator.head.weight.detach()[:, :8]
    weight = weight.diff(dim=0)[0] if num_classes == 2 else weight[number]
    parts = features * weight / 5 if name == "mean" else (features == features.amax(0)) * features * weight
    assert torch.allclose(found, parts.sum(1))


@pytest.mark.parametrize("name", AGGREGATORS)
def test_aggregators_know_no_order(name: str) -> None:
    torch.manual_seed(0)
    aggregator, features = AGGREGATORS[name](8, 3).double(), torch.rand(5, 8, dtype=torch.float64)
    found = aggregator(features)
    assert found.shape == (3,)
    assert torch.allclose(found, aggregator(features[[3, 0, 4, 1, 2]]))
    assert not torch.allclose(found, aggregator(features + features[:1]))


@pytest.mark.parametrize(
    ("name", "num_features"), [("resnet18", 512), ("small_resnet", 64), ("vit_b_16", 768), ("densenet121", 1024)]
)
def test_models_without_their_head(name: str, num_features: int) -> None:
    with torch.device("meta"):
        model = models.build(name, 7)
        assert headless(model, 7) == num_features
        assert model.eval()(torch.empty(2, 3, 224, 224)).shape == (2, num_features)


def test_what_has_no_patches_is_refused() -> None:
    with pytest.raises(ValueError, match="images of 4 x 9 px have no patches of 5 x 5 px"):
        PatchModel(nn.Flatten(), nn.Identity(), 5)(torch.empty(1, 3, 4, 9))
    with pytest.raises(ValueError, match="does not end in a linear layer"):
        headless(nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 4)), 7)
    with pytest.raises(ValueError, match="a share between 0 and 1"):
        PatchModel(nn.Flatten(), nn.Identity(), 5, 1.5)
