"""The process group: every call of torch.distributed, as an operation of two wires that does not wait.

C++ (DDP, the functional collectives) finds these methods by the names that they have here.
"""

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mpi4dl.comm.pending import Pending, as_event
from mpi4dl.torch_backend.departure import Channel, Departed, Departures
from mpi4dl.torch_backend.messages import Post, Wire, pass_monitored_barrier
from mpi4dl.torch_backend.work import Agreement, MpiWork, describe

GROUP: Any = dist.ProcessGroup  # its declared methods take what Python passes, ours what C++ does


class Abilities(NamedTuple):
    """The features of the backend of a group that torch.distributed asks for."""

    supports_splitting: bool = False
    supports_coalescing: bool = False
    supports_time_estimate: bool = False

    def name(self) -> str:
        return "mpi4dl"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False


def devices() -> list[str]:
    """The kinds of devices whose tensors can be sent."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


# The ways in which the methods of a group may be called: as C++ does, and as Python may, with tensors alone.
#
# group.allreduce([x], options)         C++ and torch.distributed: lists, and an object of options
# group.allreduce(x, ReduceOp.MAX)      programs: a tensor, and what those options hold
# group.broadcast(x, root=1)

UNSET = timedelta(0)  # options without a time-out hold a negative one
OTHER_NAMES = {
    "tensor": "tensors",
    "output_tensor": "outputs",
    "output_tensors": "outputs",
    "output_lists": "outputs",
    "outputTensor": "output",
    "input_tensor": "inputs",
    "input_tensors": "inputs",
    "input_list": "inputs",
    "inputTensor": "input",
    "dstRank": "to",
    "srcRank": "source",
}


class CallOptions(NamedTuple):
    """The options of a call. `op` is the name of a reduction, `factor` what PREMUL_SUM has."""

    op: str = "sum"
    factor: Any = 1
    root: int = 0
    timeout: timedelta | None = None

    @classmethod
    def of(cls, *given: Any, **named: Any) -> "CallOptions":
        """Read them from what is given, which says by its type what it is, or by its name."""
        options = cls()
        for value in (*given, *named.values()):
            if value is None:
                continue
            if isinstance(value, cls):
                return value
            if isinstance(value, timedelta):
                options = options._replace(timeout=value)
            elif isinstance(value, int):
                options = options._replace(root=value)
            elif isinstance(value, dist.ReduceOp):
                options = options._with(value)
            else:
                options = options._from_object(value)
        return options

    def _with(self, op: Any) -> "CallOptions":
        kind = op if isinstance(op, dist.ReduceOp.RedOpType) else op.op
        name = kind.name.lower()
        return self._replace(op=name, factor=op.__getstate__()[1] if name == "premul_sum" else 1)

    def _from_object(self, options: Any) -> "CallOptions":
        found = self._with(options.reduceOp) if hasattr(options, "reduceOp") else self
        timeout = options.timeout if options.timeout > UNSET else None
        return found._replace(root=getattr(options, "rootRank", self.root), timeout=timeout or self.timeout)


def called_as(names: str, lists: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method that takes what `names` says, and then `CallOptions`, be called in all of the ways above.

    `lists`: it takes lists of what C++ passes in lists; else just tensors.
    """
    expected = names.split()

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            named = {OTHER_NAMES.get(name, name): value for name, value in named.items()}
            arguments = [*given[: len(expected)], *(named.pop(name) for name in expected[len(given) :])]
            options = CallOptions.of(*given[len(expected) :], **named)
            if lists and any(isinstance(argument, Tensor) for argument in arguments):
                arguments = [[argument] for argument in arguments]
            return method(self, *arguments, options)

        return call

    return decorate


# The tensors of a call as messages need them: dense, and cut into the parts of each rank.


def plain(tensor: Tensor) -> Tensor:
    """The tensor that MPI can read: one with a place in memory."""
    wait: Callable[[], Tensor] | None = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor is still to come
    tensor = wait() if callable(wait) else tensor
    if tensor.layout is not torch.strided:
        raise TypeError(f"the backend mpi4dl moves dense tensors, not {tensor.layout}: pass tensor.to_dense()")
    return tensor


def all_plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [plain(tensor) for tensor in tensors]


def flat(name: str, tensor: Tensor) -> Tensor:
    tensor = plain(tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, but must be contiguous: pass {name}.contiguous()")
    return tensor.view(-1)


def one_each(name: str, tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    """`tensors`, of which there must be one for each of `size` ranks."""
    if len(tensors) != size:
        raise ValueError(f"{name} has {len(tensors)} tensors, but the group has {size} ranks: pass one each")
    return all_plain(tensors)


def even_parts(name: str, tensor: Tensor, size: int) -> list[Tensor]:
    """The even parts of a tensor, flat views, one for each of `size` ranks."""
    whole = flat(name, tensor)
    if whole.numel() % size:
        raise ValueError(
            f"{name} has {whole.numel()} elements, which must be divisible by the number of ranks (={size})"
        )
    return list(whole.view(size, -1)) if whole.numel() else [whole] * size


def rows(name: str, tensor: Tensor, sizes: Sequence[int], size: int) -> list[Tensor]:
    """The rows of a tensor for each of `size` ranks: as many as `sizes` says, or alike. A 0-d tensor is one row."""
    tensor = plain(tensor).reshape(1) if tensor.dim() == 0 else plain(tensor)
    num_rows = tensor.shape[0]
    if not sizes:
        if num_rows % size:
            raise ValueError(
                f"{name} has {num_rows} rows, which must be divisible by the number of ranks (={size}): "
                f"pass {name}_split_sizes"
            )
        sizes = [num_rows // size] * size
    if len(sizes) != size or sum(sizes) != num_rows:
        raise ValueError(
            f"{name}_split_sizes is {list(sizes)}, but must be {size} numbers (one a rank) whose sum is "
            f"{num_rows}, the number of rows of {name}"
        )
    cuts = [0, *itertools.accumulate(sizes)]
    return [tensor[start:stop] for start, stop in itertools.pairwise(cuts)]


# Sums of sparse tensors, such as the gradients of embeddings: all ranks get all entries, and add them up alike.


def is_sparse(tensor: Tensor) -> bool:
    return tensor.layout is torch.sparse_coo


def sum_sparse(group: Any, tensor: Tensor, op: str) -> None:
    """Sum a COO tensor over the ranks of a group, in place. It waits for the others: entries follow their number.

    Raises:
        TypeError: the reduction is another one.
    """
    if op != "sum":
        raise TypeError(f"sparse tensors are reduced by SUM alone, not by {op.upper()}: pass tensor.to_dense()")
    own = tensor.detach().coalesce()
    numbers = [torch.zeros((), dtype=torch.int64, device=own.device) for _ in range(group.size())]
    group.allgather(numbers, torch.tensor(own._nnz(), device=own.device)).wait()
    # Entries come first, as in values: parts of a gather are whole rows.
    indices = [own.indices().new_zeros((int(number), own.sparse_dim())) for number in numbers]
    values = [own.values().new_zeros((int(number), *own.values().shape[1:])) for number in numbers]
    group.allgather(indices, own.indices().t().contiguous()).wait()
    group.allgather(values, own.values()).wait()
    total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values), own.shape)
    with torch.no_grad():  # a detached one would get entries of its own
        tensor.copy_(total.coalesce())


ANSWER_SECONDS, ANSWER_LOOK_SECONDS = 0.5, 1e-3
MAX_POKED = 64  # the oldest of the operations under way that a new one looks after


class MpiGroup(GROUP):
    """Ranks that torch.distributed treats as a group. C++ calls the methods whose names are not of Python's style.

    It has two wires between them, `ranks` of the job, and `known` is what is known of those that left.
    """

    def __init__(
        self,
        collectives: Wire,
        messages: Wire,
        ranks: Sequence[int],
        known: Departures,
        timeout: timedelta,
        store: dist.Store,
    ) -> None:
        super().__init__(collectives.rank, collectives.size)
        self._collectives, self._messages, self._ranks, self._known = collectives, messages, ranks, known
        self._labels = {"name": "", "description": ""}
        self._in_full = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._letters = Channel(known, ranks, lambda: f"messages of {self.getGroupName()}")
        self._barriers = Channel(known, ranks, lambda: f"monitored barriers of {self.getGroupName()}")
        self._post = Post(messages, self._letters, self._in_full)
        self._timeout = timeout
        self._store = store
        self._num_begun = 0
        self._num_barriers = 0
        self.under_way: list[MpiWork] = []
        self._coalesced: list[Pending] | None = None
        known.join(self, ranks)

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
        return [torch.device(kind) for kind in devices()]

    def _get_backend(self, device: torch.device) -> Abilities:
        return Abilities()

    def get_group_store(self) -> dist.Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._num_begun

    def _wait_for_pending_works(self) -> None:
        for work in self.under_way:
            work.wait()

    def shutdown(self) -> None:
        """Complete what is under way and give the communicators back to MPI, which has few of them.

        Operations that others did not join in time are not waited for again; they keep their buffers until this rank
        ends. A receive that nobody answers is given up.
        """
        self._give_up_receives()
        if not any(work.late or work.exception() for work in self.under_way):
            self._wait_for_pending_works()
        self.under_way = unfinished = [work for work in self.under_way if not work.poke()]
        self._known.part(self)
        self.under_way = []
        for wire in (self._collectives, self._messages):
            if wire.mpi and not unfinished:
                wire.mpi.Free()

    def _give_up_receives(self) -> None:
        """Cancel receives that nobody answers, after a moment in which what was sent before may arrive."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while receives := [w for w in self.under_way if w.receives and not w.poke() and w.exception() is None]:
            if time.monotonic() > deadline:
                break
            time.sleep(ANSWER_LOOK_SECONDS)
        for work in receives:
            work.cancel()
        self.under_way = [work for work in self.under_way if work not in receives]

    def abort(self) -> None:
        self._collectives.mpi.Abort(1)

    def _collective(
        self,
        name: str,
        operands: Sequence[Tensor],
        start: Callable[[], Sequence[Pending]],
        options: CallOptions,
        results: Sequence[Any] | None = None,
        detail: object = "",
        sized: bool = True,
    ) -> MpiWork:
        """Tell others which call this is, and start it on operands that are plain and checked.

        `detail` and, if `sized`, the sizes of the operands are the same on all ranks.
        """
        with as_event(name, operands):
            self._num_begun += 1
            number = self._num_begun
            self._known.count(self.getGroupName(), number)
            call = describe(name, detail, operands, sized, self._in_full)
            agreement = Agreement(self._collectives, call, self._in_full)
            work = self._work(name, agreement, operands if results is None else results, options.timeout, number)
            if self._in_full:
                work.agree()
            agreement.carry(start())
            return self._keep(work, agreement)

    def _work(
        self, name: str, pending: Pending, results: Sequence[Any], timeout: timedelta | None, number: int
    ) -> MpiWork:
        limit = timeout or self._timeout
        return MpiWork(name, self, pending, list(results), limit, lambda: self._check_all_come(name, number))

    def _keep(self, work: MpiWork, pending: Pending) -> MpiWork:
        """Keep what is under way until MPI is done with its buffers, whether or not somebody waits for it."""
        if self._coalesced is not None:
            self._coalesced.append(pending)
        oldest, others = self.under_way[:MAX_POKED], self.under_way[MAX_POKED:]
        self.under_way = [*(old for old in oldest if not old.poke()), *others, work]
        return work

    def _check_all_come(self, name: str, number: int) -> None:
        missing = self._known.will_not_come(self._ranks, self.getGroupName(), number)
        if missing:
            raise Departed(f"{name} of {self!r} cannot be complete: {_left(missing)} before coming to it")

    def _check_that_one_writes(self, name: str, sources: Sequence[int]) -> None:
        for work in list(self.under_way):  # which may have read what is counted, and nobody has looked
            work.poke()
        if all(map(self._letters.is_closed, sources)):
            raise self._departed(name, sources)

    def _check_that_it_reads(self, name: str, reader: int) -> None:
        if self._known.will_not_read(self._ranks[reader]):
            raise self._departed(name, [reader])

    def _departed(self, name: str, missing: Sequence[int]) -> Departed:
        left = _left([self._ranks[rank] for rank in missing])
        return Departed(f"{name} of {self!r} cannot be complete: {left} without its part of it")

    @called_as("tensors")
    def broadcast(self, tensors: list[Tensor], options: CallOptions) -> MpiWork:
        operands = all_plain(tensors)
        return self._collective(
            "broadcast",
            operands,
            lambda: [self._collectives.ibroadcast(x, options.root) for x in operands],
            options,
            tensors,
            f"root {options.root}",
        )

    @called_as("tensors")
    def allreduce(self, tensors: list[Tensor], options: CallOptions) -> MpiWork:
        for x in filter(is_sparse, tensors):
            sum_sparse(self, x, options.op)
        return self._reduce("all_reduce", [x for x in tensors if not is_sparse(x)], options, None, tensors)

    allreduce_coalesced = allreduce

    @called_as("tensors")
    def reduce(self, tensors: list[Tensor], options: CallOptions) -> MpiWork:
        return self._reduce("reduce", tensors, options, options.root, tensors)

    def _reduce(
        self, name: str, tensors: list[Tensor], options: CallOptions, root: int | None, results: list[Tensor]
    ) -> MpiWork:
        operands = all_plain(tensors)
        for x in operands:
            self._collectives.check_reduction(options.op, x.dtype)
        return self._collective(
            name,
            operands,
            lambda: [self._collectives.ireduce(x, options.op, root, options.factor) for x in operands],
            options,
            results,
            options.op.upper() if root is None else f"{options.op.upper()}, root {root}",
        )

    @called_as("outputs inputs")
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: CallOptions) -> MpiWork:
        parts = [one_each("outputs", row, self.size()) for row in outputs]
        return self._gather_everywhere(parts, all_plain(inputs), [x for row in outputs for x in row], options)

    @called_as("outputs inputs")
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: CallOptions) -> MpiWork:
        # `outputs` has a list for each rank here, not one for each input.
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs, options)

    @called_as("output input", lists=False)
    def all_gather_single(self, output: Tensor, input: Tensor, options: CallOptions) -> MpiWork:
        return self.all_gather_single_coalesced([output], [input], options)

    @called_as("outputs inputs")
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: CallOptions) -> MpiWork:
        parts = [even_parts("output", out, self.size()) for out in outputs]
        return self._gather_everywhere(parts, [x.reshape(-1) for x in all_plain(inputs)], outputs, options)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_everywhere(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], results: Sequence[Tensor], options: CallOptions
    ) -> MpiWork:
        for parts, tensor in zip(outputs, inputs, strict=True):
            if parts[self.rank()].numel() != tensor.numel():
                raise ValueError(
                    f"this rank gives {tensor.numel()} elements, but its place in the output has "
                    f"{parts[self.rank()].numel()}: an output must be as large as what all ranks give"
                )

        def start() -> list[Pending]:
            return [
                self._collectives.iswap(dict.fromkeys(range(self.size()), tensor), dict(enumerate(parts)))
                for parts, tensor in zip(outputs, inputs, strict=True)
            ]

        return self._collective("all_gather", inputs, start, options, results, sized=False)

    @called_as("outputs inputs")
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: CallOptions) -> MpiWork:
        here = self.rank() == options.root
        incoming = dict(enumerate(one_each("gather_list", outputs[0], self.size()))) if here else {}
        outgoing = {options.root: plain(inputs[0])}
        results = [x for row in outputs for x in row]
        return self._swap("gather", [*outgoing.values()], outgoing, incoming, results, options, f"root {options.root}")

    @called_as("outputs inputs")
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: CallOptions) -> MpiWork:
        here = self.rank() == options.root
        outgoing = dict(enumerate(one_each("scatter_list", inputs[0], self.size()))) if here else {}
        incoming = {options.root: plain(outputs[0])}
        return self._swap("scatter", [*incoming.values()], outgoing, incoming, outputs, options, f"root {options.root}")

    def _swap(
        self,
        name: str,
        operands: list[Tensor],
        outgoing: dict[int, Tensor],
        incoming: dict[int, Tensor],
        results: Sequence[Tensor],
        options: CallOptions,
        detail: str = "",
    ) -> MpiWork:
        """Start to send each rank its tensor, and to receive from each into its."""

        def start() -> list[Pending]:
            return [self._collectives.iswap(outgoing, incoming)]

        return self._collective(name, operands, start, options, results, detail, sized=False)

    @called_as("outputs inputs")
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: CallOptions) -> MpiWork:
        return self._reduce_parts(
            [one_each("input_list", parts, self.size()) for parts in inputs], all_plain(outputs), outputs, options
        )

    @called_as("output input", lists=False)
    def reduce_scatter_single(self, output: Tensor, input: Tensor, options: CallOptions) -> MpiWork:
        return self.reduce_scatter_single_coalesced([output], [input], options)

    @called_as("outputs inputs")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: CallOptions
    ) -> MpiWork:
        parts = [even_parts("input", plain(x).contiguous(), self.size()) for x in inputs]
        return self._reduce_parts(parts, [flat("output", out) for out in outputs], outputs, options)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_parts(
        self, inputs: list[list[Tensor]], outputs: list[Tensor], results: Sequence[Tensor], options: CallOptions
    ) -> MpiWork:
        for parts, out in zip(inputs, outputs, strict=True):
            self._collectives.check_reduction(options.op, out.dtype)
            if parts[self.rank()].numel() != out.numel():
                raise ValueError(
                    f"output has {out.numel()} elements, but this rank's part of the input has "
                    f"{parts[self.rank()].numel()}: they must be as many"
                )

        def start() -> list[Pending]:
            return [
                self._collectives.ireduce_parts(parts, out, options.op, options.factor)
                for out, parts in zip(outputs, inputs, strict=True)
            ]

        operands = [part for parts in inputs for part in parts]
        return self._collective("reduce_scatter", operands, start, options, results, options.op.upper())

    @called_as("outputs inputs")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: CallOptions) -> MpiWork:
        incoming = dict(enumerate(one_each("output_tensor_list", outputs, self.size())))
        sent = one_each("input_tensor_list", inputs, self.size())
        return self._swap("all_to_all", sent, dict(enumerate(sent)), incoming, outputs, options)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> MpiWork:
        incoming = dict(enumerate(rows("output", output, output_split_sizes, self.size())))
        sent = rows("input", input, input_split_sizes, self.size())
        return self._swap("all_to_all", sent, dict(enumerate(sent)), incoming, [output], CallOptions.of(opts, timeout))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> MpiWork:
        return self._collective("barrier", [], lambda: [self._collectives.ibarrier()], CallOptions.of(opts, timeout))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that does not return before all ranks have come, and whose time-out names who has not."""
        self._num_barriers += 1
        limit = self._timeout if timeout is None else timeout

        def check_all_come(ranks: Iterable[int]) -> None:
            if missing := list(filter(self._barriers.is_closed, ranks)):
                raise self._departed("monitored_barrier", missing)

        pass_monitored_barrier(
            self._collectives, self._barriers, self._num_barriers, limit, wait_all_ranks, check_all_come
        )

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> MpiWork:
        with as_event("send", tensors):
            parts = [self._post.isend(plain(x), dstRank, tag) for x in tensors]
        name = f"send to rank {dstRank}"
        return self._message(name, parts, tensors, lambda: self._check_that_it_reads(name, dstRank), False)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> MpiWork:
        with as_event("recv", tensors):
            parts = [self._post.ireceive(plain(x), srcRank, tag) for x in tensors]
        name = f"recv from rank {srcRank}"
        return self._message(name, parts, tensors, lambda: self._check_that_one_writes(name, [srcRank]))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MpiWork:
        (tensor,) = tensors
        with as_event("recv", tensors):
            part = self._post.ireceive(plain(tensor), None, tag)
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        name = "recv from any rank"
        return self._message(name, [part], tensors, lambda: self._check_that_one_writes(name, others))

    def _message(
        self,
        name: str,
        parts: Sequence[Pending],
        results: Sequence[Tensor],
        alarm: Callable[[], None],
        receives: bool = True,
    ) -> MpiWork:
        pending = Pending.all(self._collectives.node, parts)

        def look() -> None:
            try:
                alarm()
            except Departed:
                if not pending.test():  # else it was what came last of all, and was found as others were looked at
                    raise

        work = MpiWork(name, self, pending, list(results), self._timeout, look, receives)
        return self._keep(work, pending)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        parts, self._coalesced = self._coalesced or [], None
        pending = Pending.all(self._collectives.node, parts)
        return self._keep(self._work("coalesced operations", pending, [], None, self._num_begun), pending)


def _left(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of the job left"


# Functions that PyTorch does not pass to groups written in Python.

OPERATION = "_c10d_functional::all_gather_into_tensor_out"


def gather_into_given_tensors() -> torch.library.Library:
    """Let `OPERATION`, which compiled programs call, work on our groups. It holds while the result is kept."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        kernel = torch.library.get_kernel(OPERATION, device)

        def gather(
            keys: torch._C.DispatchKeySet, x: Tensor, size: int, name: str, *, out: Tensor, kernel: Any = kernel
        ) -> Tensor:
            group = dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(name))
            if not isinstance(group, MpiGroup):
                return kernel.call_boxed(keys, x, size, name, out=out)
            group.all_gather_single(out, x).wait()
            return out

        library.impl("all_gather_into_tensor_out", gather, device, with_keyset=True)
    return library


def hand_on_monitored_barriers() -> None:
    """Let `dist.monitored_barrier`, which asks for the backend gloo by name, work on our groups."""
    of_gloo = dist.monitored_barrier

    @functools.wraps(of_gloo)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        ours = dist.group.WORLD if group is None else group
        if not isinstance(ours, MpiGroup):
            of_gloo(group, timeout, wait_all_ranks)
        else:
            limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
            ours.monitored_barrier(limit, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


def keep_what_ddp_waits_for() -> None:
    """Keep what `Join` gives DDP to wait for in backward: C++ keeps its own part of it, whose `wait` never returns."""
    of_reducer: Any = dist.Reducer._set_forward_pass_work_handle
    kept: weakref.WeakKeyDictionary[Any, dist.Work] = weakref.WeakKeyDictionary()

    def set_forward_pass_work_handle(reducer: Any, work: dist.Work, use_static_world_size: bool) -> None:
        kept[reducer] = work
        of_reducer(reducer, work, use_static_world_size)

    reducer_class: Any = dist.Reducer
    reducer_class._set_forward_pass_work_handle = set_forward_pass_work_handle
