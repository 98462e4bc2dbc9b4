"""PyTorch's own samples of its operators, on maps that are spread over ranks and on whole ones.

A sample is a call: an input, and arguments. Each of its tensors that is a map is spread over the grid, also where it
has fewer rows or columns than the grid: then some parts are empty. What comes out is one word for each sample: it was
"exact" in values, shapes, dtypes and gradients; it was "refused" alike by all ranks; or it was "wrong" or "crashed".
"""

import math
import sys
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Arrangement, all_arrive, difference, tiled

SEED = 3
HANG_SECONDS = 600.0


class Outcome(NamedTuple):
    """What became of one sample: "exact", "refused", "wrong" or "crashed", and how."""

    sample: str
    word: str
    detail: str = ""


class Call(NamedTuple):
    """A sample: what is called with which arguments, which of the tensors among them are maps, and its name."""

    function: Callable[..., Any]
    arguments: Any
    maps: tuple[int, ...]
    name: str


def operators() -> dict[str, Any]:
    """PyTorch's table of operators, by name and variant."""
    if "expecttest" not in sys.modules:
        # PyTorch's tests use a package for tests of printed text; its samples need the name alone.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {f"{op.name}/{op.variant_test_name}".rstrip("/"): op for op in op_db}


def calls(name: str, dims: tuple[int, ...]) -> Iterator[Call]:
    """The samples of an operator whose input has that many dims; once more where other arguments are maps like it."""
    op = operators()[name]
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd))
    for number, sample in enumerate(samples):
        arguments = ((sample.input, *sample.args), sample.kwargs)
        leaves = pytree.tree_leaves(arguments)
        if not isinstance(sample.input, Tensor) or sample.input.dim() not in dims:
            continue
        alike = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.shape == sample.input.shape]
        text = f"{number}: {_summary(sample.input)} {_summary(sample.args)} {_summary(sample.kwargs)}"
        yield Call(op.op, arguments, (0,), text)
        if len(alike) > 1:
            yield Call(op.op, arguments, tuple(alike), f"{text}, all spread")


def _summary(value: Any) -> str:
    described = pytree.tree_map_only(Tensor, lambda t: f"<{tuple(t.shape)}>", value)
    return str(described)


def spread(x: Tensor, comm: Communicator, arrangement: Arrangement) -> spatial.SpatialTensor:
    return tiled(x, spatial.Grid.of(comm, arrangement.shape))


def run(call: Call, spreading: Callable[[Tensor], Tensor]) -> tuple[Any, list[Tensor]]:
    """The result, and the tensors that may get gradients."""
    leaves, structure = pytree.tree_flatten(call.arguments)
    sources = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    differentiable = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            differentiable.append(sources[i].requires_grad_())
    used = [spreading(source) if i in call.maps else source for i, source in enumerate(sources)]
    args, kwargs = pytree.tree_unflatten(used, structure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        return call.function(*args, **kwargs), differentiable


def compare_call(call: Call, comm: Communicator, arrangement: Arrangement) -> list[str]:
    """What differs between maps that are spread and whole ones."""
    plain, plain_sources = run(call, lambda x: x)
    ours, our_sources = run(call, lambda x: spread(x, comm, arrangement))
    plain_leaves, plain_structure = pytree.tree_flatten(plain)
    our_leaves, our_structure = pytree.tree_flatten(ours)
    if our_structure != plain_structure:
        return [f"the result is {our_structure}, but plain {plain_structure}"]
    wrong = []
    plain_loss, our_loss = torch.zeros(()), sum((x.sum() * 0 for x in our_sources), torch.zeros(()))
    for i, (mine, whole) in enumerate(zip(our_leaves, plain_leaves, strict=True)):
        if not isinstance(whole, Tensor):
            wrong += [] if mine == whole else [f"result {i}: {mine}, but plain {whole}"]
            continue
        if mine.requires_grad != whole.requires_grad:
            wrong.append(f"result {i}: requires_grad is {mine.requires_grad}, but plain {whole.requires_grad}")
        gathered = spatial.gather(mine)
        differences = difference(f"result {i}", gathered.detach(), whole.detach())
        wrong += differences
        if whole.requires_grad and not differences:
            torch.manual_seed(SEED)
            weight = torch.randn_like(whole.detach())
            plain_loss = plain_loss + (whole * weight).nan_to_num(0, 0, 0).sum()
            our_loss = our_loss + (gathered * weight).nan_to_num(0, 0, 0).sum() / comm.size
    if wrong or not plain_loss.requires_grad:
        return wrong
    plain_gradients = torch.autograd.grad(plain_loss, plain_sources, allow_unused=True)
    our_gradients = torch.autograd.grad(our_loss, our_sources, allow_unused=True)
    for i, (mine, whole) in enumerate(zip(our_gradients, plain_gradients, strict=True)):
        total = comm.all_reduce(mine.detach().clone())
        wrong += difference(f"gradient {i}", total, torch.zeros_like(total) if whole is None else whole, 1e2)
    return wrong


def judge(call: Call, comm: Communicator, arrangement: Arrangement) -> tuple[str, str]:
    try:
        wrong = compare_call(call, comm, arrangement)
    except spatial.NoRule as error:
        return "refused", str(error).split(". Either")[0]
    except Exception:
        return "crashed", traceback.format_exc(limit=-4)
    return ("wrong", "; ".join(wrong)) if wrong else ("exact", "")


def try_operator(comm: Communicator, name: str, dims: tuple[int, ...], arrangement: Arrangement) -> list[Outcome]:
    """What became of each of an operator's samples: on this rank, or of all ranks if they do not agree."""
    torch.set_default_dtype(torch.float64)
    control = comm.split(0)  # so that its barrier is not taken for a collective of the call
    outcomes = []
    for call in calls(name, dims):
        word, detail = judge(call, comm, arrangement)
        if not all_arrive(control, HANG_SECONDS if word in ("refused", "crashed") else math.inf):
            raise AssertionError(f"{call.name} is {word} while other ranks wait: {detail}")
        answers = control.all_gather_object((word, detail))
        if len({answer for answer, _ in answers}) > 1:
            word, detail = "wrong" if any(a == "wrong" for a, _ in answers) else "crashed", str(answers)
        outcomes.append(Outcome(call.name, word, detail))
    return outcomes


def try_errors(comm: Communicator, name: str, dims: tuple[int, ...], arrangement: Arrangement) -> list[Outcome]:
    """What PyTorch says must be an error: whether every rank raises one too."""
    op = operators()[name]
    if op.error_inputs_func is None:
        return []
    torch.set_default_dtype(torch.float64)
    control = comm.split(0)
    outcomes = []
    torch.manual_seed(SEED)
    for number, wrong in enumerate(op.error_inputs("cpu")):
        sample = wrong.sample_input
        if not isinstance(sample.input, Tensor) or sample.input.dim() not in dims:
            continue
        call = Call(op.op, ((sample.input, *sample.args), sample.kwargs), (0,), f"error {number}: {sample.summary()}")
        try:
            run(call, lambda x: x)
            continue
        except Exception:
            word, detail = "wrong", "nothing was raised"
        try:
            run(call, lambda x: spread(x, comm, arrangement))
        except Exception as error:
            word, detail = "refused", f"{type(error).__name__}: {error}"
        if not all_arrive(control, HANG_SECONDS if word == "refused" else math.inf):
            raise AssertionError(f"{call.name} is {word} while other ranks wait: {detail}")
        words = [answer for answer, _ in control.all_gather_object((word, detail))]
        outcomes.append(Outcome(call.name, word if len(set(words)) == 1 else "crashed", detail))
    return outcomes
