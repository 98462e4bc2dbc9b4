"""The ways in which the methods of a group may be called: as C++ does, and as Python may, with tensors alone.

group.allreduce([x], options)         C++ and torch.distributed: lists, and an object of options
group.allreduce(x, ReduceOp.MAX)      programs: a tensor, and what those options hold
group.broadcast(x, root=1)
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

UNSET = timedelta(0)  # options without a time-out hold a negative one
OTHER_NAMES = {
    "tensor": "tensors",
    "output_tensor": "outputs",
    "output_tensors": "outputs",
    "output_lists": "outputs",
    "outputTensor": "output",
    "input_tensor": "inputs",
    "input_tensors": "inputs",
    "input_list": "inputs",
    "inputTensor": "input",
    "dstRank": "to",
    "srcRank": "source",
}


class CallOptions(NamedTuple):
    """What a call asks for beside its tensors. `op` is the name of a reduction, `factor` what PREMUL_SUM has."""

    op: str = "sum"
    factor: Any = 1
    root: int = 0
    timeout: timedelta | None = None

    @classmethod
    def of(cls, *given: Any, **named: Any) -> "CallOptions":
        """Read them from what is given, which says by its type what it is, or by its name."""
        options = cls()
        for value in (*given, *named.values()):
            if value is None:
                continue
            if isinstance(value, cls):
                return value
            if isinstance(value, timedelta):
                options = options._replace(timeout=value)
            elif isinstance(value, int):
                options = options._replace(root=value)
            elif isinstance(value, dist.ReduceOp):
                options = options._with(value)
            else:
                options = options._from_object(value)
        return options

    def _with(self, op: Any) -> "CallOptions":
        kind = op if isinstance(op, dist.ReduceOp.RedOpType) else op.op
        name = kind.name.lower()
        return self._replace(op=name, factor=op.factor if name == "premul_sum" else 1)

    def _from_object(self, options: Any) -> "CallOptions":
        found = self._with(options.reduceOp) if hasattr(options, "reduceOp") else self
        timeout = options.timeout if options.timeout > UNSET else None
        return found._replace(root=getattr(options, "rootRank", self.root), timeout=timeout or self.timeout)


def called_as(names: str, lists: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method that takes what `names` says, and then `CallOptions`, be called in all of the ways above.

    `lists`: it takes lists of what C++ passes in lists; else just tensors.
    """
    expected = names.split()

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            named = {OTHER_NAMES.get(name, name): value for name, value in named.items()}
            arguments = [*given[: len(expected)], *(named.pop(name) for name in expected[len(given) :])]
            options = CallOptions.of(*given[len(expected) :], **named)
            if lists and any(isinstance(argument, Tensor) for argument in arguments):
                arguments = [[argument] for argument in arguments]
            return method(self, *arguments, options)

        return call

    return decorate
