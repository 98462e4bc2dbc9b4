"""Convolutions on tiles of many kernels, strides, paddings and groups, also transposed ones, are those of the whole."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.spatial.comparing import ARRANGEMENTS, chosen, modules, table_test

CASES = {
    **modules(
        lambda: nn.Conv2d(4, 6, 1),
        lambda: nn.Conv2d(4, 6, 1, stride=2),
        lambda: nn.Conv2d(4, 6, 1, padding=1),
        lambda: nn.Conv2d(4, 6, 2),
        lambda: nn.Conv2d(4, 6, 2, stride=2),
        lambda: nn.Conv2d(4, 6, 2, padding=1),
        lambda: nn.Conv2d(4, 6, 3),
        lambda: nn.Conv2d(4, 6, 3, padding=1, bias=False),
        lambda: nn.Conv2d(4, 6, 3, stride=2),
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
        lambda: nn.Conv2d(4, 6, 3, stride=3, padding=1),
        lambda: nn.Conv2d(4, 6, 3, stride=4, padding=2),
        lambda: nn.Conv2d(4, 6, 3, padding=4),
        lambda: nn.Conv2d(4, 6, 4, stride=2, padding=1),
        lambda: nn.Conv2d(4, 6, 5, padding=2),
        lambda: nn.Conv2d(4, 6, 5, stride=3, padding=2),
        lambda: nn.Conv2d(4, 6, 7, stride=2, padding=3, bias=False),
        lambda: nn.Conv2d(4, 6, 7, stride=4, padding=3),
        lambda: nn.Conv2d(4, 6, 11, stride=2, padding=5),
        lambda: nn.Conv2d(4, 6, (1, 7), padding=(0, 3)),
        lambda: nn.Conv2d(4, 6, (7, 1), padding=(3, 0)),
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 0)),
        lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2),
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=4, dilation=3),
        lambda: nn.Conv2d(4, 6, 2, padding=(2, 1), dilation=(3, 1)),
        lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
        lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
        lambda: nn.Conv2d(4, 6, 3, padding="same"),
        lambda: nn.Conv2d(4, 6, 4, padding="same"),
        lambda: nn.Conv2d(4, 6, (2, 5), padding="same", dilation=(3, 1)),
        lambda: nn.Conv2d(4, 6, 3, padding="valid"),
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        lambda: nn.Conv2d(4, 6, 5, stride=2, padding=2, padding_mode="reflect"),
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        lambda: nn.Conv2d(4, 6, 5, padding=(2, 1), padding_mode="circular"),
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"),
        lambda: nn.Conv2d(4, 6, 4, padding="same", padding_mode="reflect"),
    ),
    **modules(
        lambda: nn.Conv2d(4, 6, 9, stride=8, padding=4),
        lambda: nn.Conv2d(4, 6, 13),
        lambda: nn.Conv2d(4, 6, 3, padding=6, dilation=6),
        lambda: nn.Conv2d(4, 6, 3, padding=5, padding_mode="reflect"),
        sizes=[(13, 17)],
    ),
    **modules(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 7, padding=6), nn.Conv2d(4, 4, 2), nn.Conv2d(4, 4, 5, 3)),
    ),
    **{
        f"{name} of whole tiles": case
        for name, case in modules(
            lambda: nn.Conv2d(4, 6, 3, padding=1),
            lambda: nn.Conv2d(4, 6, 7, 2, 3),
            lambda: nn.Conv2d(4, 6, 3, 2),
            lambda: nn.Conv2d(4, 6, 3, 2, 1),
            lambda: nn.Conv2d(4, 6, 4, 2, 1),
            lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1),
            lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
            lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Upsample(scale_factor=2, mode="bilinear")),
            lambda: nn.Sequential(
                nn.Conv2d(4, 8, 7, 2, 3, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
                nn.Conv2d(8, 8, 3),
            ),
            sizes=[(64, 32), (62, 32)],
        ).items()
    },
}

test_convolutions_equal_those_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


TRANSPOSED = modules(
    lambda: nn.ConvTranspose2d(4, 6, 1),
    lambda: nn.ConvTranspose2d(4, 6, 1, stride=2),
    lambda: nn.ConvTranspose2d(4, 6, 2, stride=2),
    lambda: nn.ConvTranspose2d(4, 6, 2, stride=3),
    lambda: nn.ConvTranspose2d(4, 6, 3, bias=False),
    lambda: nn.ConvTranspose2d(4, 6, 3, padding=1),
    lambda: nn.ConvTranspose2d(4, 6, 3, padding=2),
    lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
    lambda: nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1),
    lambda: nn.ConvTranspose2d(4, 6, 5, stride=3, padding=2, output_padding=2),
    lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=2, dilation=2, output_padding=1),
    lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(1, 2), padding=(1, 0)),
    lambda: nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1, groups=2),
    lambda: nn.ConvTranspose2d(4, 4, 7, stride=2, padding=3, output_padding=1, groups=4),
    lambda: nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 4, 2, stride=2)),
)

test_transposed_convolutions_equal_those_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS), "TRANSPOSED")


@pytest.mark.parametrize(
    ("dtype", "image", "outputs", "kernel", "stride", "padding", "dilation", "transposed"),
    [
        (torch.bfloat16, (4, 8, 1, 1), 16, 1, 2, 0, 1, False),
        (torch.bfloat16, (4, 16, 7, 1), 8, 3, 2, 1, 1, False),
        (torch.bfloat16, (4, 24, 17, 31), 128, 3, 1, 2, 2, False),
        (torch.bfloat16, (7, 128, 2, 9), 48, 7, 1, 3, 1, False),
        (torch.bfloat16, (4, 16, 22, 38), 32, 3, 1, 3, 3, True),
        (torch.bfloat16, (2, 32, 4, 12, 12), 32, 5, 1, 2, 1, False),
        (torch.float32, (2, 4, 5, 12, 12), 8, 7, 2, 3, 1, False),
    ],
)
def test_gradients_of_weights_read_no_memory_beside_images(
    dtype: torch.dtype,
    image: tuple[int, ...],
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    transposed: bool,
) -> None:
    count = len(image) - 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(image).to(dtype)
        weight = torch.randn(*((image[1], outputs) if transposed else (outputs, image[1])), *[kernel] * count).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last if count == 2 else torch.channels_last_3d)
    numbers = [stride] * count, [padding] * count, [dilation] * count, transposed, [0] * count, 1
    gradient = torch.ones_like(torch.convolution(x, weight, None, *numbers)) / 8
    for _ in range(3):
        freed = [torch.full((1 << n,), torch.nan, dtype=torch.bfloat16) for n in range(4, 21) for _ in range(8)]
        del freed
        mask = [True, True, True]
        args = [weight.shape[0 if not transposed else 1]], *numbers, mask
        found = torch.ops.aten.convolution_backward(gradient, x, weight, *args)
        expected = torch.ops.aten.convolution_backward(gradient.double(), x.double(), weight.double(), *args)
        for ours, exact in zip(found, expected, strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("padding", [1, "same"])
@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (3, 3)])
def test_volumes_of_one_slice_read_no_memory_beside_them(channels: int, groups: int, padding: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, weight = torch.randn(2, channels, 1, 5, 7), torch.randn(2 * channels, 1, 3, 3, 3)
    x, weight = (each.bfloat16().to(memory_format=torch.channels_last_3d) for each in (x, weight))
    exact = [torch.empty(each.shape, dtype=torch.float64).copy_(each) for each in (x, weight)]
    for _ in range(3):
        freed = [torch.full((1 << n,), torch.nan, dtype=torch.bfloat16) for n in range(4, 21) for _ in range(8)]
        del freed
        found = nn.functional.conv3d(x, weight, padding=padding, groups=groups)
        expected = nn.functional.conv3d(*exact, padding=padding, groups=groups)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("count", [1, 2])
def test_kernels_of_one_pixel_are_convolved_by_onednn_on_one_thread_too(count: int) -> None:
    assert torch.get_num_threads() == 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 32, *{1: (4096,), 2: (64, 64)}[count], generator=generator).requires_grad_()
    weight, bias = torch.randn(40, 32, *[1] * count, generator=generator).requires_grad_(), torch.ones(40)
    convolve = getattr(nn.functional, f"conv{count}d")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        y = convolve(x, weight, bias)
        y.square().sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "aten::mkldnn_convolution" in names
    assert "aten::_slow_conv2d_backward" not in names
    exact, wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = convolve(exact, wide, bias.double())
    expected.square().sum().backward()
    for found, right in ((y, expected), (x.grad, exact.grad), (weight.grad, wide.grad)):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-3)
