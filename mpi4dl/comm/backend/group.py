"""The process group: every call of torch.distributed, as an operation of two wires that does not wait.

torch.distributed calls with lists of tensors, mostly of one, and with an options object; C++ (DDP, the functional
collectives) finds these methods by the names that they have here.
"""

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mpi4dl.comm.backend.wire import Arrival, Joined, Wire
from mpi4dl.comm.backend.work import MpiWork
from mpi4dl.comm.pending import Pending

GROUP: Any = dist.ProcessGroup  # its declared methods take what Python passes, ours what C++ does
MAX_POKED = 64  # the oldest of the operations under way that a new one looks after


class Abilities(NamedTuple):
    """What torch.distributed may ask of the backend of a group."""

    supports_splitting: bool = False
    supports_coalescing: bool = False
    supports_time_estimate: bool = False

    def name(self) -> str:
        return "mpi4dl"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False


class MpiGroup(GROUP):
    """Ranks that torch.distributed treats as a group. C++ calls the methods whose names are not of Python's style."""

    def __init__(self, collectives: Wire, messages: Wire, timeout: timedelta, store: dist.Store) -> None:
        super().__init__(collectives.rank, collectives.size)
        self._collectives = collectives
        self._messages = messages
        self._timeout = timeout
        self._store = store
        self._labels = {"name": "", "description": ""}
        self._under_way: list[MpiWork] = []
        self._coalesced: list[Pending] | None = None

    def __repr__(self) -> str:
        return f"MpiGroup({self._labels['name']}, rank {self.rank()} of {self.size()})"

    def rank(self) -> int:
        return self._collectives.rank

    def size(self) -> int:
        return self._collectives.size

    getRank, getSize = rank, size

    def name(self) -> str:
        return "mpi4dl"

    getBackendName = _get_backend_name = name

    def setGroupName(self, name: str) -> None:
        self._labels["name"] = name

    def getGroupName(self) -> str:
        return self._labels["name"]

    def setGroupDesc(self, description: str) -> None:
        self._labels["description"] = description

    def getGroupDesc(self) -> str:
        return self._labels["description"]

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])]

    def _get_backend(self, device: torch.device) -> Abilities:
        return Abilities()

    def get_group_store(self) -> dist.Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def shutdown(self) -> None:
        """Complete what is under way and give the communicators back to MPI, which has few of them."""
        for work in self._under_way:
            work.wait()
        self._under_way = []
        for wire in (self._collectives, self._messages):
            if wire.mpi:
                wire.mpi.Free()

    def abort(self) -> None:
        self._collectives.mpi.Abort(1)

    def _start(self, name: str, results: Sequence[Any], pending: Pending) -> MpiWork:
        """Keep what is under way until MPI is done with its buffers, whether or not somebody waits for it."""
        if self._coalesced is not None:
            self._coalesced.append(pending)
        work = MpiWork(f"{name} of {self!r}", pending, self._collectives.node, list(results), self._timeout)
        oldest, others = self._under_way[:MAX_POKED], self._under_way[MAX_POKED:]
        self._under_way = [*(old for old in oldest if not old.poke()), *others, work]
        return work

    def _start_all(self, name: str, results: Sequence[Any], parts: Sequence[Pending]) -> MpiWork:
        return self._start(name, results, parts[0] if len(parts) == 1 else Joined(self._collectives.node, parts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        parts = [self._collectives.ibroadcast(_plain(x), opts.rootRank) for x in tensors]
        return self._start_all("broadcast", tensors, parts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        op, factor = _reduction(opts)
        parts = [self._collectives.ireduce(_plain(x), op, None, factor) for x in tensors]
        return self._start_all("all_reduce", tensors, parts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        op, factor = _reduction(opts)
        parts = [self._collectives.ireduce(_plain(x), op, opts.rootRank, factor) for x in tensors]
        return self._start_all("reduce", tensors, parts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        parts = [self._gather_everywhere(out, x) for out, x in zip(outputs, inputs, strict=True)]
        return self._start_all("all_gather", [x for out in outputs for x in out], parts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        # `outputs` has a list for each rank here, not one for each input.
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        parts = [
            self._gather_everywhere(self._cut("output", out), _plain(x).reshape(-1))
            for out, x in zip(outputs, inputs, strict=True)
        ]
        return self._start_all("all_gather_single", outputs, parts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_everywhere(self, outputs: Sequence[Tensor], tensor: Tensor) -> Pending:
        self._check_count("outputs", outputs)
        tensor = _plain(tensor)
        if outputs[self.rank()].numel() != tensor.numel():
            raise ValueError(
                f"this rank gives {tensor.numel()} elements, but its place in the output has "
                f"{outputs[self.rank()].numel()}: an output must be as large as what all ranks give"
            )
        return self._collectives.iexchange(
            dict.fromkeys(range(self.size()), tensor), dict(enumerate(map(_plain, outputs)))
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MpiWork:
        incoming = dict(enumerate(map(_plain, outputs[0]))) if self.rank() == opts.rootRank else {}
        if incoming:
            self._check_count("gather_list", outputs[0])
        pending = self._collectives.iexchange({opts.rootRank: _plain(inputs[0])}, incoming)
        return self._start("gather", [x for out in outputs for x in out], pending)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        outgoing = dict(enumerate(map(_plain, inputs[0]))) if self.rank() == opts.rootRank else {}
        if outgoing:
            self._check_count("scatter_list", inputs[0])
        pending = self._collectives.iexchange(outgoing, {opts.rootRank: _plain(outputs[0])})
        return self._start("scatter", outputs, pending)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MpiWork:
        op, factor = _reduction(opts)
        for parts in inputs:
            self._check_count("input_list", parts)
        pending = [
            self._collectives.ireduce_parts([_plain(x) for x in parts], _plain(out), op, factor)
            for out, parts in zip(outputs, inputs, strict=True)
        ]
        return self._start_all("reduce_scatter", outputs, pending)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        op, factor = _reduction(opts)
        pending = [
            self._collectives.ireduce_parts(self._cut("input", x.contiguous()), _flat("output", out), op, factor)
            for out, x in zip(outputs, inputs, strict=True)
        ]
        return self._start_all("reduce_scatter_single", outputs, pending)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        self._check_count("output_tensor_list", outputs)
        self._check_count("input_tensor_list", inputs)
        pending = self._collectives.iexchange(
            dict(enumerate(map(_plain, inputs))), dict(enumerate(map(_plain, outputs)))
        )
        return self._start("all_to_all", outputs, pending)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> MpiWork:
        outputs = self._rows("output", _plain(output), output_sizes)
        inputs = self._rows("input", _plain(input), input_sizes)
        pending = self._collectives.iexchange(dict(enumerate(inputs)), dict(enumerate(outputs)))
        return self._start("all_to_all_single", [output], pending)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> MpiWork:
        parts = [self._messages.isend(_plain(x), to, self._check_tag(tag)) for x in tensors]
        return self._start_all(f"send to rank {to}", tensors, parts)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MpiWork:
        parts = [self._arrival(x, source, tag) for x in tensors]
        return self._start_all(f"recv from rank {source}", tensors, parts)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MpiWork:
        (tensor,) = tensors
        return self._start("recv from any rank", tensors, self._arrival(tensor, None, tag))

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._start("barrier", [], self._collectives.ibarrier())

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        parts, self._coalesced = self._coalesced or [], None
        return self._start_all("coalesced operations", [], parts)

    def _arrival(self, tensor: Tensor, source: int | None, tag: int) -> Pending:
        tensor = _plain(tensor)
        if tensor.numel() == 0:
            return Pending(self._messages.node)
        return Arrival(self._messages, tensor, source, self._check_tag(tag))

    def _check_tag(self, tag: int) -> int:
        from mpi4py import MPI

        limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
        if not 0 <= tag <= limit:
            raise ValueError(f"tag is {tag}, but must be from 0 to {limit}, the highest that this MPI has")
        return tag

    def _check_count(self, name: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{name} has {len(tensors)} tensors, but the group has {self.size()} ranks: pass one each")

    def _cut(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The even parts of a tensor, flat views, one for each rank."""
        flat = _flat(name, tensor)
        if flat.numel() % self.size():
            raise ValueError(
                f"{name} has {flat.numel()} elements, which must be divisible by the number of ranks (={self.size()})"
            )
        return list(flat.view(self.size(), -1)) if flat.numel() else [flat] * self.size()

    def _rows(self, name: str, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The rows of a tensor for each rank: as many as `sizes` says, or alike."""
        num_rows = tensor.shape[0]
        if not sizes:
            if num_rows % self.size():
                raise ValueError(
                    f"{name} has {num_rows} rows, which must be divisible by the number of ranks (={self.size()}): "
                    f"pass {name}_split_sizes"
                )
            sizes = [num_rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != num_rows:
            raise ValueError(
                f"{name}_split_sizes is {list(sizes)}, but must be {self.size()} numbers (one a rank) whose sum is "
                f"{num_rows}, the number of rows of {name}"
            )
        cuts = [0, *itertools.accumulate(sizes)]
        return [tensor[start:stop] for start, stop in itertools.pairwise(cuts)]


def _plain(tensor: Tensor) -> Tensor:
    """The tensor that MPI can read: one with a place in memory."""
    wait: Callable[[], Tensor] | None = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor is still to come
    tensor = wait() if callable(wait) else tensor
    if tensor.layout is not torch.strided:
        raise TypeError(f"the backend mpi4dl moves dense tensors, not {tensor.layout}: pass tensor.to_dense()")
    return tensor


def _flat(name: str, tensor: Tensor) -> Tensor:
    tensor = _plain(tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, but must be contiguous: pass {name}.contiguous()")
    return tensor.view(-1)


def _reduction(opts: Any) -> tuple[str, Any]:
    """The name of a reduction, and the factor that PREMUL_SUM has."""
    if opts is None:
        return "sum", 1
    op = opts.reduceOp
    name = op.op.name.lower()
    return name, op.factor if name == "premul_sum" else 1
