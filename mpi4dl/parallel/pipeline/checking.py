"""Before the first step, the cut model beside the plain one: whether the calls that a trace noted are all there is.

Two steps of both, in one process, on two small samples: outputs, gradients, buffers and random states. What a trace
does not see differs there, such as what a forward hides in a global, a list, or in code outside of PyTorch.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl._randomness import forked, seed_python
from mpi4dl.parallel.inputs import made_up, of_tokens, space_of
from mpi4dl.parallel.pipeline.program import OtherShape, map_leaves
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.pipeline.stage import Stage

SIDES = (32, 64, 128, 256)  # of images, or numbers of tokens, of which the smallest that the model takes is tried
FEW, NUM_MEANS = 16_384, 4_096  # values and means of parts that are kept of a tensor
MOST_PARAMETERS = 100_000_000  # of larger models nobody waits for a second one
CLOSE = {8: 1e-9, 4: 1e-4, 2: 3e-2}  # by the bytes of a number: both make the same calls in the same order
NORMS = (nn.modules.batchnorm._NormBase,)


class TriedStep(NamedTuple):
    """What a step of a model gave: outputs, gradients by name, and buffers by name behind its forward pass, and behind
    its backward pass. Of large tensors only a sketch is kept.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    between: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Checked(NamedTuple):
    """What was found. `problem`: how the cut model differs. `left_out`: why nobody looked.

    `own_buffers`: names of buffers that the model changes as it runs and that are no norm's. `recomputed`: names of
    those that change once more as the model is computed again for its backward pass.
    """

    problem: str | None = None
    left_out: str | None = None
    own_buffers: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()


def check_cut(
    cuttable: Cuttable, counts: Sequence[int], build: Callable[[], nn.Module], seed: int, image: Sequence[int]
) -> Checked:
    """Compare the stages of a model, of so many units each, with the model that `build()` makes with this seed.

    `image` is the shape of a batch, (N, C, H, W) or (N, T).
    """
    if sum(p.numel() for p in cuttable.model.parameters()) > MOST_PARAMETERS:
        return Checked(left_out=f"it has more than {MOST_PARAMETERS:,} parameters")
    recipes = [stage.recipe for stage in cuttable.stages(counts)]
    called = {call.target for recipe in recipes for call in recipe.calls if call.kind == "call_module"}

    def plain(model: nn.Module) -> Callable[..., Any]:
        return model

    def cut(model: nn.Module) -> Callable[..., Any]:
        stages = [Stage(recipe, model) for recipe in recipes]

        def run(x: Tensor) -> Any:
            values: Any = (x,)
            for stage in stages:
                values = stage(*values)
            return values

        return run

    reason = f"it takes no images of up to {SIDES[-1]} px"
    for shape in _small(image):
        try:
            theirs = _steps(build, plain, seed, shape, called)
        except Exception as error:
            reason = f"the model itself fails on samples of {' x '.join(map(str, shape[1:]))}: {error}"
            continue
        try:
            ours = _steps(build, cut, seed, shape, called)
        except OtherShape:
            reason = "it does other things with small images than with those that it is cut for"
            continue
        except Exception as error:
            return Checked(f"it runs in one piece, but its stages fail: {error}")
        (norms, plain_steps), (_, cut_steps) = theirs, ours
        own_buffers = tuple(_own_buffers(norms, plain_steps))
        first = plain_steps[0]
        recomputed = tuple(name for name, value in first.between.items() if differ(value, first.buffers.get(name)))
        problem = next(_differences(plain_steps, cut_steps), None)
        if problem is not None:
            problem = (
                f"in stages it does not compute what it computes in one piece ({problem}): its own forward does what "
                "cutting does not see; move that into a module of its own, which is kept whole"
            )
        return Checked(problem, None, own_buffers, recomputed)
    return Checked(left_out=reason)


def _small(image: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Shapes of two samples, from small ones to the model's own, if that is not large."""
    channels, own = () if of_tokens(image) else (image[1],), space_of(image)
    for side in (side for side in SIDES if side < max(own)):
        yield 2, *channels, *(min(side, size) for size in own)
    if max(own) <= SIDES[-1]:
        yield 2, *channels, *own


def _steps(
    build: Callable[[], nn.Module],
    runs: Callable[[nn.Module], Callable[..., Any]],
    seed: int,
    shape: Sequence[int],
    called: Collection[str],
) -> tuple[set[str], list[TriedStep]]:
    """The buffers of norms, and two steps, of the model that `build` makes; between them chance changes the parameters.

    Each call of a module that the stages call has random numbers of its own: what the model drew before, such as for a
    layer that is left out with a probability of 0, does not count.
    """
    found = []
    with forked(), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        seed_python(seed)
        model = build()
        for number, path in enumerate(sorted(called)):
            model.get_submodule(path).register_forward_pre_hook(_Seeding(seed + 1000 * number))
        run = runs(model)
        generator = torch.Generator().manual_seed(seed + 1)
        torch.default_generator.manual_seed(seed + 2)
        seed_python(seed + 2)
        for number in range(2):
            x = made_up(model, shape, shape, torch.device("cpu")).flip(-1 - number)
            outputs = [y for y in _leaves(run(x)) if isinstance(y, Tensor)]
            terms = [
                (y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in outputs if y.requires_grad
            ]
            between = {name: _sketch(value) for name, value in model.named_buffers()}
            gradients: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
            hooks = [_sketched(name, p, gradients) for name, p in model.named_parameters() if p.requires_grad]
            if terms:
                sum(terms[1:], terms[0]).backward()
            for hook in hooks:
                hook.remove()
            buffers = {name: _sketch(value) for name, value in model.named_buffers()}
            found.append(TriedStep(list(map(_sketch, outputs)), gradients, between, buffers))
            with torch.no_grad():
                for p in filter(lambda p: p.requires_grad, model.parameters()):
                    p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=0.02)
        return {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            if isinstance(module, NORMS)
            for name in module._buffers
        }, found


def _sketched(name: str, p: Tensor, found: dict[str, Tensor | None]) -> Any:
    """A hook that keeps a sketch of a gradient instead of it, or the sum if it comes in parts."""

    def keep(p: Tensor) -> None:
        assert p.grad is not None
        before, sketch = found[name], _sketch(p.grad)
        found[name], p.grad = sketch if before is None else before + sketch, None

    return p.register_post_accumulate_grad_hook(keep)


def _sketch(x: Tensor) -> Tensor:
    """A copy of x, or of a large one some of its values, the means of all its parts, and what they lie between."""
    x = x.detach()
    if x.layout is not torch.strided or x.is_complex() or x.numel() <= FEW:
        return x.clone()
    flat = x.flatten()
    means = [part.mean(dtype=torch.float64) for part in flat.chunk(NUM_MEANS)]
    return torch.cat([flat[:: -(-len(flat) // FEW)], torch.stack([*means, flat.min(), flat.max()]).to(x.dtype)])


class _Seeding:
    """A hook that seeds all generators with another number for each call."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        torch.default_generator.manual_seed(self.seed)
        seed_python(self.seed)
        self.seed += 1


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, pytree.tree_leaves(value))
    return found


def _differences(plain: Sequence[TriedStep], cut: Sequence[TriedStep]) -> Iterator[str]:
    for number, (theirs, ours) in enumerate(zip(plain, cut, strict=True), start=1):
        where = f"in step {number} of two"
        if len(theirs.outputs) != len(ours.outputs):
            yield f"it returns {len(ours.outputs)} tensors, not {len(theirs.outputs)}"
        for a, b in zip(theirs.outputs, ours.outputs, strict=False):
            if differ(a, b):
                yield f"an output differs {where}"
        largest = max(
            (float(g.abs().max()) for g in theirs.gradients.values() if g is not None and g.numel()), default=0.0
        )
        for name, gradient in theirs.gradients.items():
            if differ(gradient, ours.gradients.get(name), 0.01 * largest):
                yield f"the gradient of {name} differs {where}"
        for name, value in theirs.buffers.items():
            if differ(value, ours.buffers.get(name)):
                yield f"the buffer {name} differs {where}"


def differ(a: Tensor | None, b: Tensor | None, least: float = 0.0) -> bool:
    """Whether two tensors differ by more than rounding does, of numbers as large as the largest, or `least`."""
    if a is None or b is None:
        return a is not b
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return not torch.equal(a, b)
    a, b = (torch.view_as_real(x) if x.is_complex() else x.to_dense() for x in (a, b))
    close, known = CLOSE[max(2, a.itemsize)], a.isfinite()
    if not torch.equal(known, b.isfinite()):
        return True
    a, b = a[known].double(), b[known].double()
    return bool(a.numel()) and float((a - b).abs().max()) > close * max(float(a.abs().max()), least)


def _own_buffers(norms: Collection[str], steps: Sequence[TriedStep]) -> Iterator[str]:
    first, second = steps
    for name, value in first.buffers.items():
        if name not in norms and differ(value, second.buffers.get(name)):
            yield name
