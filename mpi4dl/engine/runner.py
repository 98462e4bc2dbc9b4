"""The runner: a model and a plan become `predict()` and `evaluate()`, forward only and exact for any plan.

tiles -> stages, by the plan's table -> outputs, alike on every rank of the last stage -> loss and metrics
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.comm.exchange import functions_behind
from mpi4dl.comm.streams import carried
from mpi4dl.engine.precision import AUTOCAST
from mpi4dl.geometry import BATCH, Interval, Split, Tiling, even_cuts
from mpi4dl.parallel import spatial
from mpi4dl.parallel.inputs import Microbatch, OwnSizes, Read, Sizes, size_of
from mpi4dl.parallel.pipeline.decisions import fingerprint
from mpi4dl.parallel.pipeline.executor import UNLIKE_DRAWS, Executor
from mpi4dl.parallel.pipeline.local_stages import LocalStages, Part
from mpi4dl.parallel.pipeline.program import leaves
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas.buckets import digest_of
from mpi4dl.parallel.replicas.optimizer_traits import modules_of
from mpi4dl.parallel.spatial.sums import owned
from mpi4dl.parallel.spatial.tensor import local_part
from mpi4dl.parallel.tables.schedules import Table
from mpi4dl.tasks.formulas import SummedLoss, main_output
from mpi4dl.tasks.measuring import Measures, Value, joined

if TYPE_CHECKING:
    from mpi4dl.parallel.streaming.stream_tiles import ImageSource

Tile: TypeAlias = "Tensor | ImageSource"
Tiles: TypeAlias = "Tensor | Sequence[Tile]"
Size = tuple[int, ...]
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Over `count` samples: the loss, `metrics` by name, and the `accuracy`, None where targets are not classes (N,).

    Accuracy and metrics are NaN if some output is.

    The loss is the mean over the samples of what each batch has, or, of a loss that knows its sums and weights, that
    of all samples as if they were one batch.
    """

    loss: float
    accuracy: float | None
    count: int
    metrics: dict[str, Value] = field(default_factory=dict)


class OutputPiece(NamedTuple):
    """Some of the outputs of all samples: `values` are whole[where], whose first dim counts samples from 0."""

    where: tuple[slice, ...]
    values: Tensor


@dataclass(frozen=True)
class BatchOutputs:
    """The outputs of the samples with these `numbers`, counted from 0 over all batches, none of them twice.

    `pieces` are this rank's. Of logits (N, C), and what has fewer dims, rank 0 has all; others are `dense`: each rank
    of the last stage has its tile, and nobody more.
    """

    numbers: Interval
    pieces: tuple[OutputPiece, ...]
    comm: Communicator
    dense: bool

    @property
    def whole(self) -> Tensor | None:
        """(samples, ...) on rank 0, of outputs that are not dense, or of all where it is alone; None elsewhere."""
        if not self.pieces or (self.dense and self.comm.size > 1):
            return None
        return torch.cat([piece.values for piece in self.pieces])

    def write(self, array: Any) -> None:
        """Put this rank's pieces into what takes `array[where] = values` of NumPy: a memory map, a Zarr or HDF5 file.

        `array` has the shape of the outputs of all samples, and may be a file that all ranks have open.
        """
        for where, values in self.pieces:
            array[where] = values.numpy()

    def extent(self) -> tuple[int, ...]:
        """The size of dense outputs of a sample, the largest along each dim; () of nothing. Collective."""
        every = [where[1:] for of_rank in self.comm.all_gather_object([w for w, _ in self.pieces]) for where in of_rank]
        return tuple(max(cut.stop for cut in cuts) for cuts in zip(*every, strict=True))

    def bands(self, height: int) -> Iterator[OutputPiece]:
        """Dense outputs on rank 0, sample by sample, each from top to bottom in bands (1, .., rows, W) of up to so many
        rows: no rank ever has more than that. Rows are the dim before the last; others yield nothing. Collective.
        """
        shapes = [(where, values.dtype) for where, values in self.pieces]
        of_ranks = self.comm.all_gather_object(shapes)
        every = [where for shapes in of_ranks for where, _ in shapes]
        if not every:
            return
        whole = [slice(0, max(where[dim].stop for where in every)) for dim in range(len(every[0]))]
        dtype = next(dtype for shapes in of_ranks for _, dtype in shapes)
        for number in range(*self.numbers):
            for top in range(0, whole[-2].stop, height):
                band = whole.copy()
                band[0], band[-2] = slice(number, number + 1), slice(top, min(top + height, whole[-2].stop))
                found = self._band(tuple(band), [[where for where, _ in shapes] for shapes in of_ranks], dtype)
                if found is not None:
                    yield OutputPiece(tuple(band), found)

    def _band(
        self, band: tuple[slice, ...], of_ranks: list[list[tuple[slice, ...]]], dtype: torch.dtype
    ) -> Tensor | None:
        own = [
            (common, values[_within(common, where)]) for where, values in self.pieces if (common := _both(where, band))
        ]
        if self.comm.rank:
            if own:
                self.comm.isend_object(own, 0).wait()
            return None
        target = torch.zeros([cut.stop - cut.start for cut in band], dtype=dtype)
        for rank, places in enumerate(of_ranks):
            if any(_both(where, band) for where in places):
                for common, values in self.comm.recv_object(rank) if rank else own:
                    target[_within(common, band)] = values
        return target


def _both(a: tuple[slice, ...], b: tuple[slice, ...]) -> tuple[slice, ...] | None:
    """Where both are; None if nowhere."""
    found = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return found if all(cut.start < cut.stop for cut in found) else None


def _within(inner: tuple[slice, ...], outer: tuple[slice, ...]) -> tuple[slice, ...]:
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(inner, outer, strict=True))


def spread(part: Part, tile: Tensor, microbatch: Microbatch, size: Size, device: torch.device) -> Tensor:
    """A tile, such as (n, C, h, w), of images of `size` on this device, as part of the whole microbatch."""
    if part.plain:
        return carried(tile, device)
    space = part.grid.shape.space
    samples = Split.at([cut - microbatch.cuts[0] for cut in microbatch.cuts])
    cuts = (Split.at(even_cuts(pixels, n)) for pixels, n in zip(size[-len(space) :], space, strict=True))
    return spatial.from_tiling(tile, part.grid, Tiling.of_images(part.grid.shape, (samples, *cuts)), device)


def settled(outputs: Any) -> Any:
    """Outputs with those whole that differ only along the batch, such as logits; dense ones stay spread."""

    def of(x: Any) -> Any:
        small = isinstance(x, spatial.SpatialTensor) and all(dim is None for dim in x.layout.dims[BATCH + 1 :])
        return spatial.gather(x) if small else x

    return pytree.tree_map(of, outputs)


def _whole(outputs: Any) -> Any:
    """Outputs on every rank, whole."""
    return pytree.tree_map(lambda x: spatial.gather(x) if isinstance(x, spatial.SpatialTensor) else x, outputs)


class Given(NamedTuple):
    """A batch as the user gives it: this rank's tiles, the size of the images, and how it is divided."""

    tiles: Tiles
    size: Sizes | None
    microbatches: Sequence[Microbatch] | None

    @classmethod
    def of(cls, tiles: Tiles, size: Sizes | None, rest: Sequence[Any]) -> "Given":
        """`rest` has the microbatches and `OwnSizes` of the batch, where they were given."""
        own = next((each for each in rest if isinstance(each, OwnSizes)), None)
        return cls(tiles, own or size, next((each for each in rest if each is not own), None))


class InputFeed:
    """A batch of `num_samples` on its way into the stages: the tiles that this rank reads of it."""

    def __init__(self, runner: "Runner", given: Given, num_samples: int, training: bool = False) -> None:
        self.runner, plan, (tiles, size, microbatches) = runner, runner.plan, given
        tiles = [tiles] if isinstance(tiles, Tensor) else list(tiles)
        if size is None and plan.ranks_per_replica == 1 and tiles:
            size = tuple(tiles[0].shape[2:])
        if size is None:
            raise ValueError(f"{plan} cuts images: pass their size, such as (height, width)")
        self.size = size
        self.microbatches = tuple(plan.divide(num_samples, training) if microbatches is None else microbatches)
        self.num_samples = self.microbatches[-1].samples.stop
        reads = plan.reads(runner.comm.rank, self.microbatches, size)
        if len(reads) != len(tiles):
            raise ValueError(
                f"this rank reads {len(reads)} tiles of a batch, but {len(tiles)} were passed: see `reads`"
            )
        self.tiles = {(r.microbatch.direction, r.microbatch.number): tile for r, tile in zip(reads, tiles, strict=True)}

    @property
    def num_microbatches(self) -> int:
        """Of an evaluation, whose microbatches have one direction."""
        return 1 + max(microbatch.number for microbatch in self.microbatches)

    def kind(self, microbatch: Microbatch) -> Any:
        return (size_of(self.size, microbatch), microbatch.counts)

    def images(self, part: Part, microbatch: Microbatch) -> Any:
        tile = self.tiles.pop((microbatch.direction, microbatch.number))
        return self.runner.images(part, tile, microbatch, size_of(self.size, microbatch))


class Terms(NamedTuple):
    """A microbatch's share of the terms of a loss, and their factors in the loss of the batch."""

    sums: Sequence[Tensor]
    factors: Sequence[float]


UNLIKE_TARGETS = (
    "the ranks were given the targets of other batches: pass those of the whole batch on all ranks, skip a batch on "
    "all of them or on none, and seed the order of samples alike"
)


def refuse_unlike(told: Sequence[float], size: float, words: Sequence[str]) -> None:
    """Refuse numbers that differ between `size` ranks: `told` are their sums, then those of their squares."""
    for total, square, why in zip(told, told[len(told) // 2 :], words, strict=False):
        if total**2 != size * square:  # their variance is 0 if all ranks have the same
            raise Refusal(why)


def terms_of(loss: Loss, outputs: Any, targets: Any) -> Sequence[Tensor]:
    """The terms of a loss: its sums, or the number that another one is. Raises ValueError for what is no number."""
    if isinstance(loss, SummedLoss):
        return loss.sums(outputs, targets)
    found = loss(outputs, targets)
    if not isinstance(found, Tensor):
        raise ValueError(f"the loss must be a tensor of one number, but is a {type(found).__name__}")
    if found.numel() != 1:
        raise ValueError(f"the loss must be one number, but has shape {tuple(found.shape)}: take its mean")
    return [found.reshape(())]


class BatchFeed(InputFeed):
    """A batch with its targets: what this rank feeds in, and the loss that it finds at the end.

    `total` is the loss of the batch on the one rank that counts it, and 0 on others. A loss that knows of sums has a
    term for each of `weights`; the mean over the samples of any other is one term. In training the objective is the
    loss times `scale`; None: nothing is trained. `digest` is equal on ranks that have the same targets, and so is
    `own`, the loss that this rank has computed, on those that have one.
    """

    def __init__(self, runner: "Runner", given: Given, targets: Any, scale: float | None = None) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor)]
        num_samples = tensors[0].shape[0] if tensors and tensors[0].dim() else len(targets)
        super().__init__(runner, given, num_samples, scale is not None)
        if runner.loss is None:
            raise ValueError("there is no loss: pass one to Runner, or call predict()")
        self.targets, self.scale, self.loss_of = targets, scale, runner.loss
        self.total = torch.zeros((), dtype=torch.float64, device=runner.device)
        self.own, self.has_loss = torch.zeros_like(self.total), False
        # Of those on the host: a GPU would be waited for.
        self.digest = 0 if runner.plan.local_batches else digest_of(x for x in tensors if x.device.type == "cpu")
        self.summed = runner.loss if isinstance(runner.loss, SummedLoss) else None
        self.weights = [float(self.num_samples)] if self.summed is None else [*self.summed.weights(targets)]

    def loss(self, part: Part, microbatch: Microbatch, outputs: Any) -> Tensor | None:
        """The share of this rank in the loss of the batch: dense outputs stay spread over the ranks."""
        outputs, targets, before = settled(outputs), self.targets_of(microbatch.samples), self._kept_by_loss()
        with self.runner.autocast():
            terms = self._terms(outputs, targets, microbatch.samples.length)
        if self._kept_by_loss() != before:
            raise ValueError(
                "the loss keeps something for its next call, but with `bidirectional` two ranks call it in turns, each "
                "one its own: leave out `bidirectional`"
            )
        if part.grid.rank == 0:
            self.add(terms)
        if self.scale is None:
            self.see(part, outputs, targets)
            return None
        loss = sum(total * factor for total, factor in zip(*terms, strict=True))
        assert isinstance(loss, Tensor)
        if not self.runner.plan.bidirectional and not self.runner.plan.local_batches:
            self.own, self.has_loss = self.own + loss.detach(), True
        if self.runner.comm.size > 1:
            self._refuse_weights(loss, outputs, part)
        return loss * (self.scale / part.grid.size)

    def _kept_by_loss(self) -> Any:
        """The attributes and buffers of a loss of which two ranks have copies, for a comparison."""
        if not self.runner.plan.bidirectional:
            return None
        modules = self.loss_of.modules() if isinstance(self.loss_of, nn.Module) else [self.loss_of]
        return [fingerprint(getattr(each, "__dict__", None)) for each in modules]

    def _refuse_weights(self, loss: Tensor, outputs: Any, part: Part) -> None:
        """Refuse a loss with weights of which a rank has a part of the gradient, or not all that the loss needs."""
        own = [*_leaves_beside(outputs, loss)]
        stages, modules = self.runner.plan.num_stages, modules_of(part.module) if own else []
        known = {id(p) for module in modules for p in dict.values(module._parameters)}  # also parts, as they are
        for leaf in own:
            if stages > 1 or id(leaf) not in known:
                what = "a weight of the model" if id(leaf) in known else "a tensor of its own that wants a gradient"
                why = "a rank has some stages alone" if id(leaf) in known else "each rank would have a part of it"
                raise (Refusal if stages == 1 else ValueError)(  # others of several stages compute no loss
                    f"the loss uses {what}, of shape {tuple(leaf.shape)}, but {why}: let the model have it, and return "
                    "what the loss needs of it"
                )

    def _terms(self, outputs: Any, targets: Any, num_samples: int) -> Terms:
        terms = terms_of(self.loss_of, outputs, targets)
        if self.summed is not None:
            return Terms(terms, [1 / each if each else 0.0 for each in self.weights])
        return Terms(terms, [num_samples / self.num_samples if len(self.microbatches) > 1 else 1.0])

    def add(self, terms: Terms) -> None:
        for total, factor in zip(*terms, strict=True):
            self.total += total.detach().double() * factor

    def see(self, part: Part, outputs: Any, targets: Any) -> None:
        """Look at the outputs of an evaluation."""

    def targets_of(self, samples: Interval) -> Any:
        def of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return carried(leaf if len(self.microbatches) == 1 else leaf[slice(*samples)], self.runner.device)

        return pytree.tree_map(of, self.targets)


def _leaves_beside(outputs: Any, loss: Tensor) -> Iterator[Tensor]:
    """The tensors that want a gradient and that the loss uses beside outputs."""
    own = [local_part(y) for y in leaves(outputs) if isinstance(y, Tensor)]  # some are weights that the model returns
    of_outputs = {y.grad_fn for y in own}
    for function in functions_behind([loss], of_outputs.__contains__):
        leaf = None if function in of_outputs else getattr(function, "variable", None)
        if leaf is not None and not any(leaf is y for y in own):
            yield leaf


class Found:
    """Results of an evaluation so far: `kept` are outputs and targets of a loss of all samples at once."""

    def __init__(self, measures: Measures, whole_batch: bool) -> None:
        self.measures = measures
        self.kept: list[Any] | None = [] if whole_batch else None
        self.count, self.correct, self.classified, self.digest = 0, 0, False, 0
        self.undefined = 0  # batches with outputs that are not numbers
        self.weights: list[float] = []
        self.sums: Tensor | None = None


class EvaluationFeed(BatchFeed):
    """A batch that is evaluated: its sums go to `found`, and its outputs to the metrics."""

    def __init__(self, runner: "Runner", given: Given, targets: Any, found: Found) -> None:
        super().__init__(runner, given, targets)
        self.found = found
        found.digest = 31 * found.digest + self.digest & 0xFFF
        found.count += self.num_samples
        found.weights = [a + b for a, b in zip(found.weights or [0.0] * len(self.weights), self.weights, strict=True)]
        if found.sums is None:
            found.sums = torch.zeros(len(self.weights), dtype=torch.float64, device=runner.device)

    def _terms(self, outputs: Any, targets: Any, num_samples: int) -> Terms:
        if self.found.kept is None:
            return super()._terms(outputs, targets, num_samples)
        return Terms([], [])  # of all samples at once, when they are there

    def add(self, terms: Terms) -> None:
        samples = self.num_samples if self.summed is None else 1
        for number, total in enumerate(terms.sums):
            factor = terms.factors[number] * samples if self.summed is None else 1.0
            assert self.found.sums is not None
            self.found.sums[number] += total.detach().double() * factor

    def see(self, part: Part, outputs: Any, targets: Any) -> None:
        found, logits, speaks = self.found, main_output(outputs), part.grid.rank == 0
        if found.kept is not None:
            whole = _whole(outputs)  # the loss of all samples is computed by one rank alone
            if speaks:
                found.kept.append((whole, targets))
        if all(isinstance(x, Tensor) for x in (logits, targets)):
            found.classified = logits.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point()
        if found.classified:  # ranks may share the classes: all of them look
            classes, undefined = (spatial.gather(x) for x in (logits.argmax(1), logits.isnan().any()))
            if speaks:
                found.correct += int((classes == targets).sum())
                found.undefined += int(undefined)  # of which argmax makes a class
        found.measures.update(part.grid, outputs, targets)


class OutputFeed(InputFeed):
    """A batch whose outputs are wanted: `pieces` are those of this rank, `of(outputs)` is taken of them.

    `first` is the number of its first sample, counted over all batches.
    """

    def __init__(
        self, runner: "Runner", given: Given, num_samples: int, of: Callable[[Any], Tensor], first: int
    ) -> None:
        super().__init__(runner, given, num_samples)
        self.of, self.first = of, first
        self.pieces: list[OutputPiece] = []
        self.dense = False

    def loss(self, part: Part, microbatch: Microbatch, outputs: Any) -> None:
        with self.runner.autocast():
            wanted = self.of(outputs)
        if not isinstance(wanted, Tensor):
            raise ValueError(f"what `of` takes of the outputs is a {type(wanted).__name__}, but must be a tensor")
        found = owned(wanted, part.grid)
        self.dense = wanted.dim() > 2
        if found.counts and (found.values.numel() or not self.dense):
            begin = self.first + microbatch.samples.start
            samples = slice(begin + found.where[0].start, begin + found.where[0].stop)
            values = found.values.detach().cpu()
            if values.dtype in (torch.bfloat16, torch.float16):  # NumPy has no bfloat16
                values = values.float()
            self.pieces.append(OutputPiece((samples, *found.where[1:]), values))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context all modules are in evaluation mode; then each is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def measured_as_is(outputs: Any, targets: Any) -> Any:
    return main_output(outputs)


class Runner:
    """Runs `model` by `plan`, forward only, as one device would on the whole images and the whole batch.

    `model` is an unmodified nn.Module, the same on every rank, whose values on rank 0 count; or, for a plan of several
    stages, what `mpi4dl.parallel.cut.split` returns. `loss(outputs, targets)` is the mean over the samples that it is
    given: a whole microbatch; one with `sums` and `weights` (`tasks.formulas.SummedLoss`) adds up to that of the whole
    batch instead. `evaluate` needs one. `precision` is "fp32" (the model's own dtype), "bf16" or "fp16" (autocast).
    Halos are fetched by each "layer", or at the entry of each "block", as `halo` says. Collective.

    Raises:
        Refusal: on all ranks: they were given different models or settings, or what cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss: Loss | None = None,
        *,
        comm: Communicator,
        precision: str = "fp32",
    ) -> None:
        self._place(model, plan, loss, comm, precision)
        self._share_values()

    def _place(self, model: nn.Module, plan: Plan, loss: Loss | None, comm: Communicator, precision: str) -> None:
        """Take this rank's stages, once all ranks have agreed on the model. No value of it is touched. Collective."""
        self.model, self.plan, self.loss, self.comm = model, plan, loss, comm
        with comm.together((ValueError,)):
            if precision not in AUTOCAST:
                raise ValueError(f"precision is {precision!r}, but must be one of {', '.join(AUTOCAST)}")
        self._dtype = AUTOCAST[precision]
        comm.agree(None, plan=plan)  # by which ranks form groups
        self.stages = stages = model if isinstance(model, LocalStages) else LocalStages.whole(model, plan, comm)
        self.device = stages.device
        with comm.together((ValueError,)):
            described = [
                (name, shape, str(dtype), name in stages.trained) for name, (shape, dtype) in stages.shapes.items()
            ]
            digest = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
        comm.agree(None, model=digest, balance=stages.counts, precision=precision)

    def _share_values(self) -> None:
        """Give all ranks the values of the first holders, and make what runs the stages. Collective."""
        comm, stages = self.comm, self.stages
        for together in stages.together:
            for _, p in together.parameters:
                together.comm.broadcast(p.data)
        for stage, module in stages.modules_of.items():
            for buffer in module.buffers():
                stages.groups[stage].broadcast(buffer.data)
        self._streamed: Callable[..., Any] | None = None
        if stages.stream is not None:
            from mpi4dl.parallel.streaming.leading_part import StreamedImages

            self._streamed = StreamedImages
        self.executor = Executor(stages, comm, self.autocast, comm.broadcast_object(torch.initial_seed()))
        self.executor.draw_alike()
        self._evaluation_table = cache(self.plan.evaluation_table)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model and the loss compute in the runner's precision."""
        return nullcontext() if self._dtype is None else torch.autocast(self.device.type, self._dtype)

    def reads(self, num_samples: int, size: Sizes, training: bool = True) -> tuple[Read, ...]:
        """Which boxes of a batch this rank passes in `training`, or to `evaluate`.

        `size` is that of all images, such as (H, W), or `OwnSizes`.
        """
        return self.plan.reads(self.comm.rank, self.plan.divide(num_samples, training), size)

    def images(self, part: Part, tile: Tile, microbatch: Microbatch, size: Size) -> Any:
        """A tile, such as (n, C, h, w), of images of `size` on this rank's device, as part of the whole microbatch.

        Images that are streamed stay where they are.
        """
        if self._streamed is not None and part.stage == 0:
            samples = Split.at([cut - microbatch.cuts[0] for cut in microbatch.cuts])
            return self._streamed(tile, part.grid, samples, size, self.executor.progress)
        assert isinstance(tile, Tensor)
        return spread(part, tile, microbatch, size, self.device)

    def _run(self, table: Table, batch: BatchFeed | OutputFeed, problem: str | None = None) -> None:
        """Run a table, unless some rank has a `problem`.

        With local batches, what one replica refuses all ranks refuse: they share no image.
        """
        with self.comm.together((Refusal,)) if self.plan.local_batches else nullcontext():
            self.executor.run(table, batch, problem)

    def evaluate(
        self,
        batches: Iterable[tuple[Any, ...]],
        size: Size | None = None,
        metrics: Mapping[str, Any] | None = None,
        measured: Callable[[Any, Any], Any] = measured_as_is,
    ) -> Evaluation:
        """Loss, accuracy and metrics over batches, without training; all modules are in evaluation mode meanwhile.

        A batch is (tiles, targets of the whole batch), as for `Engine.step`, or (tiles, targets, microbatches). A last
        member of `OwnSizes` goes before `size`.
        Metrics, by name, are objects of torchmetrics, or of your own with `update(predictions, targets)` and
        `compute()`, classes of such, or functions of all predictions and targets. `measured(outputs, targets)` are the
        predictions, such as `Task.measured`; by itself the main output. Of dense outputs each rank adds its tile.
        """
        comm, executor = self.comm, self.executor
        summed = self.loss if isinstance(self.loss, SummedLoss) else None
        found = Found(Measures(metrics or {}, measured), summed is not None and summed.whole_batch)
        executor.drawn = 0
        with evaluating(self.stages), comm.going_on():
            for tiles, targets, *rest in batches:
                batch = EvaluationFeed(self, Given.of(tiles, size, rest), targets, found)
                with executor.watching_draws():
                    self._run(self._evaluation_table(batch.num_microbatches), batch)
        if found.kept is not None:
            if self.plan.local_batches:
                of_ranks = comm.all_gather_object(found.kept)
                found.kept = [] if comm.rank else [each for kept in of_ranks for each in kept]
            with comm.together(()), torch.no_grad():
                if found.kept:
                    assert summed is not None
                    found.sums = torch.stack([x.double() for x in summed.sums(*joined(found.kept))])
        sums = [] if found.sums is None else found.sums.tolist()
        alike = executor.drawn, found.digest
        told = [*sums, found.correct, found.undefined, found.classified, *alike, *(n**2 for n in alike)]
        total = comm.all_reduce(torch.tensor(told, dtype=torch.float64)).tolist()
        *sums, correct, undefined, classified = total[: -2 * len(alike)]
        correct = math.nan if undefined else correct
        refuse_unlike(total[-2 * len(alike) :], comm.size, (UNLIKE_DRAWS, UNLIKE_TARGETS))
        executor.drew_alike()
        # Of nothing that counts it is not a number, as in PyTorch.
        loss = sum(total / weight if weight else math.nan for total, weight in zip(sums, found.weights, strict=True))
        values = found.measures.values(comm)
        return Evaluation(loss, correct / found.count if classified else None, found.count, values)

    def predict(
        self, batches: Iterable[Any], size: Sizes | None = None, of: Callable[[Any], Tensor] = main_output
    ) -> Iterator[BatchOutputs]:
        """The outputs for batches of images, one by one, without training; all ranks take all of them. Collective.

        A batch is (tiles, number of its samples), or (tiles, number, microbatches), or, on one rank, just the images.
        A last member of `OwnSizes` goes before `size`.
        `of(outputs)` is what is wanted of them, such as `Task.predictions`; by itself the main output.
        """
        comm, executor, first = self.comm, self.executor, 0
        for given in batches:
            tiles, count, *rest = (given, len(given)) if isinstance(given, Tensor) else given
            batch = OutputFeed(self, Given.of(tiles, size, rest), count, of, first)
            executor.drawn = 0
            with evaluating(self.stages), comm.going_on(), executor.watching_draws():
                self._run(self._evaluation_table(batch.num_microbatches), batch)
            numbers = Interval(first, first + batch.num_samples)
            first, drawn = numbers.stop, executor.drawn
            told = torch.tensor([bool(batch.pieces) * (comm.rank + 1), batch.dense, drawn, -drawn])
            speaker, dense, most, least = comm.all_reduce(told, "max").tolist()
            if most != -least:
                raise Refusal(UNLIKE_DRAWS)
            executor.drew_alike()
            pieces = tuple(batch.pieces)
            if not dense and self.plan.local_batches:
                of_ranks = comm.all_gather_object(pieces)
                every = sorted((each for own in of_ranks for each in own), key=lambda each: each.where[0].start)
                pieces = () if comm.rank else tuple(every)
            elif not dense and speaker > 1:  # outputs of the whole image, of a last stage without rank 0
                if comm.rank == speaker - 1:
                    comm.isend_object(pieces, 0).wait()
                pieces = comm.recv_object(speaker - 1) if comm.rank == 0 else ()
            yield BatchOutputs(numbers, pieces, comm, bool(dense))
