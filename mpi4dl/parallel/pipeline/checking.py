"""Before the first step, the cut model beside the plain one: whether stages compute what the model does in one piece.

    plain    build() -> model(x)
    cut      build() -> stage 0 -> copies of the values -> stage 1 <- build()     each with modules of its own

Both make two steps of training and two of evaluation, in one process, on two small samples. What a trace does not see
differs there, such as what a forward hides in a global, a list, or in code outside of PyTorch; and so does what a cut
parts: views of a tensor that is changed in place, a weight that a module reaches by no name, a counter of two stages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl._memory import memory_of_node
from mpi4dl._randomness import seed_host
from mpi4dl.parallel.inputs import made_up, of_tokens, space_of
from mpi4dl.parallel.pipeline.decisions import (
    Watch,
    fingerprint,
    globals_read,
    is_data,
    is_foreign,
    own_attributes,
    trial,
    watches_of,
)
from mpi4dl.parallel.pipeline.program import OtherShape, leaves, map_leaves
from mpi4dl.parallel.pipeline.split import Cuttable, storage_of
from mpi4dl.parallel.pipeline.stage import Stage, StageProgram
from mpi4dl.parallel.tensor.styles import names_by_first

SIDES = (32, 64, 128, 256)  # of images, or numbers of tokens, of which the smallest that the model takes is tried
FEW, NUM_MEANS = 16_384, 4_096  # values and means of parts that are kept of a tensor
MOST_PARAMETERS = 400_000_000  # of larger models nobody waits for more of them
# By the bytes of a number: both make the same calls, but add gradients up in another order, of values in other places.
CLOSE = {8: 1e-9, 4: 1e-4, 2: 3e-2}
NORMS = (nn.modules.batchnorm._NormBase,)
FAILING = "it runs in one piece, but its stages fail"
UNSEEN = "its own forward does what cutting does not see; move that into a module of its own, which is kept whole"
COPIES = "stages have copies of them: clone one, or put what uses them into one stage"
SHARED = (
    "stages have copies of what they share: register shared weights as parameters or submodules, change none of them "
    "in place, and keep count in a buffer, or put what belongs together into one stage"
)


class TriedStep(NamedTuple):
    """What a step of a model gave: outputs, gradients by name, and buffers by name behind its forward pass, and behind
    its backward pass; and the parameters, as each stage has them. Of large tensors only a sketch is kept.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    between: dict[str, Tensor]
    buffers: dict[str, Tensor]
    parameters: dict[str, list[Tensor]]


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
    cuttable: Cuttable,
    processes: Sequence[Sequence[StageProgram]],
    build: Callable[[], nn.Module],
    seed: int,
    image: Sequence[int],
    mirrored: bool = False,
) -> Checked:
    """Compare a model in parts, of which each process runs some, with the model that `build()` makes with this seed.

    `image` is the shape of a batch, (N, C, H, W) or (N, T). If `mirrored`, two copies of the model take turns.
    """
    parameters = list(cuttable.model.parameters())
    if sum(p.numel() for p in parameters) > MOST_PARAMETERS:
        return Checked(left_out=f"it has more than {MOST_PARAMETERS:,} parameters")
    # Each process builds the model, as on its own rank, and one more is the plain one.
    if sum(p.nbytes for p in parameters) * (len(processes) + 1) > memory_of_node() // 2:
        return Checked(left_out=f"{len(processes) + 1} copies of it would take more than half of this node's memory")
    reason = f"it takes no images of up to {SIDES[-1]} px"
    for shape, num_steps in product(_small(image), (4, 2)):  # some models cannot evaluate
        trial = _Trial(cuttable, build, seed, shape, num_steps)
        try:
            plain = trial.steps(_Plain)
        except Exception as error:
            reason = f"the model itself fails on samples of {' x '.join(map(str, shape[1:]))}: {error}"
            continue
        try:
            own_buffers = tuple(_own_buffers(cuttable.model, plain))
            problem = trial.problem(plain, processes)
            if problem is None and mirrored and not own_buffers:
                problem = trial.problem_of_turns(plain)
        except OtherShape:
            reason = "it does other things with small images than with those that it is cut for"
            continue
        except Exception as error:
            return Checked(f"{FAILING}: {error}")
        first = plain[0]
        recomputed = tuple(name for name, value in first.between.items() if differ(value, first.buffers.get(name)))
        return Checked(problem, None, own_buffers, recomputed)
    return Checked(left_out=reason)


def _small(image: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Shapes of two samples, from small ones to the model's own, if that is not large."""
    channels, own = () if of_tokens(image) else (image[1],), space_of(image)
    for side in (side for side in SIDES if side < max(own)):
        yield 2, *channels, *(min(side, size) for size in own)
    if max(own) <= SIDES[-1]:
        yield 2, *channels, *own


class _Plain:
    """The model in one piece."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.modules: list[nn.Module] = [make()]

    def __call__(self, x: Tensor) -> Any:
        return self.modules[0](x)


class _InTurns(_Plain):
    """Two copies of the model, each of which runs every second time. `changes`: whether calls change globals."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.modules, self.changes = [make(), make()], list[bool]()
        self.globals = watches_of(self.modules[0])

    def __call__(self, x: Tensor) -> Any:
        self.modules.reverse()
        before = [watch.now(depth=1) for watch in self.globals]
        found = super().__call__(x)
        self.changes.append(before != [watch.now(depth=1) for watch in self.globals])
        return found


class _InParts:
    """The parts of a model, one after the other: each process has modules of its own, each part copies of values.

    `remarks` are what a run shows of values that copies part from each other.
    """

    def __init__(
        self, cuttable: Cuttable, processes: Sequence[Sequence[StageProgram]], make: Callable[[], nn.Module]
    ) -> None:
        self.remarks: dict[str, None] = {}
        self.parts: list[tuple[int, Stage]] = []
        self.globals: list[list[Watch]] = []  # that the code of each process reads
        users: dict[nn.Module, set[int]] = {}
        for number, programs in enumerate(processes):
            model = make()
            self.parts += [(number, Stage(stage_program, model)) for stage_program in programs]
            calls = {
                call.target for stage_program in programs for call in stage_program.calls if call.kind == "call_module"
            }
            within = {each for path in calls for each in cuttable.model.get_submodule(path).modules()}
            self.globals.append([watch for each in within for watch in globals_read(each)])
            for each in within:
                users.setdefault(each, set()).add(number)
        self.modules: list[nn.Module] = [part for _, part in self.parts]
        paths = cuttable.model.named_modules(remove_duplicate=False)
        self.in_several = {path for path, module in paths if len(users.get(module, ())) > 1}

    def __call__(self, x: Tensor) -> Any:
        known: dict[str, Any] = dict(zip(self.parts[0][1].stage_program.inputs, (x,), strict=False))
        found = None
        for number, part in self.parts:
            values = {name: known[name] for name in part.stage_program.inputs if name in known}
            self._note_views(part.stage_program, values)
            before, copies = self._state(number, part), dict[int, Any]()
            found = part(*(map_leaves(partial(_copy, copies), value) for value in values.values()))
            for words, value in self._state(number, part).items():
                if before.get(words) != value:
                    raise ValueError(
                        f"stage {number} changes {words} as it runs, which another stage uses too, but each has its "
                        "own: keep count in a buffer, or put all that uses it into one stage"
                    )
            known |= zip(part.stage_program.outputs, () if part.stage_program.is_last else found, strict=True)
        return found

    def _state(self, number: int, part: Stage) -> dict[str, Any]:
        """What this part can change of Python that parts of other processes use too: attributes and globals.

        Lists and dicts are the same whatever is in them: many are caches, of which each process may have its own.
        """
        found = {
            f"{path}.{name}": fingerprint(value, depth=0)
            for path, module in part.named_modules()
            if path in self.in_several and is_foreign(module)
            for name, value in own_attributes(module).items()
            if name != "training" and is_data(value)
        }
        others = [watch for other, watches in enumerate(self.globals) if other != number for watch in watches]
        return found | {watch.words: watch.now(depth=0) for watch in others}

    def _note_views(self, stage_program: StageProgram, values: Mapping[str, Any]) -> None:
        """Note which different tensors among the values before a part are in the same memory."""
        places: dict[int, dict[int, str]] = {}
        for name, value in values.items():
            for leaf in (leaf for leaf in leaves(value) if isinstance(leaf, Tensor)):
                places.setdefault(storage_of(leaf), {}).setdefault(id(leaf), name)
        for names in (place.values() for place in places.values() if len(place) > 1):
            self.remarks[f"{' and '.join(names)} are in the same memory before {stage_program.calls[0].name}"] = None


def _copy(copies: dict[int, Any], leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return copies[id(leaf)] if id(leaf) in copies else copies.setdefault(id(leaf), leaf.clone())


class _Trial:
    """Some steps of a model, and of its parts, with the same numbers."""

    def __init__(
        self, cuttable: Cuttable, build: Callable[[], nn.Module], seed: int, shape: Sequence[int], num_steps: int
    ) -> None:
        self.cuttable, self.build, self.seed, self.num_steps = cuttable, build, seed, num_steps
        x = made_up(cuttable.model, shape, shape, torch.device("cpu"))
        self.batches = [x.flip(-1), x.flip(-2)]
        self.first = {name: first for first, names in names_by_first(cuttable.model).items() for name in names}

    def problem(self, plain: Sequence[TriedStep], processes: Sequence[Sequence[StageProgram]]) -> str | None:
        """How the parts differ from the plain model; None if they do not."""
        in_parts: list[_InParts] = []

        def cut(make: Callable[[], nn.Module]) -> _InParts:
            in_parts.append(_InParts(self.cuttable, processes, make))
            return in_parts[-1]

        problem = next(_differences(plain, self.steps(cut)), None)
        if problem is None:
            return None
        one = [[self.cuttable.part(0, len(self.cuttable))]]
        alone = self.steps(lambda make: _InParts(self.cuttable, one, make))
        why = UNSEEN
        if next(_differences(plain, alone), None) is None:
            remarks = in_parts[0].remarks
            why = f"{', '.join(remarks)}, and {COPIES}" if remarks else SHARED
        return f"in stages it does not compute what it computes in one piece ({problem}): {why}"

    def problem_of_turns(self, plain: Sequence[TriedStep]) -> str | None:
        """What copies for both directions do otherwise than one model, apart from buffers; None if nothing."""
        turns: list[_InTurns] = []

        def run(make: Callable[[], nn.Module]) -> _InTurns:
            turns.append(_InTurns(make))
            return turns[-1]

        _, second, *_ = self.steps(run)
        if not turns[0].changes[1] and not any(map(differ, plain[1].outputs, second.outputs)):
            return None
        return "it keeps a number for its next call, so copies in both directions differ: leave out `bidirectional`"

    def steps(self, runs: Callable[[Callable[[], nn.Module]], _Plain | _InParts]) -> list[TriedStep]:
        """Steps of what `runs` makes of the models that it is given; between them chance changes the parameters.

        Each call of a module that the stages call has random numbers of its own: what the model drew before, such as
        for a layer that is left out with a probability of 0, does not count.
        """
        calls = (call for unit in self.cuttable.program.units for call in unit.calls)
        called = sorted({call.target for call in calls if call.kind == "call_module"})
        seeding = {path: _seeding(self.seed + 1000 * number) for number, path in enumerate(called)}

        def make() -> nn.Module:
            seed_host(self.seed)
            model = self.build()
            for path, hook in seeding.items():
                model.get_submodule(path).register_forward_pre_hook(hook)
            return model

        with trial(self.cuttable.model), torch.device("cpu"):
            run = runs(make)
            seed_host(self.seed + 2)
            return [self._step(run, number) for number in range(self.num_steps)]

    def _step(self, run: "_Plain | _InParts", number: int) -> TriedStep:
        trains, gradients = number < 2, dict[str, Tensor | None]()
        generator = torch.Generator().manual_seed(self.seed + number)
        parameters = dict[str, list[nn.Parameter]]()
        for module in run.modules:
            if not trains:
                module.eval()
            for name, p in module.named_parameters():
                copies = parameters.setdefault(self.first[name], [])
                copies += [] if any(p is other for other in copies) else [p]
        with torch.set_grad_enabled(trains):
            outputs = [y for y in leaves(pytree.tree_leaves(run(self.batches[number % 2]))) if isinstance(y, Tensor)]
        between = _buffers(run.modules)
        terms = [(y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in outputs if y.requires_grad]
        if terms:
            each = [(name, p) for name, copies in parameters.items() for p in copies if p.requires_grad]
            hooks = [p.register_post_accumulate_grad_hook(partial(_keep, name, gradients)) for name, p in each]
            sum(terms[1:], terms[0]).backward()
            for hook in hooks:
                hook.remove()
        for name in sorted(parameters) if trains else ():
            noise = torch.randn(parameters[name][0].shape, generator=generator)
            with torch.no_grad():
                for p in filter(lambda p: p.requires_grad, parameters[name]):
                    p.add_(noise.to(p.dtype), alpha=0.02)
        values = {name: list(map(_sketch, copies)) for name, copies in parameters.items()}
        return TriedStep(list(map(_sketch, outputs)), gradients, between, _buffers(run.modules), values)


def _buffers(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {name: _sketch(value) for module in modules for name, value in module.named_buffers(remove_duplicate=False)}


def _keep(name: str, found: dict[str, Tensor | None], p: Tensor) -> None:
    """Keep a sketch of a gradient instead of it, or the sum if it comes in parts."""
    assert p.grad is not None
    before, sketch = found.get(name), _sketch(p.grad)
    found[name], p.grad = sketch if before is None else before + sketch, None


def _sketch(x: Tensor) -> Tensor:
    """A copy of x, or of a large one some of its values and the means of its parts: a linear map."""
    x = x.detach()
    if x.layout is not torch.strided or x.is_complex() or x.numel() <= FEW:
        return x.clone()
    flat = x.flatten()
    even = len(flat) // NUM_MEANS * NUM_MEANS
    means = flat[:even].view(NUM_MEANS, -1).mean(1, dtype=torch.float64)
    return torch.cat([flat[:: -(-len(flat) // FEW)], flat[even:], means.to(x.dtype)])


def _seeding(seed: int) -> Callable[[nn.Module, Any], None]:
    """A hook that seeds all generators with another number for each call."""
    seeds = count(seed)
    return lambda module, inputs: seed_host(next(seeds))


def _differences(plain: Sequence[TriedStep], cut: Sequence[TriedStep]) -> Iterator[str]:
    for number, (theirs, ours) in enumerate(zip(plain, cut, strict=True), start=1):
        where = f"in step {number} of two" if number <= 2 else "in evaluation"
        for name, (parameter,) in theirs.parameters.items():
            if any(differ(parameter, copy) for copy in ours.parameters.get(name, [None])):
                yield f"the parameter {name} differs behind step {number}"
        if len(theirs.outputs) != len(ours.outputs):
            yield f"it returns {len(ours.outputs)} tensors, not {len(theirs.outputs)}, {where}"
        if any(differ(a, b) for a, b in zip(theirs.outputs, ours.outputs, strict=False)):
            yield f"an output differs {where}"
        largest = max(
            (float(g.abs().max()) for g in theirs.gradients.values() if g is not None and g.numel()), default=0.0
        )
        for name in theirs.parameters:
            if differ(theirs.gradients.get(name), ours.gradients.get(name), 0.01 * largest):
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


def _own_buffers(model: nn.Module, steps: Sequence[TriedStep]) -> Iterator[str]:
    modules = {path: module for path, module in model.named_modules(remove_duplicate=False)}
    for name, value in steps[0].buffers.items():
        of_norm = isinstance(modules[name.rpartition(".")[0]], NORMS)
        if not of_norm and differ(value, steps[1].buffers.get(name)):
            yield name
