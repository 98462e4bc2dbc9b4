"""What runs on torch.distributed runs on our backend unchanged, and gives the numbers that it gives over gloo."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.comm.backend_programs import BROKEN, scenarios
from tests.pool.job import mpirun

# Both add many numbers, but in other orders; and gloo rounds to low precision after each addition, we once.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
LOW_PRECISION = {"ddp_low_precision_hooks": 1e-2, "ddp_builtin_hooks": 1e-2}


class Outcomes(NamedTuple):
    """By rank, by scenario: what the ranks returned, or the traceback of an error."""

    ours: list[dict[str, Any]]
    gloo: list[dict[str, Any]]


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 ranks"), pytest.param(4, id="4 ranks", marks=pytest.mark.exhaustive)]
)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """One job over each backend, because starting one takes longer than all that it does."""
    folder = tmp_path_factory.mktemp("outcomes")
    return Outcomes(run("mpi4dl", folder, request.param), run("gloo", folder, request.param))


def run(backend: str, folder: Path, size: int) -> list[dict[str, Any]]:
    done = mpirun(size, "-m", "tests.comm.backend_programs", backend, str(folder))
    # Gloo's own threads now and then abort a process that ends, which has stored all by then.
    assert done.code == 0 or backend == "gloo", done.stderr
    return [torch.load(folder / f"{backend}-{rank}-of-{size}.pt", weights_only=False) for rank in range(size)]


@pytest.mark.parametrize("name", scenarios())
def test_a_program_gives_the_same_over_ours_and_over_gloo(outcomes: Outcomes, name: str) -> None:
    if name in BROKEN:
        pytest.skip("PyTorch 2.10 itself fails at it over gloo (`BROKEN` says how)")
    for rank, (ours, gloo) in enumerate(zip(outcomes.ours, outcomes.gloo, strict=True)):
        assert not isinstance(ours[name], str), f"ours, rank {rank}:\n{ours[name]}"
        assert not isinstance(gloo[name], str), f"gloo, rank {rank}:\n{gloo[name]}"
        compare(ours[name], gloo[name], f"{name} on rank {rank}", LOW_PRECISION.get(name))


def compare(ours: Any, gloo: Any, where: str, tolerance: float | None) -> None:
    if isinstance(ours, Tensor):
        near = tolerance or TOLERANCE.get(ours.dtype, 0.0)
        torch.testing.assert_close(ours, gloo, rtol=near, atol=near, msg=lambda text: f"{where}: {text}")
    elif isinstance(ours, list):
        assert len(ours) == len(gloo), where
        for index, (mine, other) in enumerate(zip(ours, gloo, strict=True)):
            compare(mine, other, f"{where}, result {index}", tolerance)
    else:
        assert ours == gloo, where


def test_the_comparison_can_fail() -> None:
    compare([torch.ones(2), "x"], [torch.ones(2), "x"], "equal", None)
    for other in ([torch.ones(2), "y"], [torch.ones(2)], [torch.ones(2) + 1e-4, "x"], [torch.ones(2).double(), "x"]):
        with pytest.raises(AssertionError):
            compare([torch.ones(2), "x"], other, "different", None)
