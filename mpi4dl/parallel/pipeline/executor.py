"""Runs a table: this rank does the actions of its row, one after the other. The table knows when, the boundaries where.

row       F0   F1   B0   F2   B1   B2
forward   values from the stage before -> stage -> values to the stage behind; on the last stage, the loss
backward  gradients from the stage behind -> autograd -> gradients to the stage before
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from time import perf_counter
from typing import Any, Protocol
from unittest.mock import patch
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from mpi4dl._randomness import PythonStates, RandomStates, forked, seed_host
from mpi4dl.comm import Communicator, Pending, Refusal
from mpi4dl.comm.exchange import within_forward
from mpi4dl.comm.pending import as_event
from mpi4dl.parallel.inputs import Microbatch
from mpi4dl.parallel.pipeline.decisions import (
    Buffers,
    ForwardState,
    Watch,
    hidden_tensors,
    is_data,
    is_foreign,
    watches_of,
)
from mpi4dl.parallel.pipeline.local_stages import LocalStages, Part
from mpi4dl.parallel.pipeline.split_backward import WeightGradients
from mpi4dl.parallel.pipeline.stage_communication import Received, StageBoundary, StageMessage
from mpi4dl.parallel.replicas.groups import ReplicaGroups
from mpi4dl.parallel.spatial import whole_gradients
from mpi4dl.parallel.spatial.tensor import SpatialTensor, local_part
from mpi4dl.parallel.tables.schedules import Action, Table, undivided
from mpi4dl.parallel.tables.simulator import TimeSpan

# Running statistics of batch norm where copies of a stage see different microbatches: the two of GEMS, which see every
# other wave, or those of replicas with local batches.
#
# A plain loop updates them once per microbatch, in order. Here each copy keeps what its own microbatches would add;
# after the step the copies exchange that, and all update their statistics in the order of the plain loop, to the same
# bits.

Norm = nn.modules.batchnorm._NormBase
STATISTICS = ("running_mean", "running_var")


class RunningStatistics:
    """Those of one stage, whose copies are on the ranks of `comm`.

    This rank tells the others of microbatches of `replica` in a direction if `speaks[direction]`. `local`: copies are
    those of replicas with local batches, not those of GEMS. `watches`: the globals that the module reads.
    `streams`: buffers are put back between tiles. `problem`: what the copies cannot follow.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        speaks: dict[int, bool],
        replica: int = 0,
        local: bool = False,
        watches: Sequence[Watch] = (),
        streams: bool = False,
    ) -> None:
        self.module, self.comm, self.speaks, self.replica = module, comm, speaks, replica
        self.problem: str | None = None
        self._streams = streams
        self.where = "on replicas with images of their own" if local else "in both directions"
        self.instead = "share images by `tiles` instead of `data`" if local else "leave out `bidirectional`"
        self.norms: list[Any] = [
            m for m in module.modules() if isinstance(m, Norm) and m.training and m.running_mean is not None
        ]
        norms = {id(value) for m in self.norms for value in m.buffers(recurse=False)}
        self.others = [(name, b, b.detach().clone()) for name, b in module.named_buffers() if id(b) not in norms]
        self._watches = watches
        self._found: dict[tuple[int, int], list[dict[str, Any]]] = {}

    @contextmanager
    def collect(self, direction: int, number: int) -> Iterator[None]:
        """Keep what this microbatch adds to the statistics, and leave them as they are."""
        state, momenta = ForwardState(self.module, self._watches), [m.momentum for m in self.norms]
        given, row, tried = list[dict[str, Any]](), list[dict[str, Any]](), dict[nn.Module, Any]()
        with Buffers(nn.ModuleList(self.norms)).copied(), ExitStack() as stack:
            for m in self.norms:
                m.momentum = 1.0  # so that the statistics become those of this microbatch
                m._buffers["num_batches_tracked"] = torch.zeros((), dtype=torch.long, device=m.running_mean.device)
                given.append(dict(m._buffers))
                hooked = m._forward_pre_hooks or m._forward_hooks
                if (is_foreign(m) or hooked) and not self._streams:
                    stack.enter_context(patch.object(m, "forward", partial(_tried, m, m.forward, tried)))
            try:
                yield
            finally:
                for m, momentum in zip(self.norms, momenta, strict=True):
                    if m.momentum != 1.0:
                        tried[m] = [(torch.tensor(torch.inf),) * 3]  # nothing that could follow it
                    m.momentum = momentum
                    row.append(dict(m._buffers))
                    if not _counts(m):  # each use writes once
                        mean = row[-1]["running_mean"]
                        row[-1]["num_batches_tracked"] = torch.full_like(mean[:1], mean._version)
        self.problem = next(self._problems(state, given, row, tried), self.problem)
        self._found[direction, number] = row

    def _problems(
        self, state: ForwardState, given: list[dict[str, Any]], row: list[dict[str, Any]], tried: dict[nn.Module, Any]
    ) -> Iterator[str]:
        for m, before, found in zip(self.norms, given, row, strict=True):
            times = int(found["num_batches_tracked"])
            replaced = any(found[name] is not before[name] for name in STATISTICS)
            written = max(found[name]._version for name in STATISTICS)  # PyTorch does not count its batch norm's writes
            by_itself = not self._streams and (
                replaced or (_counts(m) and written > 0) or not _is_usual(m, found, tried.get(m, ()))
            )
            if times > 1 or by_itself or (times == 0 and any(not _same(found[n], m._buffers[n]) for n in STATISTICS)):
                how = f"is used {times} times on one image" if times > 1 else "writes to its statistics by itself"
                yield (
                    f"a {type(m).__name__} {how}: the copies of a model that runs "
                    f"{self.where} cannot follow its running statistics; {self.instead}"
                )
        changed = [
            f"buffer {name} as it runs, which is no batch norm's"
            for name, buffer, before_it in self.others
            if not _same(buffer, before_it) or self.module.get_buffer(name) is not buffer
        ]
        changed += [
            f"attribute {path}{'.' * bool(path)}{name} as it runs"
            for path, name, value in state.written()
            if is_data(value)
        ]
        for what in [f"its {each}" for each in changed] + [
            f"{watch.words} as it runs" for watch in state.globals_written()
        ]:
            yield f"the model changes {what}: its copies {self.where} would differ; {self.instead}"

    @torch.no_grad()
    def apply(self, microbatches: Sequence[Microbatch]) -> None:
        """Update the statistics by all microbatches in order. Collective."""
        if not self.norms:
            return
        buffers: list[Any] = [
            (m.momentum, m.running_mean, m.running_var, m.num_batches_tracked if _counts(m) else None)
            for m in self.norms
        ]
        sizes = [1 + 2 * mean.numel() for _, mean, *_ in buffers]
        rows = torch.zeros(len(microbatches), sum(sizes), dtype=torch.float64, device=buffers[0][1].device)
        for row, microbatch in zip(rows, microbatches, strict=True):
            own = microbatch.replica == self.replica
            found = self._found.pop((microbatch.direction, microbatch.number), None) if own else None
            if found is not None and self.speaks.get(microbatch.direction):
                row.copy_(torch.cat([_flat(values) for values in found]))
        self.comm.all_reduce(rows)
        parts = [length for _, mean, *_ in buffers for length in (1, mean.numel(), mean.numel())]
        types = {mean.dtype for _, mean, *_ in buffers}
        starts = [start for start, _ in pairwise(accumulate(sizes, initial=0))]
        used = (rows[:, starts] != 0).tolist()
        for row, has in zip(rows, used, strict=True):
            of_type = {dtype: row.to(dtype).split_with_sizes(parts) for dtype in types}
            norms = [(3 * i, *found) for i, (found, mine) in enumerate(zip(buffers, has, strict=True)) if mine]
            if tracked := [times for *_, times in norms if times is not None]:
                torch._foreach_add_(tracked, 1)
            alike: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
            for at, momentum, mean, variance, times in norms:
                if momentum is None:
                    momentum = 0.0 if times is None else 1.0 / float(times)
                running, now = alike.setdefault(momentum, ([], []))
                running += (mean, variance)
                now += of_type[mean.dtype][at + 1 : at + 3]
            for factor, (running, now) in alike.items():
                torch._foreach_mul_(running, 1 - factor)
                torch._foreach_add_(running, now, alpha=factor)


def _tried(norm: Any, forward: Callable[..., Any], tried: dict[nn.Module, Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` of a norm of the user's, after a call with statistics and a momentum by which its formula shows.

    In `tried` are then the statistics that were there, those that it was called with, and what it made of them.
    """
    random, found = RandomStates.of_process(), dict(norm._buffers)
    given = {name: found[name] + 1 + found[name].abs() for name in STATISTICS}
    norm._buffers |= {name: value.clone() for name, value in (found | given).items()}
    norm.momentum /= 2
    with torch.no_grad():
        copies = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        pytree.tree_map_only(Tensor, local_part, forward(*copies[0], **copies[1]))  # looked at, as norms expect
    tried[norm] = [(found[name].clone(), given[name], norm._buffers[name]) for name in STATISTICS]
    norm.momentum *= 2
    norm._buffers |= found
    random.put()
    return forward(*args, **kwargs)


def _is_usual(norm: nn.Module, found: Mapping[str, Tensor], tried: Sequence[tuple[Tensor, ...]]) -> bool:
    """Whether a norm that made `found` of its statistics with momentum 1 made their means of others with half of it."""
    for name, (begun, given, made) in zip(STATISTICS, tried, strict=False):
        own, was = found[name], norm.get_buffer(name)
        off = ((given + own) / 2 - made).abs() > 0.01 * (given.abs() + own.abs())
        if begun.shape != was.shape or not _same(begun, was) or bool(off.any()):
            return False
    return True


def _counts(norm: nn.Module) -> bool:
    """Whether a norm counts its batches: instance norms have a buffer for that, but leave it at 0."""
    return not isinstance(norm, nn.modules.instancenorm._InstanceNorm)


def _flat(values: dict[str, Tensor]) -> Tensor:
    """How often a norm was used on a microbatch, the mean, the variance."""
    mean, variance, times = values["running_mean"], values["running_var"], values["num_batches_tracked"]
    return torch.cat([times.to(mean.dtype).view(1), mean, variance])


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers have the same values, numbers or none."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


UNLIKE_DRAWS = (
    "the model drew other random numbers on some ranks than on others that have tiles of the same images: call "
    "torch.manual_seed, random.seed and numpy.random.seed with the same seed on all ranks, and draw on all ranks or on "
    "none between steps, also where data is read"
)
GRADIENTS = ("backward", "input", "weight")


class BatchSource(Protocol):
    """The inputs of the first stage and the use of the last stage's outputs, for one batch."""

    @property
    def microbatches(self) -> Sequence[Microbatch]: ...

    def kind(self, microbatch: Microbatch) -> Any:
        """A key that is equal for microbatches whose values have the same shapes; known on all ranks."""

    def images(self, part: Part, microbatch: Microbatch) -> Any:
        """The images as the first stage takes them: a tensor, or what it streams."""

    def loss(self, part: Part, microbatch: Microbatch, outputs: Any) -> Tensor | None:
        """This rank's share of the objective; None if there is nothing to train."""


@dataclass
class Live:
    """The values of a microbatch between its forward and its backward, and which parameters it found `trained`."""

    roots: Sequence[GradientEdge]
    leaves: list[Tensor]
    weights: WeightGradients = field(default_factory=WeightGradients)
    trained: list[bool] = field(default_factory=list)


class Executor:
    """Runs tables over the stages that this rank holds. Collective; all ranks run the same tables in the same order.

    `context` surrounds every forward (autocast). `seed` is that of the random numbers that stages draw: they depend on
    the run, the stage and the microbatch, not on the rank, and not on the state of the process's generators. With
    `records`, `spans` are when this rank worked on which action in the last run, without its waits for other stages.
    `progress(doing)` is called after each action, and with what it does in words by stages that work for long. `drawn`
    is 0 until a model draws random numbers in `watching_draws`, and then the same on ranks that drew the same.
    """

    def __init__(
        self,
        stages: LocalStages,
        comm: Communicator,
        context: Callable[[], AbstractContextManager[Any]],
        seed: int,
        parameters: ReplicaGroups | None = None,
    ) -> None:
        self.stages, self.plan, self.parameters = stages, stages.plan, parameters
        self.context, self.seed = context, seed
        self.comm = comm.split(0)  # its messages meet no others
        self.num_runs = 0
        self.drawn = 0
        self._changed: set[int] = set()  # generators that the last run drew from, by their numbers
        self._drawn_from: set[int] = set()
        self.records = False
        self.progress: Callable[[str], None] = lambda doing: None
        self.spans: list[TimeSpan] = []
        self.before: dict[tuple[int, int], StageBoundary] = {}
        self.behind: dict[tuple[int, int], StageBoundary] = {}
        for (direction, stage), part in stages.parts.items():
            boundary = partial(StageBoundary, self.plan, self.comm, direction, grid=part.grid, device=stages.device)
            if stage > 0:
                self.before[direction, stage] = boundary(stage - 1, sends=False)
            if stage + 1 < self.plan.num_stages:
                self.behind[direction, stage] = boundary(stage, sends=True)
        self._statistics: dict[int, RunningStatistics] = {}
        self._watches = {stage: watches_of(module) for stage, module in stages.modules_of.items()}
        self._changing = {stage: _changing(module) for stage, module in stages.modules_of.items()}
        self.parameters_of = {stage: [*module.parameters()] for stage, module in stages.modules_of.items()}

    def run(self, table: Table, feed: BatchSource, problem: str | None = None) -> None:
        """Do this rank's row. With backwards in the table this is a step of training; else nothing is kept.

        All ranks refuse what is a `problem` of one of them.

        Of a microbatch that the feed has not, the batch having lost it, nothing is done but that all who hold a stage
        still make as many backward passes.
        """
        self._refuse(problem)
        row = undivided(table[self.comm.rank % self.plan.ranks_per_replica])
        training = any(action.kind in GRADIENTS for action in row)
        ends = {action.stage: position for position, action in enumerate(row) if action.kind in GRADIENTS}
        if self.records:
            self.comm.barrier()
        run = _Run(self, feed, training, defers={action.stage for action in row if action.kind == "weight"})
        if training and (self.plan.bidirectional or self.plan.local_batches):
            self._statistics = {stage: self._copies(stage) for stage in self.stages.modules_of}
        # Stages draw from streams of their own: the generators of the process, its user's, stay as they are.
        with torch.set_grad_enabled(training), forked(self._generators, enabled=self.draws_by_stream):
            for position, action in enumerate(row):
                run.expect(action)
                if position + 1 < len(row):
                    run.expect(row[position + 1])
                last = ends.get(action.stage) == position if action.kind in ("backward", "weight") else None
                with as_event(action), ExitStack() as stack:
                    if self.parameters is not None:
                        self.parameters.enter(stack, action.stage, self.plan.local_batches, last)
                    if run.has(action):
                        getattr(run, action.kind)(action)
                self.progress("")
        run.finish()
        self.spans = run.spans
        if self._statistics:
            self.comm.agree(next(filter(None, (each.problem for each in self._statistics.values())), None))
        for statistics in self._statistics.values():
            statistics.apply(feed.microbatches)
        self._statistics = {}
        self.num_runs += 1

    def forget_values(self) -> None:
        """Announce the values between stages again: other parameters are trained, so other values need gradients."""
        for boundary in (*self.before.values(), *self.behind.values()):
            boundary.forget()

    def _refuse(self, problem: str | None) -> None:
        """Stages are right as long as what their model's forward read of attributes and globals is as it was."""
        if self.plan.num_stages > 1 or self.stages.stream is not None:
            self.comm.agree(problem or next(self.stages.changes(), None))
        elif problem is not None:
            raise Refusal(problem)

    def _copies(self, stage: int) -> RunningStatistics:
        plan, rank = self.plan, self.comm.rank
        speaks = {d: plan.partners(rank, d, stage)[0] == rank for d in range(plan.num_directions)}
        module, holders = self.stages.modules_of[stage], self.stages.groups[stage]
        watches, streams = self._watches[stage], stage == 0 and self.stages.stream is not None
        return RunningStatistics(module, holders, speaks, plan.replica_of(rank), plan.local_batches, watches, streams)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Messages to other nodes go on behind each module that is called within this context, forward and backward."""
        if self.comm.node.probe is None:
            yield
            return
        handle = register_module_forward_hook(self._drive)
        try:
            yield
        finally:
            handle.remove()

    def _drive(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        drive = self.comm.node.drive
        drive()
        tensor = output.local if isinstance(output, SpatialTensor) else output
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda gradients: drive())

    @contextmanager
    def renewing(self, action: Action) -> Iterator[None]:
        """Buffers that this forward changes are other tensors behind it.

        Microbatches that wait for their backward pass keep those that they used, which a plain loop does not change
        before that either.
        """
        known = [(values, name, values[name]) for values, name in self._changing[action.stage]]
        before = [None if value is None else value._version for _, _, value in known]
        yield
        renewed: dict[int, Tensor] = {}
        for (values, name, value), version in zip(known, before, strict=True):
            if value is not None and value is values[name] and value._version != version:
                values[name] = renewed.setdefault(id(value), value.detach().clone())

    @property
    def _generators(self) -> list[torch.device]:
        return [self.stages.device] if self.stages.device.type == "cuda" else []

    @property
    def draws_by_stream(self) -> bool:
        """Whether stages draw from streams of their own.

        A plain stage draws from the generators of its process. Replicas with local batches would draw other numbers
        each.
        """
        return self.plan.num_stages > 1 or self.plan.local_batches

    @property
    def draws_together(self) -> bool:
        """Whether ranks share images and draw for them from the generators of their processes.

        Stages of several are seeded; ranks that share no image may draw as they like.
        """
        return not self.draws_by_stream and prod(self.plan.tiles[0]) * self.plan.tensor > 1

    def draw_alike(self) -> None:
        """Give ranks that draw together rank 0's states of Python's and NumPy's generators. Collective.

        Processes seed these two by chance, and unlike PyTorch's they have no part in the values of most models. Where
        all are seeded alike they stay as they are.
        """
        if not self.draws_together:
            return
        states = PythonStates.now()
        if len(set(self.comm.all_gather_object(states.digests()))) > 1:
            states = self.comm.broadcast_object(states)
            states.put()

    @contextmanager
    def watching_draws(self) -> Iterator[None]:
        """Add what is drawn within it, from generators that all ranks should have alike, to `drawn`. Collective.

        Raises:
            Refusal: those that the model is known to draw from are not alike; on all ranks, before they go on.
        """
        if not self.draws_together:
            yield
            return
        before = RandomStates.now(self._generators).digests()
        if self._drawn_from:  # the same on all ranks
            known = torch.tensor([before[i] for i in sorted(self._drawn_from)], dtype=torch.int64)
            most, less = self.comm.all_reduce(torch.cat([known, -known]), "max").chunk(2)
            if bool((most + less).any()):
                raise Refusal(UNLIKE_DRAWS)
        yield
        after = RandomStates.now(self._generators).digests()
        changed = [(i, new) for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        if changed:
            self.drawn = 1 + (crc32(repr((self.drawn, changed)).encode()) & 0xFFFF)
        self._changed = {i for i, _ in changed}

    def drew_alike(self) -> None:
        """All ranks know that they drew alike: from now on they look before a run, as draws may decide on messages."""
        self._drawn_from |= self._changed

    @contextmanager
    def drawing_alike(self, stream: Any) -> Iterator[None]:
        """Within this context, after a run, ranks draw the same numbers from one stream, others from another."""
        with forked(self._generators):
            self.begin_stream(stream)
            yield

    def begin_stream(self, stream: Any) -> None:
        """Begin a stream of random numbers of this run."""
        seed, device = hash((self.seed, self.num_runs, stream)) & (2**63 - 1), self.stages.device
        seed_host(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)


def _changing(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str]]:
    """Where the buffers of a stage are that its forward may change: not those of norms, or that others reach too."""
    hidden = {id(tensor) for child in module.children() for tensor in hidden_tensors(child)}
    return [
        (part._buffers, name)
        for part in module.modules()
        if not isinstance(part, Norm)
        for name, value in part._buffers.items()
        if id(value) not in hidden  # one that is None may be set later
    ]


class _Run:
    """One run of a table on this rank: what is live, what was posted, what is on its way."""

    def __init__(self, executor: Executor, feed: BatchSource, training: bool, defers: Collection[int]) -> None:
        self.executor, self.feed, self.training, self.defers = executor, feed, training, defers
        replica = executor.plan.replica_of(executor.comm.rank)
        self.microbatches = {(m.direction, m.number): m for m in feed.microbatches if m.replica == replica}
        self.live: dict[tuple[int, int, int], Live] = {}
        self.posted: set[Action] = set()
        self.sent: list[Pending] = []
        self.began = perf_counter()
        self.spans: list[TimeSpan] = []

    def has(self, action: Action) -> bool:
        return (action.direction, action.microbatch) in self.microbatches

    def microbatch(self, action: Action) -> Microbatch:
        return self.microbatches[action.direction, action.microbatch]

    def message(self, action: Action) -> StageMessage:
        modes = (self.training, self.executor.stages.training)  # in evaluation auxiliary heads hand nothing on
        return StageMessage((*modes, self.feed.kind(self.microbatch(action))), action.microbatch)

    def expect(self, action: Action) -> None:
        """Post the receives that an action waits for, ahead of time where their shapes are known."""
        if action in self.posted or action.kind == "weight" or not self.has(action):
            return
        back = action.kind != "forward"
        boundary = (self.executor.behind if back else self.executor.before).get((action.direction, action.stage))
        if boundary is not None and boundary.knows(self.message(action)):
            boundary.expect(self.message(action), back)
            self.posted.add(action)

    def forward(self, action: Action) -> None:
        executor, microbatch, message = self.executor, self.microbatch(action), self.message(action)
        place = action.direction, action.stage
        part, statistics = executor.stages.parts[place], executor._statistics.get(action.stage)
        before, behind = executor.before.get(place), executor.behind.get(place)
        arrival = before.receive(message) if before else Received((self.feed.images(part, microbatch),), [])
        live = Live((), arrival.leaves)
        if executor.draws_by_stream:  # ranks that share a stage draw alike, whatever each does in between
            executor.begin_stream((*action[1:], microbatch.replica) if executor.plan.local_batches else action[1:])
        deferred = live.weights.deferred() if action.stage in self.defers else nullcontext()
        over_ranks = (whole_gradients(part.grid), within_forward()) if part.grid.size > 1 else (nullcontext(),) * 2
        with self.timed(action), over_ranks[0], over_ranks[1]:
            renewing = executor.renewing(action) if self.training and executor.plan.num_stages > 1 else nullcontext()
            collecting: AbstractContextManager[None] = nullcontext()
            if statistics is not None:
                collecting = statistics.collect(microbatch.direction, microbatch.number)
            with collecting, renewing, executor.context(), deferred, executor.driving():
                outputs = part.module(*arrival.values)
                part.grid.halo_prefetch.flush()
            del arrival
            loss = self.feed.loss(part, microbatch, outputs) if behind is None else None
        if behind is None:
            # From an edge on, functions that backward calls are seen by what surrounds it; from a tensor they are not.
            live.roots = [] if loss is None or not loss.requires_grad else [get_gradient_edge(loss)]
        else:
            pending, live.roots = behind.send(message, outputs, part.outputs)
            self._keep(pending)
        if self.training:
            live.trained = [p.requires_grad for p in executor.parameters_of[action.stage]]
            self.live[action[1:]] = live

    def backward(self, action: Action) -> None:
        self.input(action)
        del self.live[action[1:]]

    def input(self, action: Action) -> None:
        live, place, message = self.live[action[1:]], (action.direction, action.stage), self.message(action)
        before, behind = self.executor.before.get(place), self.executor.behind.get(place)
        roots, gradients = live.roots, None if behind is None else behind.receive_back(message)
        if gradients is not None:
            roots = [root for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
            gradients = [gradient for gradient in gradients if gradient is not None]
        with self.timed(action), self._as_it_was(action):
            if roots:
                torch.autograd.backward(roots, gradients)
        live.roots = ()
        if before is not None:
            self._keep(before.send_back(message, live.leaves))
        live.leaves = []

    def weight(self, action: Action) -> None:
        with self.timed(action), self._as_it_was(action):
            self.live.pop(action[1:]).weights.compute()

    @contextmanager
    def _as_it_was(self, action: Action) -> Iterator[None]:
        """Within this context those parameters are trained that were so behind the forward pass of this microbatch.

        Later ones may have frozen some, of which autograd would drop the gradients.
        """
        parameters = self.executor.parameters_of[action.stage]
        others = [
            p for p, was in zip(parameters, self.live[action[1:]].trained, strict=True) if p.requires_grad is not was
        ]
        for p in others:
            p.requires_grad_(not p.requires_grad)
        yield
        for p in others:
            p.requires_grad_(not p.requires_grad)

    @contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        start = perf_counter()
        yield
        if self.executor.records:
            self.spans.append(TimeSpan(action, start - self.began, perf_counter() - self.began))

    def _keep(self, pending: Pending) -> None:
        """Sends never block; those that are complete are forgotten, with their buffers."""
        self.sent = [one for one in self.sent if not one.test()]
        self.sent.append(pending)

    def finish(self) -> None:
        Pending.all(self.executor.comm.node, self.sent).wait()
        assert not self.live
