"""Maps of models that see whole images: how much each cell of the last feature map counts for a class.

    images -> ... -> last feature map A (N, C, h, w) -> pooling ... -> logit z of the class
                                   |________________________________|
                                     gradients of z begin here: all before has the memory of inference

A cell is what the model has of a square of pixels. Its value is the sum over channels of A * dz/dA: HiResCAM (Draelos
and Carin 2020, https://arxiv.org/abs/2011.08891). Behind global average pooling and a linear layer it is CAM (Zhou et
al. 2016). Behind global max pooling only those cells count that are the largest of a channel.

Input gradients (Simonyan et al. 2013) are |dz/dx| of the pixels, summed over channels and averaged over squares.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from mpi4dl.comm import Refusal
from mpi4dl.comm.exchange import within_forward
from mpi4dl.geometry import ceil_div
from mpi4dl.parallel.pipeline.stage import Stage, StreamedPrefix, enter
from mpi4dl.parallel.spatial import SpatialTensor, gather
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.tensor import owned
from mpi4dl.tasks.formulas import main_output

GRADIENT_CELL_PX = 32
IMAGE_DIMS = 4  # of a batch of pictures or feature maps
OFF = 2  # cells, by which layers without padding make a feature map smaller


@dataclass(frozen=True)
class CellOptions:
    """What is mapped: `kind` is activation or gradient, of the class with this number, or the predicted one.

    `layer` names the module whose output is the feature map; None: the last tensor that has rows and columns.
    """

    kind: str = "activation"
    number: int | None = None
    layer: str | None = None


class CellMap(NamedTuple):
    """The values (h, w) of the cells of an image, each of `side` x `side` pixels, and the class that they count for."""

    values: Tensor
    side: float
    number: int


def side_of_cells(size: Sequence[int], cells: Sequence[int]) -> float:
    """How many pixels wide the cells of a feature map of `cells` (h, w) are, of an image of `size` (H, W).

    It is a power of two if one fits, where sizes that it does not divide were rounded up or down, or else a whole
    number. If none fits, as of layers without padding, it is the nearest power of two, or the ratio of the sizes.
    """
    axes = [*zip(size, cells, strict=True)]
    most = 2 * max(ceil_div(pixels, count) for pixels, count in axes)
    powers = [1 << exponent for exponent in range(most.bit_length())]
    for sides in (powers, [most // 2], range(1, most + 1)):
        for rounded in (ceil_div, lambda pixels, side: pixels // side):
            for side in sides:
                if all(rounded(pixels, side) == count for pixels, count in axes):
                    return float(side)
    off = {side: max(abs(pixels / side - count) for pixels, count in axes) for side in powers}
    nearest = min(powers, key=lambda side: off[side])
    ratio = math.prod(pixels / count for pixels, count in axes) ** 0.5
    return float(nearest) if off[nearest] <= OFF else ratio


class CellMaps:
    """Watches a model predict, and maps the cells of each image: `with maps.watching(size): model(...)`.

    `maps.of(outputs)` is to be called with the model's outputs, within it. Then `maps.found` has a map of each image,
    alike on all ranks; none where the model has no feature map. `grid` are the ranks that share an image. Collective.

    Raises:
        Refusal: the model has no such layer; or with `requires`, in `of`, no feature map. On all ranks.
    """

    def __init__(self, model: nn.Module, grid: Grid, options: CellOptions, requires: bool = False) -> None:
        self._requires = requires or options.layer is not None
        self.options, self._model, self._grid = options, model, grid
        self.found: tuple[CellMap, ...] = ()
        self._size: tuple[int, ...] = ()
        self._watch: _Watch | None = None
        self._module: nn.Module | None = None
        if options.layer is not None:
            modules = {name: module for name, module in model.named_modules() if name}
            if options.layer not in modules:
                known = [name for name, module in modules.items() if next(module.children(), None) is None]
                raise Refusal(f"`map_layer` {options.layer} is no module of the model, such as {', '.join(known[-4:])}")
            self._module = modules[options.layer]

    @property
    def problem(self) -> str:
        """Why an image has no map."""
        if self.options.layer is not None:
            return (
                f"no map: the output of `map_layer` {self.options.layer} is no feature map of the image, or it is "
                "streamed: choose a later module, or end streaming before it by `stream_until`"
            )
        return "no map: the model has no feature map from which its outputs come: choose `maps` none"

    @contextmanager
    def watching(self, size: Sequence[int]) -> Iterator[None]:
        """Within this context a model is run on images of `size` (H, W)."""
        self._size, self.found = tuple(size), ()
        was_enabled = torch.is_grad_enabled()
        watch = _Watch(self)
        self._watch = watch
        stage, opening = self._model, getattr(self._model, "opening", None)
        with ExitStack() as stack:
            stack.callback(torch.set_grad_enabled, was_enabled)
            if isinstance(stage, Stage) and opening is not None:  # streams the leading part
                stage.opening = partial(watch.pausing, opening)
                if self.options.kind == "gradient":
                    stage.opening = partial(watch.streaming, opening)
                stack.callback(setattr, stage, "opening", opening)
            if self._module is None:
                stack.enter_context(watch)
            else:
                handle = self._module.register_forward_hook(watch.hook)
                stack.callback(handle.remove)
            yield

    def of(self, wanted: Callable[[Any], Tensor], outputs: Any) -> Tensor:
        """What is wanted of the outputs, after the cells were mapped."""
        leaf = None if self._watch is None else self._watch.end()
        logits = main_output(outputs)
        logits = gather(logits) if isinstance(logits, SpatialTensor) else logits
        if leaf is not None and logits.requires_grad:
            self.found = self._mapped(leaf, logits)
        torch.set_grad_enabled(False)
        if self._requires and not self.found:
            raise Refusal(self.problem)
        return wanted(outputs)

    def _mapped(self, leaf: Tensor, logits: Tensor) -> tuple[CellMap, ...]:
        if logits.dim() != 2:
            return ()
        numbers, wide = _numbers(logits.detach(), self.options.number), _not_lowered(logits)
        score = wide[torch.arange(len(wide)), torch.tensor(numbers, device=wide.device)].sum()
        score = 2 * score - wide.sum() if wide.shape[1] == 2 else score  # of two classes the difference
        score = score / self._grid.size  # as each rank has all logits
        local = leaf.local if isinstance(leaf, SpatialTensor) else leaf
        with within_forward(runs=False):
            (gradient,) = torch.autograd.grad(score, [local], allow_unused=True)
        if gradient is None:
            return ()
        if not isinstance(leaf, SpatialTensor) and self._grid.size > 1:
            self._grid.comm.all_reduce(gradient)
        with torch.no_grad():
            if of_pixels := self.options.kind == "gradient":
                wide_type = torch.promote_types(gradient.dtype, torch.float32)
                own = torch.linalg.vector_norm(gradient, 1, dim=1, keepdim=True, dtype=wide_type)
            else:
                own = (_not_lowered(gradient) * _not_lowered(local)).sum(1, keepdim=True)
            found: Tensor = SpatialTensor(own, leaf.layout) if isinstance(leaf, SpatialTensor) else own
            if of_pixels:  # means over squares, also over smaller ones at the end
                found = F.avg_pool2d(found, GRADIENT_CELL_PX, ceil_mode=True)
            values = (gather(found) if isinstance(found, SpatialTensor) else found)[:, 0].cpu()
        side = float(GRADIENT_CELL_PX) if of_pixels else side_of_cells(self._size, values.shape[1:])
        return tuple(CellMap(each, side, number) for each, number in zip(values, numbers, strict=True))

    def takes(self, x: Any) -> bool:
        """Whether a tensor is a feature map of the images, or is the images where their gradients are wanted."""
        if not isinstance(x, Tensor) or x.dim() != IMAGE_DIMS or not x.is_floating_point() or x.is_meta:
            return False
        if isinstance(x, SpatialTensor) and x.layout.grid is not self._grid:
            return False  # of a streamed tile
        (height, width), (rows, cols) = self._size, x.shape[2:]
        if self.options.kind == "gradient":
            return (rows, cols) == (height, width)
        if rows * cols <= 1 or rows > height or cols > width:
            return False
        return abs(rows * width - cols * height) <= OFF * max(height, width)


class _Watch(TorchFunctionMode):
    """Lets gradients begin at each feature map that a function takes, so that they end at the last one.

    The graph before it is freed at once. Functions without names, such as those that only look at a shape, are let be.
    """

    def __init__(self, maps: CellMaps) -> None:
        super().__init__()
        self._maps = maps
        self.leaf: Tensor | None = None
        self._entered = WeakIdKeyDictionary()
        self._pooled: list[Tensor] = []  # to a fixed size: no feature map
        self._pauses = self._ended = False

    def end(self) -> Tensor | None:
        """The tensor that gradients begin from; nothing is watched any more."""
        self._ended = True
        return self.leaf

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self._ended or self._pauses or name in ("__get__", "__set__", "size", "dim", "stride"):
            return func(*args, **kwargs)
        taken = any(map(self._maps.takes, pytree.tree_leaves((args, kwargs))))
        if taken:
            args, kwargs = pytree.tree_map(self._begun, (tuple(args), kwargs))
        found = func(*args, **kwargs)
        if taken and name.startswith("adaptive_") and isinstance(found, Tensor):
            self._pooled.append(found)
        return found

    def _begun(self, x: Any) -> Any:
        if not self._maps.takes(x) or any(x is pooled for pooled in self._pooled):
            return x
        if x in self._entered:
            return self._entered[x]
        if self._maps.options.kind == "gradient" and self.leaf is not None:
            return x
        self._entered[x] = entered = self._enter(x)
        return entered

    def _enter(self, x: Tensor) -> Tensor:
        """The same values, as those from which gradients begin; they may be overwritten."""
        local = owned(x) if isinstance(x, SpatialTensor) else x
        begin = local.detach().requires_grad_()
        torch.set_grad_enabled(True)
        self.leaf = SpatialTensor(begin, x.layout.narrow) if isinstance(x, SpatialTensor) else begin
        (entered,) = enter((self.leaf,))
        return entered

    def pausing(self, act: Callable[..., Any], *args: Any) -> Any:
        """act(*args), watched by nobody: it streams."""
        self._pauses = True
        try:
            return act(*args)
        finally:
            self._pauses = False

    def streaming(self, act: StreamedPrefix, stage: Stage, *values: Any) -> Any:
        """Let gradients begin at images that are streamed. A rank then has its part of them in memory. Collective."""
        from mpi4dl.parallel.streaming.leading_part import StreamedImages, in_memory

        images, *rest = values
        if isinstance(images, StreamedImages):
            images = in_memory(images)
            x = images.source
            begin = (x.local if isinstance(x, SpatialTensor) else x).detach().requires_grad_()
            torch.set_grad_enabled(True)
            self.leaf = SpatialTensor(begin, x.layout) if isinstance(x, SpatialTensor) else begin
            images = replace(images, source=self.leaf)
        return self.pausing(act, stage, images, *rest)

    def hook(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Let gradients begin at the output of a module, unless it is that of a streamed tile."""
        return self._enter(output) if not self._pauses and self._maps.takes(output) else None


def _not_lowered(x: Tensor) -> Tensor:
    """In float32, or float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _numbers(logits: Tensor, number: int | None) -> list[int]:
    """The class of each image that is mapped: that of this number, of two the second, or else the predicted one."""
    count = logits.shape[1]
    if number is not None or count <= 2:
        return [count - 1 if number is None else number] * len(logits)
    return logits.argmax(1).tolist()
