"""Facts of values, which are sizes, types and numbers made of them; and questions about facts that a forward asks.

    h, w = x.shape[-2:]
    if h % 32 or w % 32:             expect(h % 32, False)    expect(w % 32, False)
        raise ...

torch.fx does not know the answer. It is found for images of one shape, on the meta device; the program then asks the
question again of each batch, and goes on only if the answer is the same.
"""

import builtins
import math
import operator
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from mpi4dl.parallel.inputs import shape_only

FACTS = frozenset("shape dtype device ndim layout requires_grad is_cuda itemsize".split())
FACT_METHODS = frozenset("size dim ndimension numel nelement stride element_size is_floating_point".split())
ARITHMETIC = frozenset(
    function for place in (operator, math, builtins) for function in vars(place).values() if callable(function)
)


class Question(TraceError):
    """A forward asks whether the value of a node is true."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__("symbolically traced variables cannot be used as inputs to control flow")
        self.node = node


def expect(asked: Any, answer: bool, where: str) -> None:
    """Stands in a program where its model asks a question, whose answer decided which calls the program has."""
    if bool(asked) != answer:
        raise ValueError(
            f"the model does other things with samples of this shape than with those that it was cut into stages for: "
            f"a condition was {answer} there, and is {bool(asked)} here{where}; keep `image_size` and the batch as "
            "they are, or train in one stage"
        )


def answer(asked: fx.Node, model: nn.Module, image: Sequence[int]) -> bool | None:
    """Whether the node's value is true for a batch of this shape; None if that takes more than shapes to know.

    `model`, on the meta device, is the one whose forward was read.
    """
    if any(not tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        return None
    needed = {asked}
    for node in reversed(asked.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    known: dict[fx.Node, Any] = {}
    inputs = iter([shape_only(model, image)])
    try:
        with torch.no_grad():
            for node in asked.graph.nodes:
                if node in needed:
                    known[node] = next(inputs) if node.op == "placeholder" else _value(node, model, known)
            return bool(known[asked])
    except (RuntimeError, StopIteration, TypeError, ValueError):
        return None


def _value(node: fx.Node, model: nn.Module, known: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    if node.op == "get_attr":
        return attrgetter(str(node.target))(model)
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def is_fact(node: fx.Node, facts: set[fx.Node]) -> bool:
    """Whether the node's value is a size, a type, or a number computed from such."""
    if node.op == "call_method":
        return node.target in FACT_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in FACTS
    return node.target in ARITHMETIC and bool(node.all_input_nodes) and facts.issuperset(node.all_input_nodes)


def only_picks(node: fx.Node) -> bool:
    """Whether the node computes nothing, but looks at what was computed before."""
    return node.op == "call_function" and node.target in (operator.getitem, getattr, torch._assert, expect)
