"""Which values of a program are one tensor, or views of it, and where one of them is changed in place.

y = x.view(-1)     a view: another value in the memory of x
x += 1             the same tensor as x, changed: so is y
"""

import operator
from collections.abc import Mapping

from torch import nn

from mpi4dl.parallel.pipeline.program import Attribute, Call, Program, Value

INPLACE = [getattr(operator, f"i{name}") for name in "add sub mul truediv floordiv mod pow and or xor".split()]
VIEWS = frozenset(
    "chunk contiguous data detach diagonal expand expand_as flatten getitem H imag mH mT movedim narrow permute real "
    "reshape reshape_as select split squeeze swapaxes t T to transpose type unbind unflatten unfold unsqueeze view "
    "view_as".split()
)


class Aliasing:
    """`written` are the atoms that change a tensor of the model in place, by its path.

    `changes` are in-place changes of values: the atom, the value, and the others that are in its memory.
    """

    def __init__(self, model: nn.Module, program: Program) -> None:
        self.model = model
        self.written: dict[str, set[int]] = {}
        self.changes: list[tuple[int, str, tuple[str, ...]]] = []
        self.parents: dict[str, str] = {}  # of what value another is a view
        self.same = same = {name: name for name in program.inputs}  # the first value that is the same tensor
        memory: dict[str, Value | Attribute] = {name: Value(name) for name in program.inputs}  # of which it is a view
        for i, atom in enumerate(program.atoms):
            for call in atom.calls:
                firsts = {args[0] for args, _ in (call.training, call.evaluation) if args and _is_reference(args[0])}
                same[call.name], memory[call.name] = call.name, Value(call.name)
                for first in firsts:
                    place = first if isinstance(first, Attribute) else memory[first.name]
                    if isinstance(first, Value) and (self._changes(call) or self._views(call)):
                        self.parents[call.name] = first.name
                    if self._changes(call):
                        if isinstance(place, Attribute):
                            self.written.setdefault(place.path, set()).add(i)
                        if isinstance(first, Value):
                            own = same[first.name]
                            views = {same[name] for name, where in memory.items() if where == place} - {own}
                            self.changes.append((i, own, tuple(sorted(views - {call.name}))))
                            same[call.name] = own
                        memory[call.name] = place
                    elif self._views(call):
                        memory[call.name] = place

    def came(self, name: str, made: Mapping[str, int], start: int) -> str:
        """The value that a stage receives of which this one is a view, or the first of those that it makes itself.

        `made` are the atoms that make values, and `start` is the stage's first.
        """
        while made[name] >= start and name in self.parents:
            name = self.parents[name]
        return self.same[name]

    def _changes(self, call: Call) -> bool:
        """Whether a call changes its first argument in place, and returns it."""
        if call.kind == "call_module":
            return bool(getattr(self.model.get_submodule(call.target), "inplace", False))
        if any(kwargs.get("inplace") for _, kwargs in (call.training, call.evaluation)):
            return True
        name = _name(call)
        return call.target in INPLACE or (name.endswith("_") and not name.endswith("__"))

    def _views(self, call: Call) -> bool:
        if call.kind == "call_module":
            return isinstance(self.model.get_submodule(call.target), nn.Identity | nn.Flatten | nn.Unflatten)
        if call.target is getattr:
            return call.training[0][1] in VIEWS
        return _name(call) in VIEWS


def _is_reference(value: object) -> bool:
    return isinstance(value, Value | Attribute)


def _name(call: Call) -> str:
    return call.target if isinstance(call.target, str) else getattr(call.target, "__name__", "")
