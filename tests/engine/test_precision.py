"""mpi4dl.engine.precision: the scale of the loss falls at once and rises slowly; rows as integers of 8 bits."""

from collections.abc import Iterator

import pytest
import torch

from mpi4dl.engine.precision import (
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    SMALLEST_SCALE,
    LossScaler,
    choose_kernels,
    int8_of,
    kernels_chosen,
)


def test_the_scale_halves_when_a_step_overflows_and_doubles_after_many_that_do_not() -> None:
    scaler = LossScaler(enabled=True)
    assert (scaler.num_skipped, scaler.skipped_in_a_row, scaler.finite_steps) == (0, 0, 0)
    scaler.update(finite=False)
    scaler.update(finite=False)
    assert scaler.scale == INITIAL_SCALE / 4
    assert (scaler.skipped_in_a_row, scaler.finite_steps) == (2, 0)
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(finite=True)
        assert scaler.skipped_in_a_row == 0
    assert scaler.scale == INITIAL_SCALE / 4
    scaler.update(finite=False)
    for _ in range(GROWTH_INTERVAL):
        scaler.update(finite=True)
    assert scaler.scale == INITIAL_SCALE / 4
    assert (scaler.num_skipped, scaler.finite_steps) == (3, 0)


def test_the_scale_does_not_vanish() -> None:
    scaler = LossScaler(enabled=True)
    for _ in range(200):
        scaler.update(finite=False)
    assert scaler.scale == SMALLEST_SCALE


def test_without_fp16_the_scale_is_1() -> None:
    scaler = LossScaler(enabled=False)
    scaler.update(finite=False)
    assert scaler.scale == 1.0


def test_the_largest_of_each_row_is_127() -> None:
    rows = torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0], [254.0, 3.0, -254.0]])
    integers, scales = int8_of(rows)
    assert integers.tolist() == [[32, -127, 64], [0, 0, 0], [127, 2, -127]]
    assert scales[[0, 2]].tolist() == torch.tensor([2 / 127, 2.0]).tolist()


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "as it was")
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark = before
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tf32", "told"),
    [
        ("none", "float32 without TF32"),
        ("convolutions", "float32 convolutions in TF32"),
        ("all", "float32 convolutions and products in TF32"),
    ],
)
@pytest.mark.usefixtures("_kernels")
def test_a_run_says_what_its_gpu_rounds_and_whether_bits_repeat(tf32: str, told: str) -> None:
    choose_kernels(False, tf32)
    assert kernels_chosen() == f"{told}, bits that may differ from run to run"
    choose_kernels(True, tf32)
    assert torch.are_deterministic_algorithms_enabled()
    assert kernels_chosen() == f"{told}, the same bits in every run"
