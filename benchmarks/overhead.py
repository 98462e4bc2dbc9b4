"""What a call on tiles costs beside PyTorch's own: microseconds beyond it, Python calls, operators and new tensors.

    python -m benchmarks run overhead --tile 8 --channels 8

    plain      the call on each rank's tile, in plain PyTorch
    ours       the same on a tensor that is spread over the ranks of a row: rules, messages and all
    DTensor    torch.distributed's, with the last dim sharded, over gloo, for the calls that it can do

Tiles are so small that their arithmetic takes next to no time. Times are those of a thread at work: what it waits for
others does not count. They are the least of some bursts, on the rank where that is longest. Counts are those of one
call beyond plain PyTorch's: functions of Python that are entered; operators of PyTorch below autograd; and results of
these in new memory. Functions by which a rank waits are not counted: their number depends on how long that takes.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as declared
from benchmarks.common.charts import OTHERS, Bars, bars
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import publish
from benchmarks.common.results import Column, spread, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns
from mpi4dl._wording import counted
from mpi4dl.options.kinds import TEXT, integer

if TYPE_CHECKING:
    import torch

    from mpi4dl.comm import Communicator

Operator = Callable[["torch.Tensor"], "torch.Tensor"]
PASSES = ("forward", "backward")
COUNTS = ("calls", "operators", "tensors")
UNCOUNTED = ("comm/node.py", "comm/pending.py", "comm/requests.py", "contextlib.py")  # waiting, and entering this
TOLERANCE = 1e-5
BURSTS = 5
OPTIONS = (
    declared.ranks("1,2"),
    Option("--tile", integer("a whole number of at least 4", lambda n: n >= 4), 8, "height and width of a tile, in px"),
    declared.count("--channels", 8),
    Option("--operators", listed(TEXT), "", "only those with one of these in their names: conv,norm"),
    declared.count("--iterations", 100, "calls in a burst"),
    declared.rounds(5),
)
QUICK = {"ranks": "2", "iterations": 2, "rounds": 1}
COLUMNS = [Column("ranks", "ranks"), Column("", "operator")]
for each in PASSES:
    COLUMNS += [
        Column(f"{each} us: plain", f"plain_{each}_us", 0),
        Column("beyond", f"ours_{each}_us", 0, ends=True),
        Column("DTensor beyond", f"dtensor_{each}_us", 0),
        *(Column(name, f"{each}_{name}") for name in COUNTS),
    ]


def check(options: Options) -> str | None:
    return None if options.operators == [""] or chosen(options) else f"--operators: no name has {options.operators}"


def chosen(options: Options) -> list[str]:
    return [name for name in NAMES if any(word in name for word in options.operators)]


NAMES = (
    *("relu", "add", "cat", "conv 1x1", "conv 3x3", "conv 3x3 stride 2", "max pool 3x3", "average pool 3x3"),
    *("batch norm", "group norm", "bilinear x2", "global mean"),
)


def operators(channels: int, held: Callable[["torch.Tensor"], Any] = lambda p: p) -> dict[str, Operator]:
    """Calls by name, with parameters that are the same on all ranks, each of them `held` somehow."""
    import torch
    from torch.nn import functional as F

    pixel, window = (held(torch.randn(channels, channels, k, k, requires_grad=True)) for k in (1, 3))
    weight, bias = (held(torch.randn(channels, requires_grad=True)) for _ in range(2))
    running = held(torch.zeros(channels)), held(torch.ones(channels))
    calls: tuple[Operator, ...] = (
        torch.relu,
        lambda x: x + x,
        lambda x: torch.cat([x, x], 1),
        lambda x: F.conv2d(x, pixel, bias),
        lambda x: F.conv2d(x, window, bias, padding=1),
        lambda x: F.conv2d(x, window, bias, stride=2, padding=1),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.avg_pool2d(x, 3, 1, 1),
        lambda x: F.batch_norm(x, *running, weight, bias, training=True),
        lambda x: F.group_norm(x, 2, weight, bias),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: x.mean((2, 3)),
    )
    return dict(zip(NAMES, calls, strict=True))


class Call:
    """A call whose argument is `x`, of which `leaf` is this rank's part, and its backward pass."""

    def __init__(
        self, operator: Operator, x: Any, leaf: "torch.Tensor", local: Callable[[Any], "torch.Tensor"]
    ) -> None:
        import torch

        self.operator, self.x, self.leaf, self.local = operator, x, leaf, local
        self.gradient = torch.ones_like(local(operator(x)))

    def forward(self) -> "torch.Tensor":
        """This rank's part of the result: norms whose results nobody looks at would wait for each other."""
        return self.local(self.operator(self.x))

    def backward(self, y: "torch.Tensor") -> None:
        import torch

        torch.autograd.grad(y, self.leaf, self.gradient)

    def microseconds(self, clock: Callable[[], float], iterations: int) -> dict[str, float]:
        """Of a forward pass and of a backward pass: the least of some bursts, in which the two take turns."""
        found: dict[str, list[float]] = {name: [] for name in PASSES}
        for _ in range(BURSTS + 1):
            forward = backward = 0.0
            for _ in range(iterations):
                began = clock()
                y = self.forward()
                done = clock()
                self.backward(y)
                ended = clock()
                forward, backward = forward + done - began, backward + ended - done
            found["forward"].append(forward)
            found["backward"].append(backward)
        return {name: 1e6 * min(seconds[1:]) / iterations for name, seconds in found.items()}

    def counts(self) -> dict[str, int]:
        """What one forward, and one backward pass, does."""
        found: dict[str, int] = {}
        for count in (count_calls, count_operators):  # the second one calls functions of its own
            with count() as of_forward:
                y = self.forward()
            with count() as of_backward:
                self.backward(y)
            for name, numbers in zip(PASSES, (of_forward, of_backward), strict=True):
                found |= {f"{name}_{kind}": number for kind, number in numbers.items()}
        return found


@contextmanager
def count_calls() -> Iterator[dict[str, int]]:
    """Within: how many functions of Python are entered, but for those by which a rank waits."""
    found = {"calls": 0}

    def called(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        found["calls"] += event == "call" and name != __file__ and not name.endswith(UNCOUNTED)

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


@contextmanager
def count_operators() -> Iterator[dict[str, int]]:
    """Within: how many operators of PyTorch run below autograd, and how many of their results have new memory."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    found = {"operators": 0, "tensors": 0}

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            known = {_storage(x) for x in tree_leaves((args, kwargs))}
            found["operators"] += 1
            found["tensors"] += len({_storage(x) for x in tree_leaves(result)} - known)
            return result

    with Operators():
        yield found


def _storage(x: Any) -> int | None:
    import torch

    return x.untyped_storage()._cdata if isinstance(x, torch.Tensor) else None


def tiles(options: Options, comm: "Communicator") -> tuple["torch.Tensor", Any, "torch.Tensor"]:
    """The whole image, the same on all ranks; the image that is spread; and its tile, a leaf."""
    import torch

    from mpi4dl.parallel import spatial

    torch.manual_seed(0)
    image = torch.randn(1, options.channels, options.tile, options.tile * comm.size)
    spread_image = spatial.shard(image, spatial.Grid(comm, 1, comm.size))
    tile = spread_image.local.clone(memory_format=torch.contiguous_format).requires_grad_()
    return image, spread_image.like(tile), tile


def work(options: Options) -> None:
    """All calls; an answer has by call its microseconds and counts, in plain PyTorch and on tiles or as a DTensor."""
    from benchmarks.common.ranks import begin, gloo

    comm = begin()
    if options.worker == "dtensor":
        with gloo(comm):
            answer_turns(lambda: of_dtensors(options, comm), comm)
    else:
        answer_turns(lambda: of_tiles(options, comm), comm)


def of_tiles(options: Options, comm: "Communicator") -> dict[str, Any]:
    from mpi4dl.parallel import spatial
    from mpi4dl.parallel.spatial.tensor import local_part

    image, x, tile = tiles(options, comm)
    plain = tile.detach().requires_grad_()
    answer: dict[str, Any] = {}
    calls = operators(options.channels)
    for name in chosen(options):
        operator = calls[name]
        error = float((spatial.gather(operator(x)) - operator(image)).detach().abs().max())
        wrong = f"{name} differs from PyTorch's by {error:.1e}: nothing was measured"
        comm.agree(wrong if error > TOLERANCE else None)
        ours = Call(operator, x, tile, local_part)
        theirs = Call(operator, plain, plain, local_part)
        found = {
            who: longest(comm, call.microseconds(comm.node.work_seconds, options.iterations))
            for who, call in (("plain", theirs), ("ours", ours))
        }
        own = theirs.counts()
        answer[name] = {**found, "counts": {count: number - own[count] for count, number in ours.counts().items()}}
    return answer


def of_dtensors(options: Options, comm: "Communicator") -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    image, _, tile = tiles(options, comm)
    mesh = init_device_mesh("cpu", (comm.size,))
    sharded = DTensor.from_local(tile, mesh, [Shard(3)], run_check=False)

    def replicated(value: torch.Tensor) -> DTensor:
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

    answer: dict[str, Any] = {}
    state = torch.get_rng_state()
    plain = operators(options.channels)
    torch.set_rng_state(state)
    calls = operators(options.channels, replicated)
    for name in chosen(options):
        error, took = float("inf"), dict.fromkeys(PASSES, 0.0)
        try:
            found: Any = calls[name](sharded)
            error = float((found.full_tensor() - plain[name](image)).detach().abs().max())
            call = Call(calls[name], sharded, tile, lambda y: y.to_local())
            took = call.microseconds(time.thread_time, options.iterations)
        except Exception as cannot:  # DTensor's own errors are of many kinds, the same on all ranks
            error = float("inf")
            print(f"DTensor, {name}: {str(cannot).splitlines()[0][:100]}", file=sys.stderr)
        if all(comm.all_gather_object(error <= TOLERANCE)):
            answer[name] = longest(comm, took)
    return answer


def longest(comm: "Communicator", found: dict[str, float]) -> dict[str, float]:
    """Of each pass the time on the rank that takes longest. Collective."""
    import torch

    values = comm.all_reduce(torch.tensor(list(found.values()), dtype=torch.float64), "max")
    return dict(zip(found, values.tolist(), strict=True))


def run(options: Options) -> None:
    jobs = {size: options.contestant(f"{size} ranks", size, "tiles") for size in options.ranks}
    peer = options.contestant("DTensor", max(options.ranks), "dtensor")
    take_turns([*jobs.values(), peer] if peer.ranks > 1 else list(jobs.values()), options.rounds)
    rows = [row for size, job in jobs.items() for row in summarise(size, job, peer if size == peer.ranks else None)]
    title = f"{options.channels} channels, tiles of {options.tile} x {options.tile} px, float32, one thread a rank"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def summarise(size: int, job: Contestant, peer: Contestant | None) -> list[dict[str, Any]]:
    """By call the medians over the turns: plain PyTorch's microseconds, what others take beyond these, and counts."""
    rows = []
    for name, last in job.answers[-1].items():
        row: dict[str, Any] = {"ranks": size, "operator": name, **last["counts"]}
        for each in PASSES:
            plain = [answer[name]["plain"][each] for answer in job.answers]
            row |= spread(f"plain_{each}_us", plain)
            beyond = [answer[name]["ours"][each] - own for answer, own in zip(job.answers, plain, strict=True)]
            row |= spread(f"ours_{each}_us", beyond)
            row[f"dtensor_{each}_us"] = None
            if peer is not None and all(name in answer for answer in peer.answers):
                theirs = [answer[name][each] - own for answer, own in zip(peer.answers, plain, strict=False)]
                row |= spread(f"dtensor_{each}_us", theirs)
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Microseconds beyond plain PyTorch's, call by call; DTensor's as lines."""
    panels = [
        Bars(f"ours_{each}_us", f"{each}: us beyond plain PyTorch; line: DTensor", digits=0, mark=f"dtensor_{each}_us")
        for each in PASSES
    ]
    names = [f"{row['operator']}, {counted(row['ranks'], 'rank')}" for row in rows]
    return bars(rows, panels, title, [OTHERS] * len(rows), names)
