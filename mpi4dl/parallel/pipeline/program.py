"""What a model's forward pass does, as data: its calls, grouped to atoms, between any two of which it can be cut."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpi4dl.parallel.pipeline.decisions import Watch
from mpi4dl.parallel.pipeline.facts import FACT_METHODS, FACTS
from mpi4dl.parallel.pipeline.handover import map_leaves

LOOKS = FACTS - {"requires_grad", "layout"}  # what can be told of a tensor by its shape, type and device
LOOK_METHODS = FACT_METHODS - {"stride"}
Context = tuple[Any, ...]  # ("grad", enabled) and ("autocast", device, dtype, enabled), from the outermost on


@dataclass(frozen=True)
class Value:
    """Stands in a call's arguments for an input of the model or for the result of an earlier call."""

    name: str


@dataclass(frozen=True)
class Attribute:
    """Stands in a call's arguments for the model's parameter, buffer or module of that path."""

    path: str


@dataclass(frozen=True)
class Call:
    """One call of the forward pass; `training` and `evaluation` are its (args, kwargs) in the two modes.

    `target` is the path of a module, a function, or the name of a method of the first argument. `scope` is the path of
    the opened module whose mode that is: of the one whose forward makes the call, or of the model. `made` is whether
    the model makes the call at all in training, and in evaluation: an auxiliary head is for training alone. `contexts`
    are those in which it is made in the two modes, such as `torch.no_grad()`.
    """

    name: str
    kind: str
    target: Any
    training: tuple[Any, Any]
    evaluation: tuple[Any, Any]
    scope: str
    made: tuple[bool, bool] = (True, True)
    contexts: tuple[Context, Context] = ((), ())

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(leaf.name for leaf in self._references if isinstance(leaf, Value))

    @property
    def attributes(self) -> frozenset[str]:
        """The paths of what it uses of the model; tensors that it only looks at are none."""
        if self.kind == "call_module":
            return self._paths | {self.target}
        return frozenset() if self.looks else self._paths

    @property
    def looks(self) -> frozenset[str]:
        """The paths of tensors of which it asks but the shape, the type or the device."""
        if self.kind == "call_function" and self.target is getattr:
            asks = all(args[1] in LOOKS for args, _ in (self.training, self.evaluation))
        else:
            asks = self.kind == "call_method" and self.target in LOOK_METHODS
        return self._paths if asks else frozenset()

    @property
    def _paths(self) -> frozenset[str]:
        return frozenset(leaf.path for leaf in self._references if isinstance(leaf, Attribute))

    @property
    def _references(self) -> "set[Value | Attribute]":
        return references((self.training, self.evaluation))


@dataclass(frozen=True)
class Atom:
    """What is never cut: one call, and what picks members and sizes from results around it."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Program:
    """A model's forward pass. `output` are its results in training and in evaluation, with a `Value` for each tensor.

    `kept_whole` says why modules that would have been opened were not. `watched` are values of Python that the forward
    read as it was traced: the program is right as long as they are as they were.
    """

    inputs: tuple[str, ...]
    atoms: tuple[Atom, ...]
    output: tuple[Any, Any]
    kept_whole: Mapping[str, str] = field(default_factory=dict)
    watched: tuple[Watch, ...] = ()


def references(nested: Any) -> set[Value | Attribute]:
    """The values and attributes that arguments, or the output, refer to."""
    found: set[Value | Attribute] = set()
    map_leaves(lambda leaf: found.add(leaf) if isinstance(leaf, Value | Attribute) else None, nested)
    return found
