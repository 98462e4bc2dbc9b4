"""Evaluation: the loss, metrics and outputs of many batches without training; what is put back after it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpi4dl.checkpoints.json_values import random_state, set_random_state
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine.batch import Computing, EvaluationFeed, Found, InputFeed, Size
from mpi4dl.geometry import Interval
from mpi4dl.parallel.inputs import Microbatch
from mpi4dl.parallel.pipeline.executor import UNLIKE_DRAWS
from mpi4dl.parallel.pipeline.local_stages import Part
from mpi4dl.parallel.spatial.sums import owned
from mpi4dl.tasks.formulas import SummedLoss, main_output
from mpi4dl.tasks.measuring import Measures, Value, joined

# Restored state: modes after an evaluation, and changes of a refused step besides gradients.


class Undo:
    """The buffers of `model`, the states of the random number generators, and how often `executor` ran, as they are."""

    def __init__(self, model: nn.Module, executor: Any) -> None:
        self._executor, self._num_runs = executor, executor.num_runs
        self._random = random_state()
        self._buffers = [
            (module._buffers, name, buffer, buffer._version, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def undo(self) -> None:
        for buffers, name, buffer, version, value in self._buffers:
            buffers[name] = buffer if buffer._version == version else buffer.copy_(value)
        set_random_state(self._random)
        self._executor.num_runs = self._num_runs


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


def measured_as_is(outputs: Any, targets: Any) -> Any:
    return main_output(outputs)


def evaluate(
    engine: Computing,
    batches: Iterable[tuple[Any, ...]],
    size: Size | None,
    metrics: Mapping[str, Any],
    measured: Callable[[Any, Any], Any],
) -> Evaluation:
    """The result of `Engine.evaluate`."""
    comm, summed = engine.comm, engine.loss if isinstance(engine.loss, SummedLoss) else None
    found = Found(Measures(metrics, measured), summed is not None and summed.whole_batch)
    engine.executor.drawn = 0
    with evaluating(engine.stages):
        for tiles, targets, *rest in batches:
            batch = EvaluationFeed(engine, tiles, targets, size, rest[0] if rest else None, found)
            with engine.executor.watching_draws():
                engine.executor.run(engine.evaluation_table(batch.num_microbatches), batch)
    if found.kept is not None:
        with comm.together(()), torch.no_grad():
            if found.kept:
                assert summed is not None
                found.sums = torch.stack([x.double() for x in summed.sums(*joined(found.kept))])
    sums = [] if found.sums is None else found.sums.tolist()
    drawn = engine.executor.drawn
    told = torch.tensor(
        [*sums, found.correct, found.undefined, float(found.classified), drawn, drawn**2], dtype=torch.float64
    )
    *sums, correct, undefined, classified, drawn, squared = comm.all_reduce(told).tolist()
    correct = math.nan if undefined else correct
    if drawn**2 != comm.size * squared:  # their variance is 0 if all ranks have the same
        raise Refusal(UNLIKE_DRAWS)
    engine.executor.drew_alike()
    loss = sum(total / weight for total, weight in zip(sums, found.weights, strict=True) if weight)
    values = found.measures.values(comm)
    return Evaluation(loss, correct / found.count if classified else None, found.count, values)


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


class OutputFeed(InputFeed):
    """A batch whose outputs are wanted: `pieces` are those of this rank, `spoke` for all if they are not dense."""

    def __init__(
        self,
        engine: Computing,
        tiles: Any,
        num_samples: int,
        size: Size | None,
        microbatches: Any,
        of: Callable[[Any], Tensor],
        first: int,
    ) -> None:
        super().__init__(engine, tiles, num_samples, size, microbatches)
        self.of, self.first = of, first
        self.pieces: list[OutputPiece] = []
        self.dense = False

    def loss(self, part: Part, microbatch: Microbatch, outputs: Any) -> None:
        with self.engine.autocast():
            wanted = self.of(outputs)
        if not isinstance(wanted, Tensor):
            raise ValueError(f"what `of` takes of the outputs is a {type(wanted).__name__}, but must be a tensor")
        found = owned(wanted, part.grid)
        self.dense = wanted.dim() > 2
        if found.counts and (found.values.numel() or not self.dense):
            begin = self.first + microbatch.samples.start
            samples = slice(begin + found.where[0].start, begin + found.where[0].stop)
            values = found.values.detach().cpu()
            self.pieces.append(OutputPiece((samples, *found.where[1:]), values))


def predict(
    engine: Computing, batches: Iterable[Any], size: Size | None, of: Callable[[Any], Tensor]
) -> Iterator[BatchOutputs]:
    """The result of `Engine.predict`."""
    comm = engine.comm
    first = 0
    for given in batches:
        tiles, count, *rest = (given, len(given)) if isinstance(given, Tensor) else given
        batch = OutputFeed(engine, tiles, count, size, rest[0] if rest else None, of, first)
        engine.executor.drawn = 0
        with evaluating(engine.stages), engine.executor.watching_draws():
            engine.executor.run(engine.evaluation_table(batch.num_microbatches), batch)
        numbers = Interval(first, first + batch.num_samples)
        first = numbers.stop
        drawn = engine.executor.drawn
        told = torch.tensor([bool(batch.pieces) * (comm.rank + 1), batch.dense, drawn, -drawn])
        speaker, dense, most, least = comm.all_reduce(told, "max").tolist()
        if most != -least:
            raise Refusal(UNLIKE_DRAWS)
        engine.executor.drew_alike()
        pieces = tuple(batch.pieces)
        if not dense and speaker > 1:  # outputs of the whole image, of a last stage without rank 0
            if comm.rank == speaker - 1:
                comm.isend_object(pieces, 0).wait()
            pieces = comm.recv_object(speaker - 1) if comm.rank == 0 else ()
        yield BatchOutputs(numbers, pieces, comm, bool(dense))
