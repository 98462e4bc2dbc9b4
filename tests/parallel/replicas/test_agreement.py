"""Values that differ in one bit, in their shape or in their dtype are not the same."""

import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.parallel.replicas.groups import digest, disagreement
from tests.pool.ranks import on_ranks


def test_digests_tell_bits_shapes_and_dtypes_apart() -> None:
    values = [torch.zeros(2), -torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32), torch.zeros(0)]
    values += [torch.zeros(()), torch.zeros(2, dtype=torch.bool), torch.zeros(1, dtype=torch.complex64)]
    assert len({digest(value) for value in values}) == len(values)
    matrix = torch.arange(6.0).view(2, 3)
    assert digest(matrix.t()) == digest(matrix.t().contiguous())


@on_ranks(3)
def test_ranks_that_differ_from_the_first_are_named(comm: Communicator) -> None:
    def values(a: float = 0.0, **others: Tensor) -> dict[str, Tensor]:
        return {"a": torch.tensor([a, 1.0]), "nan": torch.tensor(float("nan"))} | others

    last = comm.rank == comm.size - 1
    said = "of the 3 that hold them differ from those of the first"
    assert disagreement(comm, values()) is None
    assert disagreement(comm, values(1e-40 if last else 0.0)) == f"a on ranks [2] {said}"
    others = values(float(comm.rank), b=torch.ones(1 + comm.rank % 2))
    assert disagreement(comm, others) == f"a and 1 other values on ranks [1, 2] {said}"
