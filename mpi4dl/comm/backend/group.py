"""The process group: every call of torch.distributed, as an operation of two wires that does not wait.

C++ (DDP, the functional collectives) finds these methods by the names that they have here; `signatures` says how they
may be called.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mpi4dl.comm.backend.agreement import Agreement, describe
from mpi4dl.comm.backend.departure import Channel, Departures
from mpi4dl.comm.backend.errors import Departed
from mpi4dl.comm.backend.messages import Post
from mpi4dl.comm.backend.monitored import pass_monitored_barrier
from mpi4dl.comm.backend.named import NamedGroup
from mpi4dl.comm.backend.operands import all_plain, even_parts, flat, one_each, plain, rows
from mpi4dl.comm.backend.signatures import CallOptions, called_as
from mpi4dl.comm.backend.sparse import is_sparse, sum_sparse
from mpi4dl.comm.backend.wire import Wire
from mpi4dl.comm.backend.work import MpiWork
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.profiling import as_event

ANSWER_SECONDS, ANSWER_LOOK_SECONDS = 0.5, 1e-3
MAX_POKED = 64  # the oldest of the operations under way that a new one looks after


class Members(NamedTuple):
    """The ranks of a group: two wires between them, their ranks in the job, and what is known of those that left."""

    collectives: Wire
    messages: Wire
    ranks: Sequence[int]
    departures: Departures


class MpiGroup(NamedGroup):
    """Ranks that torch.distributed treats as a group. C++ calls the methods whose names are not of Python's style."""

    def __init__(self, members: Members, timeout: timedelta, store: dist.Store) -> None:
        super().__init__(members.collectives)
        self._members = members
        self._in_full = dist.get_debug_level() == dist.DebugLevel.DETAIL
        known, ranks = members.departures, members.ranks
        self._letters = Channel(known, ranks, lambda: f"messages of {self.getGroupName()}")
        self._barriers = Channel(known, ranks, lambda: f"monitored barriers of {self.getGroupName()}")
        self._post = Post(members.messages, self._letters, self._in_full)
        self._timeout = timeout
        self._store = store
        self._num_begun = 0
        self._num_barriers = 0
        self.under_way: list[MpiWork] = []
        self._coalesced: list[Pending] | None = None
        known.join(self, ranks)

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

        What others did not come to in time is not waited for again; it keeps its buffers as long as this rank is there.
        A receive that nobody answers is given up.
        """
        self._give_up_receives()
        if not any(work.late or work.exception() for work in self.under_way):
            self._wait_for_pending_works()
        self.under_way = unfinished = [work for work in self.under_way if not work.poke()]
        self._members.departures.part(self)
        self.under_way = []
        for wire in (self._collectives, self._members.messages):
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
            self._members.departures.count(self.getGroupName(), number)
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
        node, limit = self._collectives.node, timeout or self._timeout
        return MpiWork(name, self, pending, node, list(results), limit, lambda: self._check_all_come(name, number))

    def _keep(self, work: MpiWork, pending: Pending) -> MpiWork:
        """Keep what is under way until MPI is done with its buffers, whether or not somebody waits for it."""
        if self._coalesced is not None:
            self._coalesced.append(pending)
        oldest, others = self.under_way[:MAX_POKED], self.under_way[MAX_POKED:]
        self.under_way = [*(old for old in oldest if not old.poke()), *others, work]
        return work

    def _check_all_come(self, name: str, number: int) -> None:
        missing = self._members.departures.will_not_come(self._members.ranks, self.getGroupName(), number)
        if missing:
            raise Departed(f"{name} of {self!r} cannot be complete: {_left(missing)} before coming to it")

    def _check_that_one_writes(self, name: str, sources: Sequence[int]) -> None:
        for work in list(self.under_way):  # which may have read what is counted, and nobody has looked
            work.poke()
        if all(map(self._letters.is_closed, sources)):
            raise self._departed(name, sources)

    def _check_that_it_reads(self, name: str, reader: int) -> None:
        if self._members.departures.will_not_read(self._members.ranks[reader]):
            raise self._departed(name, [reader])

    def _departed(self, name: str, missing: Sequence[int]) -> Departed:
        left = _left([self._members.ranks[rank] for rank in missing])
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
        return self._collective(
            "gather",
            list(outgoing.values()),
            lambda: [self._collectives.iswap(outgoing, incoming)],
            options,
            [x for row in outputs for x in row],
            f"root {options.root}",
            sized=False,
        )

    @called_as("outputs inputs")
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: CallOptions) -> MpiWork:
        here = self.rank() == options.root
        outgoing = dict(enumerate(one_each("scatter_list", inputs[0], self.size()))) if here else {}
        incoming = {options.root: plain(outputs[0])}
        return self._collective(
            "scatter",
            list(incoming.values()),
            lambda: [self._collectives.iswap(outgoing, incoming)],
            options,
            outputs,
            f"root {options.root}",
            sized=False,
        )

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
        incoming = one_each("output_tensor_list", outputs, self.size())
        return self._all_to_all(one_each("input_tensor_list", inputs, self.size()), incoming, outputs, options)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> MpiWork:
        incoming = rows("output", output, output_split_sizes, self.size())
        outgoing = rows("input", input, input_split_sizes, self.size())
        return self._all_to_all(outgoing, incoming, [output], CallOptions.of(opts, timeout))

    alltoall_base = all_to_all_single

    def _all_to_all(
        self, outgoing: list[Tensor], incoming: list[Tensor], results: Sequence[Tensor], options: CallOptions
    ) -> MpiWork:
        return self._collective(
            "all_to_all",
            outgoing,
            lambda: [self._collectives.iswap(dict(enumerate(outgoing)), dict(enumerate(incoming)))],
            options,
            results,
            sized=False,
        )

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
        node = self._collectives.node
        pending = Pending.all(node, parts)
        work = MpiWork(name, self, pending, node, list(results), self._timeout, alarm, receives)
        return self._keep(work, pending)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        parts, self._coalesced = self._coalesced or [], None
        pending = Pending.all(self._collectives.node, parts)
        return self._keep(self._work("coalesced operations", pending, [], None, self._num_begun), pending)


def _left(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of the job left"
