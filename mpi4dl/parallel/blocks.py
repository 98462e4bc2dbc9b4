"""The blocks of a model: what stands in a row, and may be computed again, or fetch its halo, as a whole."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpi4dl.parallel.pipeline.decisions import INTERNAL, PLAIN
from mpi4dl.parallel.pipeline.program import Value
from mpi4dl.parallel.pipeline.stage import Stage


def rows_of(module: nn.Module) -> list[list[nn.Module]]:
    """The blocks of a model, or the composite modules of a stage, in rows: each returns what the next one takes."""
    return _called(module) if isinstance(module, Stage) else _standing(module)


def _standing(model: nn.Module) -> list[list[nn.Module]]:
    """Rows of a model's blocks, as far as they stand in an ordinary Sequential; others by themselves."""
    left = dict.fromkeys(blocks(model))
    rows = []
    for module in model.modules():
        if type(module).forward is nn.Sequential.forward:
            for goes_on, members in groupby(list(module.children()), left.__contains__):
                rows += [list(members)] if goes_on else []
            for block in module.children():
                left.pop(block, None)
    return rows + [[block] for block in left]


def _called(stage: Stage) -> list[list[nn.Module]]:
    """Rows of the composite modules that a stage calls, each once."""
    rows: list[list[nn.Module]] = []
    known: set[nn.Module] = set()
    last = ""  # whose call was just before
    for call in stage.stage_program.calls:
        block = stage.get_submodule(call.target) if call.kind == "call_module" else None
        if block is None or block in known or next(block.children(), None) is None:
            last = ""
            continue
        goes_on = call.training == call.evaluation == ((Value(last),), {})
        rows = [*rows[:-1], [*rows[-1], block]] if goes_on else [*rows, [block]]
        known.add(block)
        last = call.name
    return rows


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks: the outermost composite modules that stand in a row, in a Sequential or a ModuleList."""
    rows = nn.Sequential | nn.ModuleList | nn.ModuleDict
    found: list[nn.Module] = []

    def is_block(module: nn.Module) -> bool:
        """Composite, with a forward of its own, and not itself a row of blocks."""
        if type(module).forward is nn.Module.forward:
            return False
        nested = any(any(True for _ in child.children()) for child in module.children())
        return any(True for _ in module.children()) and not (isinstance(module, rows) and nested)

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, rows) and is_block(child):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


# State of modules, buffers and in Python, such as counters: a repeated forward pass finds it unchanged.


class Buffers:
    """The buffers of a module, or None, and their places: a forward pass may write to them, or put others there."""

    def __init__(self, module: nn.Module) -> None:
        places = ((each._buffers, name) for each in module.modules() for name in each._buffers)
        self._found = [(own, name, own[name]) for own, name in places]

    def values(self) -> list[Tensor | None]:
        return [None if buffer is None else buffer.clone() for _, _, buffer in self._found]

    @torch.no_grad()
    def assign(self, values: Sequence[Tensor | None]) -> None:
        for (own, name, buffer), value in zip(self._found, values, strict=True):
            own[name] = value if buffer is None or value is None else buffer.copy_(value)


class Attributes:
    """The attributes of `modules` that are numbers, text, None or tuples of these, and the states of generators."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._values = [(vars(module), _plain_values(vars(module))) for module in modules]
        self._generators = [
            state for values, _ in self._values for value in values.values() if (state := _state_of(value)) is not None
        ]

    def put(self) -> None:
        """Let modules have these values again."""
        for values, before in self._values:
            now = _plain_values(values)
            for name in now.keys() - before.keys():
                del values[name]
            for name, value in before.items():
                if values.get(name, values) is not value:
                    values[name] = value
        for put in self._generators:
            put()

    def differ(self) -> bool:
        """Whether a module has other values now."""
        return any(_plain_values(values) != before for values, before in self._values)


def _plain_values(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in INTERNAL and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _state_of(value: Any) -> Callable[[], Any] | None:
    """A function that restores the state of a generator; None if this is no generator."""
    if isinstance(value, torch.Generator):
        drawn = value.get_state()
        return lambda: value.set_state(drawn)
    if isinstance(value, np.random.Generator):
        bits, state = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        known = value.get_state(legacy=False)
        return lambda: value.set_state(known)
    if isinstance(value, random.Random):
        own = value.getstate()
        return lambda: value.setstate(own)
    return None
