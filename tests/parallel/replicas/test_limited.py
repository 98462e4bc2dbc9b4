"""A model whose training does not fit one rank trains on two, or with its state on disk; the limits are enforced."""

import re

import pytest

from tests.pool.job import Finished, mpirun


def limited(num_ranks: int, zero: int, offload: str = "none") -> Finished:
    return mpirun(num_ranks, "-m", "tests.support.limited", str(zero), offload)


@pytest.mark.exhaustive
def test_too_large_for_one_rank_fits_two() -> None:
    alone = limited(1, zero=0)
    assert alone.code == 1
    assert re.search(r"in _init_group[^$]*can't allocate memory", alone.stderr)  # of the optimizer's state

    shared, on_disk = limited(2, zero=3), limited(1, zero=0, offload="disk")
    assert (shared.code, on_disk.code) == (0, 0), shared.stderr + on_disk.stderr
    (parameters, loss), (others, other) = (done.stdout.split(" parameters, loss ") for done in (shared, on_disk))
    assert parameters == others
    assert float(loss) == pytest.approx(float(other), rel=1e-5)  # in float32, of gradients summed in another order
