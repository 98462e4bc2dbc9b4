"""What one rank finds wrong, all ranks refuse together, with one message that names the rank or the values."""

from contextlib import nullcontext

import pytest
import torch

from mpi4dl.comm import Communicator, Refusal
from tests.pool.ranks import Ranks, on_ranks


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"batch_size": [8, 8, 8], "tiles": [(2, 1), (2, 1), (2, 1)]}, ""),
        ({"seed": [1, 1, 1], "batch_size": [8, 8, 16]}, "batch_size is 8 on rank 0 but 16 on rank 2"),
        ({"model": ["resnet", None, "unet"]}, "model is 'resnet' on rank 0 but None on rank 1"),
    ],
)
@on_ranks(3)
def test_different_facts_are_refused_with_their_values(
    comm: Communicator, facts: dict[str, list[object]], said: str
) -> None:
    words = f"^the ranks were started differently: {said}: start all ranks with the same command$"
    with pytest.raises(Refusal, match=words) if said else nullcontext():
        comm.agree(None, **{name: values[comm.rank] for name, values in facts.items()})


@pytest.mark.parametrize(
    ("num_ranks", "failing", "said"),
    [
        (3, (1,), "^rank 1: complaint 1$"),
        (3, (2, 1), "^rank 1: complaint 1$"),
        (3, (0, 1, 2), "^complaint 0$"),
        (1, (0,), "^complaint 0$"),
        (1, (), ""),
    ],
)
@on_ranks()
def test_an_error_comes_before_facts_and_the_first_rank_speaks(
    comm: Communicator, num_ranks: int, failing: tuple[int, ...], said: str
) -> None:
    with pytest.raises(Refusal, match=said) if said else nullcontext():
        comm.agree(f"complaint {comm.rank}" if comm.rank in failing else None, rank=comm.rank)


def open_together(comm: Communicator, failing: tuple[int, ...]) -> tuple[str, str, float]:
    cause, message = "", ""
    try:
        with comm.together():
            if comm.rank in failing:
                raise FileNotFoundError(2, "no such slide", f"tile{comm.rank}.tiff")
    except Refusal as refusal:
        cause, message = type(refusal.__cause__).__name__, str(refusal)
    return cause, message, float(comm.all_reduce(torch.ones(())))


def test_together_gives_all_ranks_the_message_of_the_one_that_failed(ranks: Ranks) -> None:
    message = "rank 2: [Errno 2] no such slide: 'tile2.tiff'"
    others = ("NoneType", message, 3.0)
    assert ranks(3).run(open_together, (2,)) == [others, others, ("FileNotFoundError", message, 3.0)]
    assert ranks(3).run(open_together, ()) == [("", "", 3.0)] * 3


@on_ranks(2)
def test_a_refusal_inside_together_is_still_the_same_on_all_ranks(comm: Communicator) -> None:
    with pytest.raises(Refusal, match="rank is 0 on rank 0 but 1 on rank 1") as caught, comm.together():
        comm.agree(None, rank=comm.rank)
    assert len(set(comm.all_gather_object(str(caught.value)))) == 1


class Odd(Exception):
    """Of a kind that nobody named."""


def fail_otherwise(comm: Communicator, failing: tuple[int, ...]) -> tuple[str, str, float]:
    try:
        with comm.together():
            if comm.rank in failing:
                raise Odd(f"a bug of rank {comm.rank}, not a refusal")
    except Exception as error:
        return type(error).__name__, str(error), float(comm.all_reduce(torch.ones(())))
    return "", "", float(comm.all_reduce(torch.ones(())))


@on_ranks(2)
def test_together_gives_all_ranks_refusals_of_the_kinds_it_was_given(comm: Communicator) -> None:
    with pytest.raises(Refusal, match=r"^strange 0$"), comm.together((Odd,)):
        raise Odd(f"strange {comm.rank}")


def test_any_other_error_of_one_rank_is_heard_by_all_and_goes_on_where_it_happened(ranks: Ranks) -> None:
    first, second, third = ranks(3).run(fail_otherwise, (1,))
    assert first == third
    assert (first[0], first[2]) == ("RankFailed", 3.0)
    assert first[1].startswith("rank 1 of 3 failed:\nTraceback (most recent call last):\n")
    assert "Odd: a bug of rank 1, not a refusal" in first[1].splitlines()[-1]
    assert second == ("Odd", "a bug of rank 1, not a refusal", 3.0)
    assert [kind for kind, _, _ in ranks(3).run(fail_otherwise, (0, 1, 2))] == ["Odd"] * 3


def test_a_refusal_is_an_error_of_the_user() -> None:
    assert issubclass(Refusal, ValueError)
