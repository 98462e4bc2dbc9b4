"""Tensors on MPI: point to point and collectives, for every dtype, device, layout and size."""

import contextlib
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpi4dl.comm import gpu, guard, ordering, scattering
from mpi4dl.comm.node import Node
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.refusal import RankFailed, Refusal
from mpi4dl.comm.scattering import LOW_PRECISION
from mpi4dl.comm.sentry import sentry

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_MESSAGE_BYTES = 1 << 30  # some MPI libraries fail beyond 2^31 - 1
MAX_REDUCTION_BYTES = 1 << 21  # larger ones make MPI libraries allocate, and fault in, temporaries of that size
ALIKE_BYTES = 1 << 16  # a piece up to here may be added up on every rank; each element of larger ones is on one


class _Traceback(str):
    """What `agree` takes for a complaint that is no refusal."""


@cache
def world() -> "Communicator":
    """The communicator of all ranks. The first call starts MPI and makes any rank's failure end the whole job."""
    meeting = guard.start()
    from mpi4py import MPI

    waits = sentry().waits
    with waits:
        comm = Communicator(MPI.COMM_WORLD.Dup(), Node.of(MPI.COMM_WORLD))
    comm.node.waits, comm.farewells = waits, meeting.farewells
    return comm


class Communicator:
    """A group of ranks that exchange tensors.

    Tensors on a GPU are handed to MPI as they are or staged through pinned memory (`gpu_wire`); this class alone
    synchronises the stream. Meta tensors are accepted everywhere and move nothing.
    """

    def __init__(self, mpi: "MPI.Comm", node: Node, wire: str | None = None) -> None:
        self.mpi = mpi
        self.node = node
        self.rank = mpi.rank
        self.size = mpi.size
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self.max_reduction_bytes = MAX_REDUCTION_BYTES
        self.farewells: list[Callable[[], None]] = []  # what the guard calls when this rank ends without an error
        self._wire = wire

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.size})"

    @property
    def mpi_library(self) -> str:
        """What the MPI library says of itself."""
        from mpi4py import MPI

        return MPI.Get_library_version().strip("\0\n ")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Communicator":
        return self

    @cached_property
    def _types(self) -> "dict[torch.dtype, MPI.Datatype]":
        from mpi4py import MPI

        return {
            torch.float32: MPI.FLOAT,
            torch.float64: MPI.DOUBLE,
            torch.complex64: MPI.C_FLOAT_COMPLEX,
            torch.complex128: MPI.C_DOUBLE_COMPLEX,
            torch.uint8: MPI.UINT8_T,
            torch.int8: MPI.INT8_T,
            torch.int16: MPI.INT16_T,
            torch.int32: MPI.INT32_T,
            torch.int64: MPI.INT64_T,
            torch.bool: MPI.C_BOOL,
        }

    def _operator(self, op: str, dtype: torch.dtype) -> "MPI.Op":
        from mpi4py import MPI

        if dtype is torch.bool:
            return {"sum": MPI.LOR, "max": MPI.LOR, "min": MPI.LAND, "product": MPI.LAND}[op]
        return {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "product": MPI.PROD}[op]

    @property
    def gpu_wire(self) -> str:
        """ "direct" or "staged". Decided when the first GPU tensor is sent, unless `choose_gpu_wire` was called."""
        return self._wire or self.choose_gpu_wire()[0]

    def choose_gpu_wire(self, asked: str = "auto") -> tuple[str, str]:
        """Decide how GPU tensors travel, and say why. Collective; communicators split off later inherit it."""
        self._wire, why = gpu.decide(self.mpi, self.node.local_rank, asked)
        return self._wire, why

    def split(self, color: int, key: int = 0) -> "Communicator":
        """A communicator of the ranks that passed the same colour, ordered by key and rank. Collective."""
        with self.node.waits:
            return Communicator(self.mpi.Split(color, key), self.node, self._wire)

    def split_by_node(self) -> "Communicator":
        """A communicator of the ranks that are on the same machine as this one. Collective."""
        from mpi4py import MPI

        with self.node.waits:
            return Communicator(self.mpi.Split_type(MPI.COMM_TYPE_SHARED, self.rank), self.node, self._wire)

    def subset(self, ranks: Sequence[int]) -> "Communicator":
        """A communicator of these ranks, in this order. Collective over them alone."""
        from mpi4py import MPI

        assert isinstance(self.mpi, MPI.Intracomm)
        with self.node.waits:
            return Communicator(self.mpi.Create_group(self.mpi.group.Incl(list(ranks))), self.node, self._wire)

    def _readable(self, tensor: Tensor) -> Tensor:
        """A dense tensor with the same values that MPI may read now."""
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if not tensor.is_cuda:
            return tensor
        if self.gpu_wire == "staged":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return tensor

    def _writable(self, tensor: Tensor, load: bool, pending: Pending) -> Tensor:
        """A dense buffer that MPI may write; `pending.wait()` moves it to `tensor`. `load`: it begins as `tensor`."""
        target = tensor.detach()
        if target.is_cuda and self.gpu_wire == "staged":
            buffer = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
        elif target.is_contiguous() and not target.is_conj() and not target.is_neg():
            if target.is_cuda:
                torch.cuda.current_stream().synchronize()
            return target
        else:
            buffer = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if load:
            buffer.copy_(target, non_blocking=True)
        if target.is_cuda:
            torch.cuda.current_stream().synchronize()
        pending._finish.append(lambda: target.copy_(buffer, non_blocking=True))
        return buffer

    def _bytes(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> list[Any]:
        """The bytes from `start` to `stop` of a dense tensor, as MPI takes them."""
        from mpi4py import MPI

        stop = tensor.nbytes if stop is None else stop
        return [MPI.memory.fromaddress(tensor.data_ptr() + start, stop - start), MPI.BYTE]

    def _chunks(self, total: int, limit: int) -> Iterator[tuple[int, int]]:
        for start in range(0, total, limit):
            yield start, min(start + limit, total)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Pending:
        pending = Pending(self.node)
        if tensor.is_meta or tensor.numel() == 0:
            return pending
        buffer = self._readable(tensor)
        pending._buffers.append(buffer)
        for start, stop in self._chunks(buffer.nbytes, self.max_message_bytes):
            pending._requests.append(self.mpi.Isend(self._bytes(buffer, start, stop), to, tag))
        return pending

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Pending:
        """Receive into `tensor`, which has the shape and dtype that are sent."""
        pending = Pending(self.node)
        if tensor.is_meta or tensor.numel() == 0:
            return pending
        buffer = self._writable(tensor, False, pending)
        pending._buffers.append(buffer)
        for start, stop in self._chunks(buffer.nbytes, self.max_message_bytes):
            pending._requests.append(self.mpi.Irecv(self._bytes(buffer, start, stop), source, tag))
        return pending

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.isend(tensor, to, tag).wait()

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Tensor:
        self.irecv(tensor, source, tag).wait()
        return tensor

    def isend_object(self, value: Any, to: int, tag: int = 0) -> Pending:
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = torch.tensor([payload.numel()])
        return Pending.all(self.node, [self.isend(length, to, tag), self.isend(payload, to, tag)])

    def recv_object(self, source: int, tag: int = 0) -> Any:
        length = self.recv(torch.zeros(1, dtype=torch.int64), source, tag)
        payload = self.recv(torch.empty(int(length), dtype=torch.uint8), source, tag)
        return pickle.loads(payload.numpy().tobytes())

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """Start to reduce `tensor` over all ranks, in place; every rank gets bit-equal values."""
        return self._ireduce(tensor, op, None)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` over all ranks, in place. `op` is "sum", "max", "min" or "product"."""
        self.iall_reduce(tensor, op).wait()
        return tensor

    def reduce(self, tensor: Tensor, root: int = 0, op: str = "sum") -> Tensor:
        """Reduce `tensor` over all ranks, in place on `root`; on other ranks its values are undefined afterwards."""
        self._ireduce(tensor, op, root).wait()
        return tensor

    def _ireduce(self, tensor: Tensor, op: str, root: int | None) -> Pending:
        pending = Pending(self.node)
        if tensor.is_meta or tensor.numel() == 0 or self.size == 1:
            return pending
        target = tensor.detach()
        if tensor.is_floating_point() and op in ("min", "max"):
            target = ordering.keys_of(target, op)
            if root in (None, self.rank):
                pending._finish.append(lambda: tensor.detach().copy_(ordering.values_of(target, tensor.dtype)))
        elif tensor.dtype in LOW_PRECISION:
            # MPI has no such types everywhere; and sums in float32 round once instead of at every rank.
            target = target.float()
            pending._finish.append(lambda: tensor.detach().copy_(target))
        inner = Pending(self.node)
        buffer = self._writable(target, True, inner)
        alike: list[Callable[[], Any]] = []
        if root is None and (buffer.is_floating_point() or buffer.is_complex()):
            last = buffer.view(-1)[-max(1, ALIKE_BYTES // buffer.itemsize) :]
            alike = [lambda: ordering.with_one_nan(last)]
        pending._finish = alike + inner._finish + pending._finish
        pending._buffers += [buffer, target]
        datatype, operator = self._types[buffer.dtype], self._operator(op, buffer.dtype)
        step = max(1, self.max_reduction_bytes // buffer.itemsize) * buffer.itemsize
        from mpi4py import MPI

        for start, stop in self._chunks(buffer.nbytes, step):
            block = [self._bytes(buffer, start, stop)[0], datatype]
            if root is None:
                request = self.mpi.Iallreduce(MPI.IN_PLACE, block, operator)
            elif root == self.rank:
                request = self.mpi.Ireduce(MPI.IN_PLACE, block, operator, root)
            else:
                request = self.mpi.Ireduce(block, None, operator, root)
            pending._requests.append(request)
        return pending

    def ireduce_scatter(self, flat: Tensor, cuts: Sequence[int] | None = None) -> Pending:
        """Start to sum `flat`, 1-D, over all ranks: after the wait, flat[cuts[rank]:cuts[rank + 1]] holds its sum.

        The rest of `flat` is undefined then. Without `cuts`, the parts are even.
        """
        return scattering.ireduce_scatter(self, flat, cuts)

    def iall_gather_into(self, flat: Tensor, cuts: Sequence[int] | None = None) -> Pending:
        """Start to give every rank all parts of `flat`, 1-D: flat[cuts[r]:cuts[r + 1]] is that of rank r."""
        return scattering.iall_gather_into(self, flat, cuts)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Give every rank the root's values, in place."""
        pending = Pending(self.node)
        if tensor.is_meta or tensor.numel() == 0 or self.size == 1:
            return tensor
        buffer = self._writable(tensor, self.rank == root, pending)
        for start, stop in self._chunks(buffer.nbytes, self.max_message_bytes):
            pending._requests.append(self.mpi.Ibcast(self._bytes(buffer, start, stop), root))
        pending.wait()
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, which are alike in shape and dtype, stacked: (size, *shape)."""
        return self._rearrange(
            tensor.unsqueeze(0), self.size, lambda a, b: self.mpi.Iallgather(self._bytes(a), self._bytes(b))
        )

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Give entry i of dim 0, which counts `size`, to rank i; entry i of the result came from rank i."""
        return self._rearrange(tensor, self.size, lambda a, b: self.mpi.Ialltoall(self._bytes(a), self._bytes(b)))

    def gather(self, tensor: Tensor, root: int = 0) -> Tensor | None:
        """The tensors of all ranks stacked, (size, *shape), on the root; None elsewhere."""
        mine = self.rank == root
        stacked = self._rearrange(
            tensor.unsqueeze(0),
            self.size if mine else 0,
            lambda a, b: self.mpi.Igather(self._bytes(a), self._bytes(b) if mine else None, root),
        )
        return stacked if mine else None

    def scatter(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Entry i of the root's tensor, (size, *shape), for rank i. Other ranks pass any tensor of that shape."""
        mine = self.rank == root
        return self._rearrange(
            tensor, 1, lambda a, b: self.mpi.Iscatter(self._bytes(a) if mine else None, self._bytes(b), root)
        )[0]

    def _rearrange(self, tensor: Tensor, rows: int, start: "Callable[[Tensor, Tensor], MPI.Request]") -> Tensor:
        """Run a collective that moves rows of bytes, a limited number of columns at a time."""
        result = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        if tensor.is_meta or tensor.numel() == 0:
            return result
        pending = Pending(self.node)
        source = self._readable(tensor).view(tensor.shape[0], -1)
        target = self._writable(result, False, pending).view(rows, source.shape[1])
        step = max(1, self.max_message_bytes // (source.itemsize * self.size))
        for begin, end in self._chunks(source.shape[1], step):
            # Both have names because they must live until MPI is done with them.
            sent, received = source[:, begin:end].contiguous(), target[:, begin:end].contiguous()
            if sent.is_cuda:
                torch.cuda.current_stream().synchronize()
            self.node.wait([start(sent, received)])
            if received.data_ptr() != target.data_ptr():
                target[:, begin:end] = received
        pending.wait()
        return result

    def barrier(self) -> None:
        self.node.wait([self.mpi.Ibarrier()])

    def all_gather_object(self, value: Any) -> list[Any]:
        self.barrier()  # which lets phases under way advance; inside MPI's own call this rank could not
        with self.node.waits:
            return self.mpi.allgather(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self.barrier()
        with self.node.waits:
            return self.mpi.bcast(value, root)

    def agree(self, error: str | None = None, **facts: Any) -> None:
        """Raise `Refusal` on all ranks together if one of them reports an error, or if their facts differ.

        Facts are what must be equal on all ranks, by name: `agree(batch_size=8)`.
        """
        if self.size == 1 and error is None:
            return
        answers = self.all_gather_object((error, facts))
        for rank, (complaint, _) in enumerate(answers):
            if isinstance(complaint, _Traceback):
                raise RankFailed(f"rank {rank} of {self.size} failed:\n{complaint}")
            if complaint is not None:
                raise Refusal(f"rank {rank}: {complaint}" if rank and self.size > 1 else complaint)
        for name in facts:
            values = [known.get(name) for _, known in answers]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise Refusal(
                        f"the ranks were started differently: {name} is {values[0]!r} on rank 0 but {value!r} on rank "
                        f"{rank}: start all ranks with the same command"
                    )

    @contextlib.contextmanager
    def together(self, kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
        """Do what may fail on one rank only: if it does, all ranks raise `Refusal` with that rank's message.

        Any other kind of error is raised as it is where it happened, and as `RankFailed` by the other ranks.
        """
        error: Exception | None = None
        last_word: Exception | None = None
        complaint = None
        try:
            yield
        except kinds as problem:
            error, complaint, last_word = problem, str(problem), Refusal(problem)
        except Exception as problem:
            error = last_word = problem
            complaint = _Traceback("".join(traceback.format_exception(problem)))
        try:
            with guard.failing(last_word):
                self.agree(complaint)
        except Refusal as refusal:
            raise refusal from error
        except RankFailed as failed:
            raise error or failed from None
