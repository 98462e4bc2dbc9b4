"""NCCL beside MPI: which calls go between GPUs by torch's process groups, and the store by which these connect.

    exchanges of boxes, all-gathers, parts of     sends and receives, grouped: one group of all ranks for them all
      buckets, small sums
    all-reduces of buckets of gradients           NCCL's own: a group of exactly the ranks that add up
    messages from one rank to another, all else   MPI, as "staged"

NCCL has no tags: of two ranks, the first that one sends is the first that the other receives, and a group does one
thing after the other. So its calls, on all communicators, must have one order, in which each rank makes its own. The
first incomplete call then has all its ranks, and there is no cycle of waits. Ranks that share a stage make their calls
in such an order ("Order" and "A table cannot deadlock" in docs/explanation/design-decisions.md). Values between stages
have no such order: two stages send to each other at once, and post receives ahead of time. Nor do the second phases of
our own all-reduces, which start when the first are found to be complete, nor sums over both directions of GEMS, whose
ranks end their stages in opposite orders. So the call decides, both ends of which are one,
`PointToPoint.iexchange(collective=True)`, on a communicator that is `ordered`; nothing about a message does, its size
least of all.

Groups are connected where communicators are made, by all of their ranks: in a first message, NCCL would keep a host
that others wait for. A group takes memory of the GPU, and most communicators never sum a gradient. So messages of two
ranks, on any communicator, use the group of all ranks. Each `AllReduce` makes a group of its own, so halos need not
wait behind a bucket of gradients.

A rank that waits for NCCL polls the GPU, and drives messages of MPI meanwhile: another rank may wait for one of these
before it makes its own end of the call.
"""

import itertools
import os
import platform
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpi4dl.comm import Refusal
from mpi4dl.comm.node import Node
from mpi4dl.comm.packing import as_bytes
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.requests import Works
from mpi4dl.comm.shutdown import met

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

# Keys and values that all ranks share, for torch.distributed: MPI says where, so nobody has to name an address.

LOCAL = "127.0.0.1"
STORE_PATIENCE = timedelta(seconds=20)


def open_store(comm: "Communicator") -> tuple[dist.Store | None, str]:
    """A store that rank 0 keeps; None on all ranks, and why, where they cannot reach rank 0 by TCP. Collective.

    It asks nobody who he is: so rank 0 listens where the others are, on this machine alone or on the way to theirs.
    """
    hosts = comm.all_gather_object(socket.gethostname())
    store: dist.Store | None = None
    address, port, error = "", 0, ""
    if comm.rank == 0:
        try:
            others = set(hosts) - {hosts[0]}
            address = _address_towards(others) if others else LOCAL
            with socket.create_server((address, 0), backlog=comm.size) as listener:
                port = listener.getsockname()[1]
                options: Any = {"master_listen_fd": os.dup(listener.fileno())}
                store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, **options)
        except (OSError, RuntimeError) as problem:
            error = str(problem)
    address, port = comm.broadcast_object((address, port))
    if comm.rank and port:
        try:
            store = dist.TCPStore(address, port, timeout=STORE_PATIENCE)
        except RuntimeError as problem:
            error = str(problem)
    errors = [error for error in comm.all_gather_object(error) if error]
    if errors:
        return None, f"ranks cannot reach {address}:{port} ({errors[0]})"
    return store, ""


def _address_towards(hosts: Iterable[str]) -> str:
    """The address under which other machines reach this one. No message is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((min(hosts), 9))
        return probe.getsockname()[0]


NEVER = timedelta(days=365)  # the watchdog of mpi4dl ends a job that hangs, and knows how long steps take
CONNECTS_LATE = "NCCL_RUNTIME_CONNECT"  # NCCL's own variable: whether algorithms connect in their first call

OpenGroup = Callable[[dist.Store, int, int], Any]
Packed = tuple[int, Tensor]


def open_group(store: dist.Store, rank: int, size: int) -> Any:
    """torch's process group of NCCL for the current GPU, connected. Collective over its ranks."""
    os.environ.setdefault(CONNECTS_LATE, "0")
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = NEVER
    group = kind(store, rank, size, options)
    # So it has one communicator of NCCL's, and makes no other for two ranks when they send their first message.
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


class Groups:
    """The process groups that a communicator and those split off it have made; `rank` is this one's in all of them."""

    def __init__(self, store: dist.Store, rank: int, size: int, open_group: OpenGroup) -> None:
        self.rank = rank
        self._store, self._open = store, open_group
        self._made: dict[tuple[int, ...], list[Any]] = {}
        self._free: dict[tuple[int, ...], set[int]] = {}
        self.of_all = self._make(tuple(range(size)))

    def _make(self, ranks: tuple[int, ...]) -> Any:
        """A new group of these ranks. Collective over them alone."""
        made = self._made.setdefault(ranks, [])
        store = dist.PrefixStore(f"group {len(made)} of ranks {ranks}", self._store)
        made.append(self._open(store, ranks.index(self.rank), len(ranks)))
        return made[-1]

    def sums(self, comm: "Communicator", ranks: tuple[int, ...]) -> "Summing":
        """A summing object with a group of its own: a new one, or one that was given up. Collective over `comm`.

        The ranks of `comm`, which are these `ranks` of all, may find at different times that nobody sums any more.
        """
        free = self._free.setdefault(ranks, set())
        given_up = sorted(set.intersection(*comm.all_gather_object(free)))
        if not given_up:
            self._make(ranks)
        made = self._made[ranks]
        number = given_up[0] if given_up else len(made) - 1
        free.discard(number)
        sums = Summing(comm.node, made[number])
        weakref.finalize(sums, free.add, number).atexit = False
        return sums

    def close(self) -> None:
        """Give them up, once no rank waits for any message: those that this rank has sent may still be on their way."""
        for group in itertools.chain(*self._made.values()):
            group.abort()
        self._made = {}


class Nccl:
    """How the ranks of a communicator reach each other by NCCL: `ranks` are theirs among all."""

    def __init__(self, groups: Groups, ranks: Sequence[int]) -> None:
        self._groups = groups
        self.ranks = tuple(ranks)

    def among(self, members: Sequence[int]) -> "Nccl":
        """The same for some of these ranks, in this order."""
        return Nccl(self._groups, [self.ranks[member] for member in members])

    def exchange(self, sends: Sequence[Packed], receives: Sequence[Packed]) -> Works:
        """Start to send dense tensors to ranks, and to receive into others from ranks, as one operation."""
        group = self._groups.of_all
        group._start_coalescing()
        for peer, x in sends:
            group.send([as_bytes(x)], self.ranks[peer], 0)
        for peer, x in receives:
            group.recv([as_bytes(x)], self.ranks[peer], 0)
        return Works([group._end_coalescing()])

    def sums(self, comm: "Communicator") -> "Summing":
        """A summing object for the ranks of `comm`, which are these. Collective over them."""
        return self._groups.sums(comm, self.ranks)


class Summing:
    """Sums tensors on GPUs over the ranks of a group of their own, in place, as NCCL does it: floats only.

    Those of 16 bits are summed in float32 and rounded once, as by all other ways.
    """

    def __init__(self, node: Node, group: Any) -> None:
        self._node, self._group = node, group

    def __call__(self, tensor: Tensor) -> Pending:
        target = tensor.detach()
        total = (target.float() if target.itemsize == 2 else target).contiguous()
        works = Works([self._group.allreduce([total])])
        pending = Pending(self._node, [works], [total, self], [works.join])
        return pending if total.data_ptr() == target.data_ptr() else pending.then(lambda: target.copy_(total))


def check(comm: "Communicator") -> None:
    """Whether each rank has NCCL and a GPU of its own. Collective.

    Raises:
        Refusal: on all ranks, with what one of them lacks.
    """
    asked = "gpu wire is 'nccl', but"
    remedy = "use `gpu_wire` auto"
    missing = None
    if not (dist.is_available() and dist.is_nccl_available()):
        missing = f"{asked} PyTorch {torch.__version__} was built without NCCL: {remedy}, or install one with CUDA"
    elif not torch.cuda.is_available():
        missing = f"{asked} PyTorch sees no GPU here: {remedy}"
    comm.agree(missing)
    device = comm.node.device("cuda")
    gpus = comm.all_gather_object((platform.node(), str(torch.cuda.get_device_properties(device).uuid)))
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise Refusal(
                f"{asked} ranks {gpus.index(gpu)} and {rank} share a GPU of {gpu[0]}, which NCCL does not allow: start "
                f"one rank for each GPU, or {remedy}"
            )


def join(comm: "Communicator", open_group: OpenGroup = open_group) -> Nccl:
    """Connect all ranks of `comm` by NCCL. Collective.

    Raises:
        Refusal: on all ranks; they do not reach rank 0, or NCCL failed on one of them.
    """
    store, complaint = open_store(comm)
    if store is None:
        raise Refusal(f"gpu wire is 'nccl', but {complaint}: use `gpu_wire` auto")
    store.set_timeout(NEVER)
    device = comm.node.device("cuda")
    with comm.together((RuntimeError,)):
        groups = Groups(store, comm.rank, comm.size, open_group)
        nccl = Nccl(groups, range(comm.size))
        leaving, arriving = (torch.zeros(comm.size, 1, dtype=torch.uint8, device=device) for _ in range(2))
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        if others:  # a byte between any two ranks: only by that NCCL connects them
            works = nccl.exchange([(r, leaving[r]) for r in others], [(r, arriving[r]) for r in others])
            Pending(comm.node, [works], [leaving, arriving], [works.join]).wait()
    meeting = met()
    if meeting is not None:
        meeting.closings.append(groups.close)
    return nccl
