"""A communicator with what torch.distributed asks for beyond `Communicator`: all of it non-blocking."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpi4dl.comm.communicator import Communicator
from mpi4dl.comm.packing import Piece
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.scattering import LOW_PRECISION, SCATTER_TAG, swap_parts

if TYPE_CHECKING:
    from mpi4py import MPI

EXCHANGE_TAG = 32765
BITWISE = ("band", "bor", "bxor")
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which PyTorch itself does not add


class Wire(Communicator):
    """The ranks of one process group. Collectives and messages use one each: users may take any tag for messages."""

    @cached_property
    def _types(self) -> "dict[torch.dtype, MPI.Datatype]":
        from mpi4py import MPI

        return {
            **super()._types,
            torch.uint16: MPI.UINT16_T,
            torch.uint32: MPI.UINT32_T,
            torch.uint64: MPI.UINT64_T,
        }

    def _operator(self, op: str, dtype: torch.dtype) -> "MPI.Op":
        from mpi4py import MPI

        if op not in BITWISE:
            return super()._operator(op, dtype)
        if dtype is torch.bool:
            return {"band": MPI.LAND, "bor": MPI.LOR, "bxor": MPI.LXOR}[op]
        return {"band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}[op]

    def check_reduction(self, op: str, dtype: torch.dtype) -> None:
        """Refuse what has no meaning, which MPI libraries refuse in words of their own, or do somehow."""
        floating = dtype.is_floating_point or dtype.is_complex
        if dtype not in self._types and dtype not in LOW_PRECISION:
            raise TypeError(f"{dtype} cannot be reduced: convert it, for instance to torch.float32")
        if op in BITWISE and floating:
            raise TypeError(f"the reduction {op.upper()} works on integers and bool, but the tensor is {dtype}")
        if op in ("min", "max") and dtype.is_complex:
            raise TypeError(f"complex numbers have no order, so {dtype} has no {op.upper()}")
        if op == "avg" and dtype is torch.bool:
            raise TypeError("truths have no average: reduce them with MIN or MAX, or convert them to a number")

    def ireduce(self, tensor: Tensor, op: str = "sum", root: int | None = None, factor: Any = 1) -> Pending:
        """Start to reduce over all ranks, in place, on `root` or on all. "avg" divides the sum once, at the end."""
        self.check_reduction(op, tensor.dtype)
        tensor = tensor.detach()
        if op == "premul_sum":
            tensor.mul_(factor)
        if op not in ("avg", "premul_sum"):
            return super().ireduce(tensor, op, root)
        total = tensor.float() if tensor.dtype in LOW_PRECISION else tensor
        pending = super().ireduce(total, "sum", root)
        if op == "avg" and root in (None, self.rank):
            pending.then(lambda: divide(total, self.size))
        if total is not tensor:
            pending.then(lambda: tensor.copy_(total))
        return pending

    def ireduce_parts(self, parts: Sequence[Tensor], out: Tensor, op: str, factor: Any = 1) -> Pending:
        """Start to reduce part r of all ranks into `out` on rank r. Parts may differ in size; they stay as they are."""
        self.check_reduction(op, out.dtype)
        out = out.detach()
        if op not in ("sum", "avg", "premul_sum") or out.dtype in UNSIGNED:
            whole = torch.cat([part.detach().reshape(-1) for part in parts])
            pending = self.ireduce(whole, op, None, factor)
            start = sum(part.numel() for part in parts[: self.rank])
            return pending.then(lambda: out.copy_(whole[start : start + out.numel()].view(out.shape)))
        mine = [part.detach() for part in parts]
        if op == "premul_sum":
            mine = [part * factor for part in mine]
        if self.size == 1:
            out.copy_(mine[0])
            return Pending(self.node)
        mine[self.rank] = out.copy_(mine[self.rank])
        pending, add_up = swap_parts(self, mine, SCATTER_TAG)

        def finish() -> None:
            total = add_up()
            if op == "avg":
                divide(total, self.size)
            if total is not out:
                out.copy_(total)

        return pending.then(finish)

    def iswap(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> Pending:
        """Start to send each rank its tensor and to receive from each into its: of any sizes, equal at both ends."""
        dense = {id(tensor): tensor.detach().contiguous() for tensor in outgoing.values()}
        return self.iexchange(
            [Piece(to, dense[id(outgoing[to])]) for to in reversed(self._from_here(outgoing))],
            [Piece(source, incoming[source]) for source in self._from_here(incoming)],
            EXCHANGE_TAG,
        )

    def _from_here(self, ranks: dict[int, Tensor]) -> list[int]:
        """The ranks, this one first and then the one below it, so that not all turn to the same rank at once."""
        return sorted(ranks, key=lambda rank: (self.rank - rank) % self.size)


def divide(total: Tensor, size: int) -> None:
    """Make a sum an average, in place. That of integers is cut off towards zero, as NCCL does."""
    if total.dtype in UNSIGNED:
        total.copy_(torch.from_numpy(total.cpu().numpy() // size))
    elif total.is_floating_point() or total.is_complex():
        total.div_(size)
    else:
        total.div_(size, rounding_mode="trunc")
