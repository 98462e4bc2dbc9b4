"""Requests of operators to the norms before them, so that a norm's messages bring the halo that follows.

first step    norm: its statistics travel         relu     convolution: the halo of relu's result travels, and the
                                                            norm from which that came is asked to hold more
from then on  norm: its statistics travel, with   relu     convolution: nothing
              strips of its input, which are
              normalized like the rest

This happens on GPUs, which every message keeps waiting. Between ranks that share the memory of CPUs, the copies of a
tile cost more than the message (ResNet-50 on 2 x 2 tiles of 256 px: 4 %). The images of the first layer come with their
halo likewise. A norm whose result nobody looks at before the next norm is reached, as at the end of a parallel branch,
is computed together with that one, in one exchange, on any device.

All ranks run the same model and know each other's boxes, so all of them ask for the same, and none has to be told. A
request is a hint: a norm may hold more than anybody needs, and an operator that needs more fetches it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mpi4dl.geometry import AxisMap, Split, Tiling, cut_alike, widest

# A halo that is held is computed by all on its way: it has at most so many pixels, or is so many times smaller than the
# tile. Of so many sizes of images it is remembered.
ALWAYS_WORTH = 4
WORTH = 4
SIZES = 64

Holding = dict[Tiling, Tiling]  # what is to be held, by what is owned


class HaloSource(Protocol):
    """The source of a tensor, pixel by pixel or window by window, which may hold more on request."""

    def request_halo(self, tiling: Tiling) -> None:
        """From the next step on, let the tensor be held as this tiling, of its cuts, says."""


class Waiting(Protocol):
    """A norm that is to be computed."""

    def compute(self, waiting: Sequence[Any]) -> None:
        """Compute all of these, of which this is one, together."""


class HaloPrefetch:
    """The boxes to hold on one grid. With `steps` somebody says where one step ends and the next begins.

    With `everywhere` norms bring halos on CPUs too. `repeats`: all that runs, also within a backward pass, is a whole
    forward pass, which repeats the one before.
    """

    def __init__(self, repeats: bool = False) -> None:
        self.steps = self.everywhere = False
        self.repeats = repeats
        self._held: Any = WeakIdKeyDictionary()  # a `Holding` for each source, by what it is known by
        self._requested: Any = WeakIdKeyDictionary()  # the same, from the next step on
        self._between = False
        self._patient: Any = WeakIdKeyDictionary()  # norms that are not needed before the next one is reached
        self._unseen: Tensor | None = None  # the last norm, as long as nobody has looked at its result
        self._waiting: list[Waiting] = []

    def held(self, key: object | None, tiling: Tiling) -> Tiling:
        """The boxes to hold of the output of this source, of which ranks own those of `tiling`."""
        known = self._held.get(key) if key is not None else None
        return tiling if known is None else known.get(tiling, tiling)

    def request(self, key: object, tiling: Tiling, wanted: Tiling) -> None:
        if is_worth_holding(wanted):
            _widen(self._requested.setdefault(key, {}), tiling, wanted)

    def learned(self) -> Iterator[tuple[object, bool, Holding]]:
        """Of each source: whether it waits for the next one, and what it holds, by what ranks own."""
        for norm in WeakIdKeyDictionary([*self._held.items(), *self._patient.items()]):
            yield norm, norm in self._patient, self._held.get(norm, {})

    def learn(self, norm: Tensor, waits: bool, held: Holding) -> None:
        """Know what another one of the same grid had learned."""
        self._held[norm] = dict(held)
        if waits:
            self._patient[norm] = True

    def commit(self) -> None:
        """From now on all is held as it was asked for.

        Not while the graph of an earlier forward pass is to be computed again: it would find other shapes.
        """
        for key, requested in self._requested.items():
            for tiling, wanted in requested.items():
                _widen(self._held.setdefault(key, {}), tiling, wanted)
        self._requested.clear()
        self.flush()

    def can_wait(self, norm: Tensor | None) -> bool:
        """A norm is reached, known by its weight if any; whether it can wait for the next one."""
        if self._unseen is not None:
            self._patient[self._unseen] = True
        self._unseen = norm
        return norm is not None and norm in self._patient

    def seen(self, norm: Tensor) -> None:
        """Somebody looks at the result of a norm."""
        if self._unseen is norm:
            self._unseen = None

    def begin(self) -> None:
        """A step begins: nothing waits, whatever became of the one before."""
        self._waiting, self._unseen = [], None

    @property
    def waiting(self) -> bool:
        """Whether a norm is yet to be computed."""
        return bool(self._waiting)

    def wait(self, norm: Waiting) -> None:
        self._waiting.append(norm)

    def flush(self) -> None:
        """Compute what waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            waiting[0].compute(waiting)

    def enter(self) -> None:
        """An image is spread: a forward pass begins, if all before were followed by their backward passes."""
        self.flush()
        if self._between and not self.steps:
            self.commit()

    def passed(self, forward: bool) -> None:
        """Take note of a norm's forward, or backward, pass."""
        self._between = not forward


@dataclass(frozen=True, eq=False)
class Source:
    """The output of a norm, identified by its weight, or the images, identified by their grid.

    Ranks own of it what `tiling` says.
    """

    halo_prefetch: HaloPrefetch
    key: object
    tiling: Tiling

    def request_halo(self, tiling: Tiling) -> None:
        if cut_alike(tiling, self.tiling):
            self.halo_prefetch.request(self.key, self.tiling, tiling)


@dataclass(frozen=True, eq=False)
class OfWindows:
    """The output of windows over a tensor that ranks hold by `tiling`."""

    halo_source: HaloSource
    tiling: Tiling
    output: Tiling
    maps: tuple[tuple[int, AxisMap], ...]

    def request_halo(self, tiling: Tiling) -> None:
        if not cut_alike(tiling, self.output):
            return
        wanted = self.tiling
        for axis, axis_map in self.maps:
            split = self.tiling.splits[axis]
            needs = (axis_map.needs(rows, split.size) for rows in tiling.splits[axis].held)
            wanted = wanted.replace(axis, Split(split.cuts, tuple(needs)))
        self.halo_source.request_halo(widest(self.tiling, wanted))


def _widen(held: Holding, tiling: Tiling, wanted: Tiling) -> None:
    if tiling not in held and len(held) == SIZES:
        held.clear()
    held[tiling] = widest(held.get(tiling, tiling), wanted)


def is_worth_holding(tiling: Tiling) -> bool:
    """Whether halos are so small beside their tiles that earlier layers may compute them, too."""
    return all(
        held.length - split.owned(part).length <= max(ALWAYS_WORTH, split.owned(part).length // WORTH)
        for split in tiling.splits
        for part, held in enumerate(split.held)
    )
