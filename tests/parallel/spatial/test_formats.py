"""Memory formats, images without a batch, low precision and parameters without gradients, on tiles as on the whole."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import (
    ARRANGEMENTS,
    Arrangement,
    Case,
    arrange,
    compare_models,
    sum_gradients,
    table_test,
)
from tests.pool.ranks import Ranks, on_ranks

UNBATCHED = ((4, 13, 17), (4, 5, 9))


CASES = {
    "convolution": Case(lambda: nn.Conv2d(4, 6, 3, 2, 1), UNBATCHED),
    "transposed convolution": Case(lambda: nn.ConvTranspose2d(4, 6, 4, 2, 1), UNBATCHED),
    "max pooling": Case(lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), UNBATCHED),
    "average pooling": Case(lambda: nn.AvgPool2d(3, 1, 1), UNBATCHED),
    "adaptive pooling": Case(lambda: nn.AdaptiveAvgPool2d((2, 3)), UNBATCHED, spread=False),
    "unfolding": Case(lambda: nn.Unfold(3, stride=2), UNBATCHED),
    "reflection": Case(lambda: nn.ReflectionPad2d(2), UNBATCHED),
    "pixel shuffle": Case(lambda: nn.PixelShuffle(2), UNBATCHED),
    "network": Case(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)), UNBATCHED
    ),
    "five dims, pointwise": Case(lambda: nn.Softplus(), ((2, 3, 4, 13, 17),)),
}


test_images_without_a_batch = table_test(__name__, [a for a in ARRANGEMENTS if a.batch == 1])


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 5, padding=2, groups=8),
        nn.AvgPool2d(3, 1, 1),
        nn.Conv2d(8, 6, 3, stride=2, padding=1),
    )


@pytest.mark.parametrize(
    "arrangement", [Arrangement(2, 2), Arrangement(4, 1), Arrangement(2, 2, style="wide")], ids=str
)
@on_ranks(4)
def test_channels_last_stays_so_and_is_exact(comm: Communicator, arrangement: Arrangement) -> None:
    torch.set_default_dtype(torch.float64)
    model = network().to(memory_format=torch.channels_last)
    plain_model = network()
    plain_model.load_state_dict(model.state_dict())
    image = torch.randn(2, 4, 13, 17).contiguous(memory_format=torch.channels_last)
    result = model(arrange(image, comm, arrangement))
    last = result.local.is_contiguous(memory_format=torch.channels_last)
    whole, plain = spatial.gather(result), plain_model(image.contiguous())
    (whole.square().sum() / comm.size).backward()
    plain.square().sum().backward()
    torch.testing.assert_close(whole, plain, rtol=1e-12, atol=1e-12)
    assert last
    assert compare_models(comm, model, plain_model) == []


@pytest.mark.parametrize("narrowed", [False, True])
@on_ranks(2)
def test_dropout_behind_a_group_norm_draws_in_the_order_that_the_norm_leaves(
    comm: Communicator, narrowed: bool
) -> None:
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Dropout(0.5))
    image = torch.randn(2, 13, 10, 8).permute(0, 3, 1, 2)  # as of tokens that became pixels again
    image = image[:, :4] if narrowed else image[:, :4].contiguous(memory_format=torch.channels_last)
    torch.manual_seed(2)
    plain = model(image)
    torch.manual_seed(2)
    ours = model(arrange(image, comm, Arrangement(1, 2)))
    torch.testing.assert_close(spatial.gather(ours), plain, rtol=1e-12, atol=1e-12)


def train_in_low_precision(comm: Communicator, arrangement: Arrangement, dtype: torch.dtype, whole_model: bool) -> None:
    """A step in low precision, by autocast or with the model itself cast, is as near to float64 as PyTorch's own."""
    exact = network().double()
    ours, plain = copy.deepcopy(exact).float(), copy.deepcopy(exact).float()
    image = torch.randn(2, 4, 24, 20)
    if whole_model:
        ours, plain, image = ours.to(dtype), plain.to(dtype), image.to(dtype)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=not whole_model and model is not exact):
            result = spatial.gather(model(x))
        result.double().square().mean().div(comm.size if model is ours else 1).backward()
        return result.detach()

    result = step(ours, arrange(image, comm, arrangement))
    reference, plain_result = step(exact, image.double()), step(plain, image)
    assert result.dtype == plain_result.dtype
    sum_gradients(ours, comm)
    error, plain_error = ((r.double() - reference).abs().max() for r in (result, plain_result))
    assert error <= 2 * plain_error + 0.01, (error, plain_error)
    for (name, a), b, c in zip(ours.named_parameters(), plain.parameters(), exact.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype
        error, plain_error = ((p.grad.double() - c.grad).abs().max() for p in (a, b))
        assert error <= 3 * plain_error + 0.02 * c.grad.abs().max() + 1e-3, (name, error, plain_error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole_model", [False, True], ids=["autocast", "cast"])
def test_low_precision_is_as_near_as_that_of_pytorch(ranks: Ranks, dtype: torch.dtype, whole_model: bool) -> None:
    for arrangement in (Arrangement(2, 2), Arrangement(4, 1, style="uneven")):
        ranks(4).run(train_in_low_precision, arrangement, dtype, whole_model)


@pytest.mark.parametrize("trained", ["weight", "bias", "image"])
@on_ranks(2)
def test_gradients_that_nobody_asked_for_are_not_needed(comm: Communicator, trained: str) -> None:
    """Only the weight, or only the bias, or only the image, has a gradient; and each is exact."""
    torch.set_default_dtype(torch.float64)
    layer, image = nn.Conv2d(4, 6, 3, padding=1), torch.randn(1, 4, 9, 8)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == trained)
    values = {"weight": layer.weight, "bias": layer.bias, "image": image.requires_grad_(trained == "image")}
    value = values[trained]
    (expected,) = torch.autograd.grad(layer(image).square().sum(), value)
    (found,) = torch.autograd.grad(spatial.gather(layer(arrange(image, comm, Arrangement(2, 1)))).square().sum(), value)
    torch.testing.assert_close(comm.all_reduce(found.contiguous()) / comm.size, expected)


@on_ranks(2)
def test_forward_hooks_see_the_whole(comm: Communicator) -> None:
    torch.set_default_dtype(torch.float64)
    model, image = network(), torch.randn(2, 4, 12, 12)
    seen: list[str] = []
    model[3].register_forward_hook(lambda module, args, y: seen.append(f"{type(module).__name__} {tuple(y.shape)}"))
    model(arrange(image, comm, Arrangement(2, 1)))
    assert seen == ["MaxPool2d (2, 8, 6, 6)"]
