"""Splits an unmodified model into stages, with every value that is still alive handed on from each to the next.

cuttable = Cuttable(outline(build))                      # on the meta device: no values yet
stage = cuttable.stage(counts=[3, 4, 5], index=1)        # 12 units in three stages
stage = materialize(stage, build, device, seed)          # with the values of its own parameters only
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from mpi4dl._randomness import forked, seeded
from mpi4dl.parallel.inputs import computed_tensors, of_tokens, shape_only
from mpi4dl.parallel.pipeline.decisions import trial
from mpi4dl.parallel.pipeline.program import Value, references
from mpi4dl.parallel.pipeline.stage import Stage, StageProgram
from mpi4dl.parallel.pipeline.trace import trace


class Cuttable:
    """A model as a list of units, between any two of which it can be cut.

    `names` are the units' names: the path of the module, or what an opened module calls. `whole` are paths of modules
    that shall stay one unit each, `image` is the shape of a batch, and blocks are opened too if it can be cut
    `within_blocks` (see `trace`). Raises `ValueError` if the model's forward cannot be traced, or cannot take such a
    batch.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: Collection[str] = (),
        image: tuple[int, ...] | None = None,
        within_blocks: bool = False,
    ) -> None:
        self.model, self.whole = model, tuple(whole)
        try:
            self.program = trace(model, whole, image, within_blocks)
        except ValueError:
            reason = None if image is None else unfit(model, image)
            if reason is None:
                raise
            raise ValueError(reason) from None
        self.names = tuple(unit.name for unit in self.program.units)
        self._made = {name: -1 for name in self.program.inputs}
        self._needed: dict[str, int] = {}
        self._paths: dict[str, set[int]] = {}
        self._looks: dict[str, set[int]] = {}
        for i, unit in enumerate(self.program.units):
            for call in unit.calls:
                self._made[call.name] = i
                self._needed.update(dict.fromkeys(call.reads, i))
                for path in call.attributes:
                    self._paths.setdefault(path, set()).add(i)
                for path in call.looks:
                    self._looks.setdefault(path, set()).add(i)
        for leaf in references(self.program.output):
            if isinstance(leaf, Value):
                self._needed[leaf.name] = len(self.names)
            else:
                self._paths.setdefault(leaf.path, set()).add(len(self.names) - 1)
        self._names, self._users = self._uses()
        self._paths |= self._aliases()

    def __len__(self) -> int:
        return len(self.names)

    def live(self, cut: int) -> tuple[str, ...]:
        """Names of the values that are handed on if the model is cut before unit `cut`, in the order of their making.

        Before unit 0, they are the model's inputs, and behind the last unit nothing.
        """
        if cut <= 0:
            return self.program.inputs
        if cut >= len(self):
            return ()
        return tuple(name for name, made in self._made.items() if made < cut <= self._needed.get(name, -1))

    def stages(self, counts: Sequence[int]) -> list[Stage]:
        """All stages, of `counts` units each."""
        return [self.stage(counts, index) for index in range(len(counts))]

    def stage(self, counts: Sequence[int], index: int) -> Stage:
        """Stage `index` of stages that have `counts` units each. It shares its modules with the model.

        Raises:
            ValueError: the counts are not those of this model, or two stages would need the same buffer.
        """
        self.shared(counts)
        bounds = [0, *accumulate(counts)]
        return Stage(self._stage_program(bounds[index], bounds[index + 1], index, len(counts)), self.model)

    def part(self, first: int, end: int) -> StageProgram:
        """Units `first` to `end` - 1 as a program; it returns the values that are alive behind them, or the result."""
        return self._stage_program(first, end, first, first + 1 if end == len(self) else len(self))

    def segment(self, first: int, end: int, changes: Sequence[Collection[str]]) -> StageProgram:
        """The same, for a caller that keeps values by their names: it takes what the units read, and returns what they
        make or change, of the values that are alive behind them. `changes` are those that each unit
        changes in place.
        """
        part = self.part(first, end)
        changed = {name for names in changes[first:end] for name in names}
        read = {name for call in part.calls for name in call.reads}
        read |= {leaf.name for leaf in references(part.result) if isinstance(leaf, Value)}
        made = {call.name for call in part.calls}
        inputs = tuple(name for name in part.inputs if name in read | changed) or part.inputs[:1]
        outputs = tuple(name for name in part.outputs if name in made | changed)
        forget = [[name for name in names if name in made or name in inputs] for names in part.forget]
        gone = {*outputs, *(name for names in forget for name in names)}
        forget[-1] += [name for name in inputs if name not in gone]
        return replace(part, inputs=inputs, outputs=outputs, forget=tuple(map(tuple, forget)))

    def check(self, counts: Sequence[int]) -> None:
        """Refuse counts of units that do not add up, or are not positive."""
        if not counts or min(counts) < 1 or sum(counts) != len(self):
            raise ValueError(
                f"balance {','.join(map(str, counts))} puts {sum(counts)} units into {len(counts)} stages, but "
                f"{type(self.model).__name__} has {len(self)}, and every stage needs at least one{self.hint()}"
            )

    def unit(self, i: int) -> Stage:
        """Unit `i` alone, as a stage; what is tied to other units is shared with them."""
        return Stage(self._stage_program(i, i + 1, i, len(self)), self.model)

    def hint(self) -> str:
        """Which modules would have given more units, for errors about too few of them."""
        kept = [f"{path} ({reason})" for path, reason in self.program.kept_whole.items()]
        return f"; kept whole: {'; '.join(kept)}" if kept else ""

    def _stage_program(self, first: int, end: int, index: int, num_stages: int) -> StageProgram:
        calls = tuple(call for unit in self.program.units[first:end] for call in unit.calls)
        inputs, outputs = self.live(first), self.live(end)
        is_last = end == len(self)
        kept = (
            {leaf.name for leaf in references(self.program.output) if isinstance(leaf, Value)} if is_last else outputs
        )
        last_use = {name: 0 for name in inputs}
        for i, call in enumerate(calls):
            last_use.update(dict.fromkeys([call.name, *call.reads], i))
        forget: list[list[str]] = [[] for _ in calls]
        for name, i in last_use.items():
            if name not in kept:
                forget[i].append(name)
        holds = {path for path, users in self._paths.items() if any(first <= user < end for user in users)}
        if is_last:
            holds |= self._unused()
        looked = {path for path, users in self._looks.items() if any(first <= user < end for user in users)}
        return StageProgram(
            index,
            num_stages,
            inputs,
            outputs,
            calls,
            tuple(map(tuple, forget)),
            self.program.output if is_last else None,
            frozenset(holds),
            frozenset(outputs) - self._sources(),
            frozenset(path for path in looked if path not in holds and not _below(path, holds)),
            self.program.watched,
        )

    def _sources(self) -> set[str]:
        """The values of which something comes into the model's result in training."""
        found = {leaf.name for leaf in references(self.program.output[0]) if isinstance(leaf, Value)}
        for unit in reversed(self.program.units):
            for call in reversed(unit.calls):
                if call.name in found:
                    found |= call.reads
        return found

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)

    def _uses(self) -> tuple[dict[int, list[str]], dict[int, set[int]]]:
        """By the id of each parameter and buffer all its names, and the units that use it, by whatever name."""
        names: dict[int, list[str]] = {}
        for name, tensor in self._tensors():
            names.setdefault(id(tensor), []).append(name)
        users: dict[int, set[int]] = {key: set() for key in names}
        for path, units in self._paths.items():
            found = attrgetter(path)(self.model)
            for tensor in [*found.parameters(), *found.buffers()] if isinstance(found, nn.Module) else [found]:
                if id(tensor) in users:
                    users[id(tensor)] |= units
        return names, users

    def _aliases(self) -> dict[str, set[int]]:
        """Names that the forward pass does not use of tensors that it uses by other names: they go where those go."""
        used = set(self._paths)
        found = {}
        for key, units in self._users.items():
            for name in self._names[key] if units else ():
                if name not in used and not _below(name, used):
                    found[name] = units
        return found

    def _unused(self) -> set[str]:
        """Paths of modules, parameters and buffers that the forward pass does not use: the last stage keeps them."""
        used = set(self._paths)
        above = {"", *used}
        for path in used:
            while path := path.rpartition(".")[0]:
                above.add(path)
        modules = [path for path, _ in self.model.named_modules()]
        tensors = [name for name, _ in self._tensors()]
        covered = used | {path for path in modules if path not in above}
        return {path for path in [*modules, *tensors] if path not in above and not _below(path, covered)}

    def shared(self, counts: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The stages of each parameter that several use, by the first of its names in the model.

        What else they have in common is compared by running them (see `checking`).

        Each has a copy of a buffer that is in no state dict, such as a table of positions.

        Raises:
            ValueError: several stages use another buffer, of which a checkpoint has one.
        """
        self.check(counts)
        bounds = [0, *accumulate(counts)]
        parameters, saved = set(map(id, self.model.parameters())), self.model.state_dict().keys()
        found: dict[str, tuple[int, ...]] = {}
        for key, users in self._users.items():
            units = sorted(users)
            stages = [next(k for k, (low, high) in enumerate(pairwise(bounds)) if low <= i < high) for i in units]
            if not stages or stages[0] == stages[-1]:
                continue
            names = self._names[key]
            if key not in parameters and saved.isdisjoint(names):
                continue
            if key not in parameters:
                uses = ", ".join(f"{self.names[i]} (stage {k})" for i, k in zip(units, stages, strict=True))
                raise ValueError(
                    f"{' = '.join(names)} is used by {uses}, but a buffer can only be in one stage: "
                    f"put units {units[0]} to {units[-1]} (counted from 0) into the same stage"
                )
            found[names[0]] = tuple(dict.fromkeys(stages))
        return found


def storage_of(tensor: Tensor) -> int:
    """A key of the storage that tensors share, on the meta device too."""
    if nn.parameter.is_lazy(tensor):
        return id(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse ones have none
        return id(tensor)


def _below(path: str, others: Collection[str]) -> bool:
    while path := path.rpartition(".")[0]:
        if path in others:
            return True
    return False


def outline(build: Callable[[], nn.Module]) -> nn.Module:
    """The model on the meta device: its modules and shapes, no values. The random state stays as it is."""
    with forked():
        try:
            with torch.device("meta"):
                model = build()
            # PyTorch passes over what a parametrization has no values for: `orthogonal` then lacks a buffer.
            lists = [each for each in model.modules() if isinstance(each, ParametrizationList)]
            if any(None in part._buffers.values() for each in lists for part in each):
                raise NotImplementedError
        except (NotImplementedError, RuntimeError, TypeError):
            # Some models read values while they are built (torchvision's RegNet computes its widths with tensors),
            # also by numpy, which takes no tensor without values: a TypeError.
            with torch.device("cpu"):
                model = build()
    if all(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return model
    return copy.deepcopy(model, memo=shapes_of(model))  # also one that was there; .to("meta") would untie what is tied


def shapes_of(model: nn.Module) -> dict[int, Tensor]:
    """By the id of each tensor of a model one on the meta device, for `deepcopy` to take: tied ones stay tied.

    Tensors in the same memory are in the same memory there. Those that modules have as plain attributes are among them.
    """
    values = [*model.parameters(), *model.buffers(), *computed_tensors(model)]
    many = {key for key, count in Counter(map(storage_of, values)).items() if count > 1}
    storages: dict[int, Any] = {}
    shapes: dict[int, Tensor] = {}
    for value in values:
        shape = torch.empty_like(value, device="meta")
        if (key := storage_of(value)) in many:
            if key not in storages:
                storages[key] = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
            place = storages[key].untyped_storage()
            shape = torch.empty(0, dtype=value.dtype, device="meta").set_(
                place, value.storage_offset(), value.size(), value.stride()
            )
        shapes[id(value)] = nn.Parameter(shape, value.requires_grad) if isinstance(value, nn.Parameter) else shape
    return shapes


def image_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's images: the first real type of its parameters."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def unfit(model: nn.Module, image: tuple[int, ...]) -> str | None:
    """Why this model, which is on the meta device, cannot train on samples of this shape; None if it can.

    They are images (N, C, H, W), or tokens (N, T).

    For an error in a model: is it one of the plain model too? In the model's own words.
    """
    try:
        with torch.no_grad(), trial(model):
            model.train()(shape_only(model, image))
    except (RuntimeError, AssertionError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, NotImplementedError) or "meta" in reason:  # it looks at values, and there are none
            return None
        if of_tokens(image):
            return f"cannot take samples of {image[1]} tokens: {reason}"
        space = {1: "length", 2: "height, width", 3: "depth, height, width"}.get(len(image) - 2, "")
        return f"cannot take images of {' x '.join(map(str, image[1:]))} (channels, {space}): {reason}"
    return None


def materialize(stage: Stage, build: Callable[[], nn.Module], device: torch.device | str, seed: int) -> Stage:
    """The stage on `device`, with exactly the values and modes that `build()` gives behind seeds.

    Initial values are drawn one after the other from one stream of random numbers. So the whole model is built on the
    CPU, once; the stage's part moves to the device and the rest is freed. The caller's random state stays as it is.

    Raises:
        ValueError: `build` makes another model than the one that was split.
    """
    with seeded(seed), torch.device("cpu"):
        model = build()
    made = Stage(stage.stage_program, model)
    wanted, got = _shapes(stage), _shapes(made)
    if wanted != got:
        name = min(name for name in {*wanted, *got} if wanted.get(name) != got.get(name))
        raise ValueError(
            f"build() made {name} of shape {got.get(name)}, but the model that was split has {wanted.get(name)}: "
            "build the same model on every rank"
        )
    del model
    return made.to(device)


def _shapes(stage: Stage) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in stage.state_dict().items()}
