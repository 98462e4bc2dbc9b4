"""mpi4dl.engine.precision: the scale of the loss falls at once and rises slowly."""

from mpi4dl.engine.precision import GROWTH_INTERVAL, INITIAL_SCALE, LossScaler


def test_the_scale_halves_when_a_step_overflows_and_doubles_after_many_that_do_not() -> None:
    scaler = LossScaler(enabled=True)
    scaler.update(finite=False)
    scaler.update(finite=False)
    assert scaler.scale == INITIAL_SCALE / 4
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(finite=True)
    assert scaler.scale == INITIAL_SCALE / 4
    scaler.update(finite=False)
    for _ in range(GROWTH_INTERVAL):
        scaler.update(finite=True)
    assert scaler.scale == INITIAL_SCALE / 4


def test_without_fp16_the_scale_is_1() -> None:
    scaler = LossScaler(enabled=False)
    scaler.update(finite=False)
    assert scaler.scale == 1.0
