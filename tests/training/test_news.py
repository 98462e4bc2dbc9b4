"""What one rank has to tell, all hear; and what comes next can be looked at before its turn."""

from itertools import islice

from mpi4dl.comm import Communicator
from mpi4dl.training.input_pipeline import Ahead, ControlFlags
from tests.pool.ranks import Ranks


def heard(comm: Communicator) -> ControlFlags:
    return ControlFlags.of_all(comm, ControlFlags(comm.rank == 1, False, comm.rank != 1))


def test_what_is_so_on_any_rank_is_heard_by_all(ranks: Ranks) -> None:
    assert ranks(3).run(heard) == [ControlFlags(True, False, True)] * 3
    assert ControlFlags.heard([0.0, 2.0, 0.0]) == ControlFlags(False, True, False)


def test_what_comes_next_is_made_when_it_is_looked_at_and_stays_the_next() -> None:
    made = []

    def items():
        for number in range(4):
            made.append(number)
            yield number

    ahead = Ahead(items())
    assert made == []
    assert list(islice(ahead, 2)) == [0, 1]
    assert made == [0, 1]
    assert (ahead.peek(), ahead.peek()) == (2, 2)
    assert made == [0, 1, 2]
    assert list(ahead) == [2, 3]
    assert ahead.peek() is None
