"""Tensors on MPI: point to point and collectives, for every dtype, device, layout and size."""

import contextlib
import gc
import math
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mpi4dl.comm import Mismatch, RankFailed, Refusal, failure, gpu, nccl, transport
from mpi4dl.comm.node import Node
from mpi4dl.comm.packing import Piece, as_bytes, dumps, is_dense, loads
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.requests import Calls
from mpi4dl.comm.shutdown import alone_of_several
from mpi4dl.comm.transport import LOW_PRECISION, PointToPoint
from mpi4dl.comm.watchdog import watchdog_thread

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.blocks import Blocks

# Communicators are given back to MPI, which has some two thousand: those that nobody holds, when one is needed next.
#
# To free a communicator is a collective call, though no MPI that is known sends anything for it. All ranks of an SPMD
# program let go of their communicators alike, and all of them come to make the next one; so there they are freed.
# Communicators that only the garbage collector finds, as in an engine that a hook refers to, are collected when many
# are alive.

MANY = 256
T = TypeVar("T")


class CommunicatorPool:
    """All communicators that were made of one."""

    def __init__(self) -> None:
        self._alive: dict[int, MPI.Comm] = {}
        self._dropped: list[int] = []
        self._made = 0
        self._look_at = MANY

    def __len__(self) -> int:
        """How many are alive, whether or not somebody holds them."""
        return len(self._alive)

    def adopt(self, holder: object, mpi: "MPI.Comm") -> None:
        """`mpi` is free once `holder` is gone."""
        self._made += 1
        self._alive[self._made] = mpi
        weakref.finalize(holder, self._dropped.append, self._made).atexit = False

    def make_room(self) -> None:
        """Free what nobody holds. Collective."""
        if len(self._alive) - len(self._dropped) >= self._look_at:
            gc.collect()
            self._look_at = max(MANY, 2 * (len(self._alive) - len(self._dropped)))
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        for number in sorted(dropped):
            self._alive.pop(number).Free()

    def free(self) -> None:
        """Free all, even if other objects hold them. Collective."""
        self._dropped[:] = []
        while self._alive:
            self._alive.popitem()[1].Free()


# Floating-point numbers as integers of the same order, so that every rank gets the same bits of a maximum.
#
# Which of NaN and 1, of two NaNs, or of 0.0 and -0.0 is the greater, C decides by which of them comes first; and that
# differs between the ranks of a reduction. Integers have no such pairs:
#
#     float   -inf  ...  -1.0  ...  -0.0   0.0  ...  1.0  ...  inf   NaN, whatever its sign and payload
#     key      -m   ...    -k  ...   -1     0   ...  k-1  ...  m-1   the last for a maximum, the first for a minimum
#
# So a NaN of any rank is the result, as of torch.maximum and torch.minimum.

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def order_keys_of(values: Tensor, op: str) -> Tensor:
    """Integers, new and of the size of `values`' dtype, whose "max" or "min" is that of the floats `values`."""
    bits = values.view(INTEGERS[values.itemsize])
    limits = torch.iinfo(bits.dtype)
    return _mirrored(bits).masked_fill_(values.isnan(), limits.max if op == "max" else limits.min)


def values_of_order_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats whose keys these are."""
    return with_one_nan(_mirrored(keys).view(dtype))


def with_one_nan(values: Tensor) -> Tensor:
    """Give all NaNs among floats, or among parts of complex numbers, the same sign and payload, in place.

    NaN + NaN is the first of them, so ranks that add in other orders have NaNs of other bits.
    """
    parts = torch.view_as_real(values) if values.is_complex() else values
    parts.nan_to_num_(math.nan, math.inf, -math.inf)
    return values


def _mirrored(bits: Tensor) -> Tensor:
    """Bits as keys, and keys as bits: negative floats, whose magnitude grows downwards, are turned over."""
    width = 8 * bits.itemsize
    return bits ^ ((bits >> (width - 1)) & torch.iinfo(bits.dtype).max)


MAX_REDUCTION_BYTES = 1 << 21  # larger ones make MPI libraries allocate, and fault in, temporaries of that size
ALIKE_BYTES = 1 << 16  # a piece up to here may be added up on every rank; each element of larger ones is on one


class _Complaint(NamedTuple):
    """An error that a rank brings to a collective of objects instead of its part: all ranks raise it there."""

    text: str
    traceback: bool = False

    def error(self, rank: int, size: int) -> Exception:
        if self.traceback:
            return RankFailed(f"rank {rank} of {size} failed:\n{self.text}")
        return Refusal(f"rank {rank}: {self.text}" if rank and size > 1 else self.text)


class _Brought(NamedTuple):
    """The contribution of a rank to a collective of objects: its name, the place of the call, and the part."""

    call: str
    place: str
    part: Any


@cache
def world() -> "Communicator":
    """The communicator of all ranks. The first call starts MPI and makes any rank's failure end the whole job.

    Raises:
        Refusal: the launcher started several processes, but MPI sees one: it is that of another MPI library.
    """
    failure.start()
    problem = alone_of_several()
    if problem is not None:
        raise Refusal(problem)
    from mpi4py import MPI

    waits = watchdog_thread().waits
    with waits:
        comm = Communicator(MPI.COMM_WORLD.Dup(), Node.of(MPI.COMM_WORLD), objects=MPI.COMM_WORLD.Dup())
        comm.choose_gpu_wire()
    if torch.cuda.is_available() and MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        # Backward passes on a GPU run on a thread of autograd's, which may not call such an MPI.
        torch.autograd.set_multithreading_enabled(False)
    comm.node.waits = waits
    watchdog_thread().near = comm.node.local_size == comm.size and not torch.cuda.is_available()
    return comm


class Communicator(PointToPoint):
    """A group of ranks that exchange tensors: what `PointToPoint` does, and collectives, by the host or by `nccl`.

    Meta tensors are accepted everywhere and move nothing.
    """

    def __init__(
        self,
        mpi: "MPI.Comm",
        node: Node,
        gpu_wire: str = "staged",
        pool: CommunicatorPool | None = None,
        nccl: nccl.Nccl | None = None,
        objects: "MPI.Comm | None" = None,
    ) -> None:
        super().__init__(mpi, node, gpu_wire, nccl)
        # Apart, so that a rank that tells of a failure is not heard by others as its part of a sum.
        self._objects = mpi if objects is None else objects
        self.pool = CommunicatorPool() if pool is None else pool
        self.max_reduction_bytes = MAX_REDUCTION_BYTES
        self.num_met = 0  # collectives of objects so far
        self._ended_by = "", ""  # the kind of an error in `going_on`, and what it says

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.size})"

    @property
    def mpi_library(self) -> str:
        """The version of the MPI library, as it reports it."""
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

    def choose_gpu_wire(self, asked: str = "auto") -> tuple[str, str]:
        """Decide how GPU tensors travel, and say why. Collective; communicators split off later inherit it.

        Raises:
            Refusal: NCCL was asked for, which some rank has not.
        """
        self.gpu_wire, why = gpu.decide(self.mpi, self.node.local_rank, asked)
        self.nccl = None
        if self.gpu_wire == "nccl":
            nccl.check(self)
            self.nccl = nccl.join(self)
        return self.gpu_wire, why

    def split(self, color: int, key: int = 0) -> "Communicator":
        """A communicator of the ranks that passed the same colour, ordered by key and rank. Collective."""
        return self._child(lambda: self.mpi.Split(color, key))

    def split_by_node(self) -> "Communicator":
        """A communicator of the ranks that are on the same machine as this one. Collective."""
        from mpi4py import MPI

        return self._child(lambda: self.mpi.Split_type(MPI.COMM_TYPE_SHARED, self.rank))

    def subset(self, ranks: Sequence[int], ordered: bool = True) -> "Communicator":
        """A communicator of these ranks, in this order. Collective over them alone.

        `ordered`: they come to its collectives in one order with those of all other communicators, as `nccl` says.
        """

        def create() -> "MPI.Comm":
            group = self.mpi.Get_group().Incl(list(ranks))
            try:
                return self.mpi.Create_group(group)  # type: ignore[attr-defined]
            finally:
                group.Free()

        return self._child(create, ordered)

    def _child(self, create: "Callable[[], MPI.Comm]", ordered: bool = True) -> "Communicator":
        with self.node.waits:
            self.pool.make_room()
            mpi = create()
        joined = None
        if self.nccl is not None and ordered:
            joined = self.nccl.among(_places(mpi, self.mpi))
        child = Communicator(mpi, self.node, self.gpu_wire, self.pool, joined)
        self.pool.adopt(child, mpi)
        return child

    def isend_object(self, value: Any, to: int, tag: int = 0) -> Pending:
        payload = torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)
        length = torch.tensor([payload.numel()])
        return Pending.all(self.node, [self.isend(length, to, tag), self.isend(payload, to, tag)])

    def recv_object(self, source: int, tag: int = 0) -> Any:
        length = self.recv(torch.zeros(1, dtype=torch.int64), source, tag)
        payload = self.recv(torch.empty(int(length), dtype=torch.uint8), source, tag)
        return loads(payload.numpy().tobytes())

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """Start to reduce `tensor` over all ranks, in place; every rank gets bit-equal values."""
        return self.ireduce(tensor, op)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` over all ranks, in place. `op` is "sum", "max", "min" or "product"."""
        self.ireduce(tensor, op).wait()
        return tensor

    def ireduce(self, tensor: Tensor, op: str = "sum", root: int | None = None) -> Pending:
        """Start to reduce `tensor` over all ranks, in place, on all or on `root`, and then undefined on the others."""
        if tensor.is_meta or tensor.numel() == 0 or self.size == 1:
            return Pending(self.node)
        small_sum = op == "sum" and root is None and tensor.is_floating_point() and tensor.nbytes <= ALIKE_BYTES
        if small_sum and tensor.is_cuda and self.nccl is not None:
            # The whole tensor goes to all, each of whom adds up what came, in the order of the ranks.
            target = tensor.detach()
            everywhere = [target.contiguous()] * self.size
            pending, add_up = transport.swap_parts(self, everywhere, transport.SCATTER_TAG, collective=True)
            return pending.then(lambda: target.copy_(add_up()))
        return self._in_place(tensor.detach(), lambda x: self._reduce(x, op, root))

    def _reduce(self, tensor: Tensor, op: str, root: int | None) -> Pending:
        """The same for a dense tensor on the host, now."""
        target, delivered = tensor, root in (None, self.rank)
        deliveries: list[Callable[[], Any]] = []
        if tensor.is_floating_point() and op in ("min", "max"):
            target = order_keys_of(tensor, op)
            if delivered:
                deliveries.append(lambda: tensor.copy_(values_of_order_keys(target, tensor.dtype)))
        elif tensor.dtype in LOW_PRECISION:
            # MPI has no such types everywhere; and sums in float32 round once instead of at every rank.
            target = tensor.float()
            deliveries.append(lambda: tensor.copy_(target))
        if root is None and (target.is_floating_point() or target.is_complex()):
            last = target.view(-1)[-max(1, ALIKE_BYTES // target.itemsize) :]
            deliveries.insert(0, lambda: with_one_nan(last))
        datatype, operator = self._types[target.dtype], self._operator(op, target.dtype)
        step = max(1, self.max_reduction_bytes // target.itemsize) * target.itemsize
        from mpi4py import MPI

        requests = []
        for start, stop in self._chunks(target.nbytes, step):
            block = [self._memory(target, start, stop)[0], datatype]
            if root is None:
                request = self.mpi.Iallreduce(MPI.IN_PLACE, block, operator)
            elif root == self.rank:
                request = self.mpi.Ireduce(MPI.IN_PLACE, block, operator, root)
            else:
                request = self.mpi.Ireduce(block, None, operator, root)
            requests.append(request)
        return Pending(self.node, [Calls(requests)], [target], deliveries)

    def ireduce_scatter(self, flat: Tensor, cuts: Sequence[int] | None = None) -> Pending:
        """Start to sum `flat`, 1-D, over all ranks: after the wait, flat[cuts[rank]:cuts[rank + 1]] holds its sum.

        The rest of `flat` is undefined then. Without `cuts`, the parts are even.
        """
        parts = transport.parts_by_rank(flat.detach(), self.size, cuts)
        if flat.is_meta or self.size == 1:
            return Pending(self.node)
        pending, add_up = transport.swap_parts(self, parts, transport.SCATTER_TAG, collective=True)
        return pending.then(lambda: transport.put(add_up(), parts[self.rank]))

    def iall_gather_into(self, flat: Tensor, cuts: Sequence[int] | None = None) -> Pending:
        """Start to give every rank all parts of `flat`, 1-D: flat[cuts[r]:cuts[r + 1]] is that of rank r."""
        parts = transport.parts_by_rank(flat.detach(), self.size, cuts)
        return Pending(self.node) if flat.is_meta else transport.share_parts(self, parts, transport.GATHER_TAG, True)

    def ibroadcast(self, tensor: Tensor, root: int = 0) -> Pending:
        """Start to give every rank the root's values, in place."""
        if tensor.is_meta or tensor.numel() == 0 or self.size == 1:
            return Pending(self.node)
        return self._in_place(tensor.detach(), lambda x: self._broadcast(x, root))

    def _broadcast(self, tensor: Tensor, root: int) -> Pending:
        chunks = self._chunks(tensor.nbytes, self.max_message_bytes)
        calls = [self.mpi.Ibcast(self._memory(tensor, *chunk), root) for chunk in chunks]
        return Pending(self.node, [Calls(calls)], [tensor])

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Give every rank the root's values, in place."""
        self.ibroadcast(tensor, root).wait()
        return tensor

    def _in_place(self, tensor: Tensor, post: Callable[[Tensor], Pending]) -> Pending:
        """Start a collective that changes a tensor: `post(x)` does so to the same values, dense and on the host."""
        if tensor.is_cuda:
            return self.by_host(tensor, post)
        if is_dense(tensor) and tensor.data_ptr():  # 0 of a subclass that wraps others
            return self._in_line(lambda: post(tensor))
        dense = tensor.clone(memory_format=torch.contiguous_format)
        return self._in_line(lambda: post(dense)).then(lambda: tensor.copy_(dense))

    def by_host(self, tensor: Tensor, post: Callable[[Tensor], Pending]) -> Pending:
        """Start what changes a tensor on a GPU, by one copy to the host, `post` on that, and one copy back."""
        dense = tensor if is_dense(tensor) else tensor.clone(memory_format=torch.contiguous_format)
        flat = as_bytes(dense)
        return self._by_host(
            flat,
            flat,
            lambda host, _: post(host.view(dense.dtype).view(dense.shape)),
            None if dense is tensor else lambda: tensor.copy_(dense),
        )

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, which are alike in shape and dtype, stacked: (size, *shape)."""
        result = tensor.new_empty((self.size, *tensor.shape))
        if tensor.is_meta or tensor.numel() == 0:
            return result
        if tensor.is_cuda and self.nccl is not None:
            result[self.rank].copy_(tensor.detach())
            transport.share_parts(self, list(result), transport.GATHER_TAG, collective=True).wait()
            return result
        dense = tensor.detach()
        if not is_dense(dense):
            dense = dense.resolve_conj().resolve_neg().contiguous()
        if tensor.is_cuda:
            self._by_host(as_bytes(dense), as_bytes(result), self._gather).wait()
        else:
            self._in_line(lambda: self._gather(dense, result)).wait()
        return result

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """The rows that all ranks have for this one, of tensors (size, *shape) that are alike in shape and dtype."""
        result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        sends, receives = ([Piece(rank, row) for rank, row in enumerate(rows)] for rows in (tensor.detach(), result))
        self.iexchange(sends, receives, transport.ALL_TO_ALL_TAG).wait()
        return result

    @cached_property
    def blocks(self) -> "Blocks | None":
        """Blocks of these ranks, if they are too many to gather what they merge in one. Collective when first asked
        for.
        """
        from mpi4dl.comm import blocks

        return blocks.Blocks.of(self) if self.size > blocks.MOST_GATHERED else None

    def nodes(self) -> list[list[int]]:
        """The ranks on each machine, by the first of them. Collective."""
        first = self.split_by_node().broadcast_object(self.rank)
        firsts = self.all_gather_object(first)
        return [[rank for rank, each in enumerate(firsts) if each == node] for node in sorted(set(firsts))]

    def _gather(self, own: Tensor, everywhere: Tensor) -> Pending:
        """Gather dense tensors on the host, a limited number of bytes of each at a time."""
        step = max(1, self.max_message_bytes // self.size)
        if own.nbytes <= step:
            call = self.mpi.Iallgather(self._memory(own), self._memory(everywhere))
            return Pending(self.node, [Calls([call])], [own, everywhere])
        mine, theirs = as_bytes(own).view(1, -1), as_bytes(everywhere).view(self.size, -1)

        def phases() -> Iterator[Pending]:
            for begin, end in self._chunks(mine.shape[1], step):
                # Both have names because they must live until MPI is done with them.
                sent, received = mine[:, begin:end].contiguous(), theirs[:, begin:end].contiguous()
                yield Pending(self.node, [Calls([self.mpi.Iallgather(self._memory(sent), self._memory(received))])])
                theirs[:, begin:end] = received

        return Pending.of_phases(self.node, phases())

    def ibarrier(self) -> Pending:
        return Pending(self.node, [Calls([self.mpi.Ibarrier()])])

    def barrier(self) -> None:
        self.ibarrier().wait()

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._meet("all_gather_object", value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self._meet("broadcast_object", root)
        with self.node.waits:
            return loads(self._objects.bcast(dumps(value) if self.rank == root else None, root))

    def _meet(self, call: str, part: Any) -> list[Any]:
        """The parts of all ranks. Every collective of objects begins with this one exchange, so that a rank that failed
        is heard wherever the others are by then: in the same call, or in one within `together`.

        Raises:
            Refusal: on all ranks, a rank came with a complaint instead of its part.
            RankFailed: the same, with the traceback of what is no refusal.
            Mismatch: on all ranks, they came to different calls.
        """
        self.num_met += 1
        # The barrier lets phases under way advance; inside MPI's own call this rank could not.
        Pending(self.node, [Calls([self._objects.Ibarrier()])]).wait()
        with self.node.waits:
            payloads = self._objects.allgather(dumps(_Brought(call, _caller(), part)))
        everyone: list[_Brought] = [loads(payload) for payload in payloads]
        for rank, brought in enumerate(everyone):
            if isinstance(brought.part, _Complaint):
                raise self.told(brought.part.error(rank, self.size))
        for rank, brought in enumerate(everyone):
            if brought.call != everyone[0].call:
                first = f"rank 0 is in {everyone[0].call} at {everyone[0].place}"
                raise self.told(
                    Mismatch(
                        f"{first}, but rank {rank} in {brought.call} at {brought.place}: all ranks must make the same "
                        "collective calls in the same order"
                    )
                )
        return [brought.part for brought in everyone]

    def told(self, error: Exception) -> Exception:
        """The same error, marked as one of all ranks of this communicator, which have it since the last `_meet`."""
        error.told_in = self, self.num_met  # type: ignore[attr-defined]
        return error

    def _is_told(self, error: Exception, before: int) -> bool:
        """Whether all ranks have this error, since so many collectives of objects."""
        teller, number = getattr(error, "told_in", (None, 0))
        return teller is self and number > before

    def agree(self, error: str | None = None, **facts: Any) -> None:
        """Raise `Refusal` on all ranks together if one of them reports an error, or if their facts differ.

        Facts are what must be equal on all ranks, by name: `agree(batch_size=8)`.
        """
        if self.size == 1 and error is None:
            return
        complaint = None if error is None else _Complaint(error)
        with failure.failing(None if error is None else Refusal(error)):
            answers: list[dict[str, Any]] = self._meet("agree", complaint or facts)
        for name in facts:
            values = [known.get(name) for known in answers]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise self.told(
                        Refusal(
                            f"the ranks were started differently: {name} is {values[0]!r} on rank 0 but {value!r} on "
                            f"rank {rank}: start all ranks with the same command"
                        )
                    )

    @contextlib.contextmanager
    def together(self, kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
        """Do what may fail on one rank only: if it does, all ranks raise `Refusal` with that rank's message.

        Any other kind of error is raised as it is where it happened, and as `RankFailed` by the other ranks. Within,
        collectives of objects of the same communicator may be called: others who are in one hear of the error there.
        """
        error: Exception | None = None
        last_word: Exception | None = None
        complaint: _Complaint | None = None
        before = self.num_met
        try:
            yield
        except Exception as problem:  # whatever it is, it is raised again, here or by all
            if self._is_told(problem, before):
                raise  # by all ranks, from a call within
            error = last_word = problem
            if isinstance(problem, kinds):
                complaint, last_word = _Complaint(str(problem)), Refusal(problem)
            else:
                complaint = _Complaint("".join(traceback.format_exception(problem)), True)
        if self.size == 1 and error is None:
            return
        try:
            with failure.failing(last_word):
                self._meet("agree", complaint or {})
        except Refusal as refusal:
            raise refusal from error
        except RankFailed as failed:
            raise self.told(error or failed) from None

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Within it this rank works with others. If an error ended that, and this rank goes on, others may
        be there still: all come together first, or the job ends. Collective after an error.
        """
        (kind, text), before = self._ended_by, self.num_met
        if kind:
            self._ended_by = "", ""
            why = "rank {} goes on after an error that other ranks did not have, and that left them waiting: {}: {}"
            with failure.failing(Refusal(why.format(self.rank, kind, text))):
                kinds = self.all_gather_object(kind)
            if len(set(kinds)) > 1:
                raise Refusal(f"the ranks go on after different errors: {', '.join(kinds)}; let the program end")
        try:
            yield
        except Exception as error:
            if not self._is_told(error, before):
                self._ended_by = type(error).__name__, str(error)
            raise

    def from_first(self, make: Callable[[], T], kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> T:
        """On all ranks what rank 0 makes; if that fails, all ranks raise as in `together`. Collective."""
        made = None
        with self.together(kinds):
            if self.rank == 0:
                made = make()
        return self.broadcast_object(made)


def _caller() -> str:
    """The file and line, outside of this module, that the present call comes from."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, contextlib.__file__):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _places(child: "MPI.Comm", parent: "MPI.Comm") -> Sequence[int]:
    """The ranks in `parent` of those of `child`."""
    groups = child.Get_group(), parent.Get_group()
    try:
        return groups[0].Translate_ranks(None, groups[1])
    finally:
        for group in groups:
            group.Free()
