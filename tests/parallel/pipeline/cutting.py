"""Runs the stages of a model one after the other, with nothing but tensors, headers and gradients between them."""

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.parallel.pipeline.checking import check_cut
from mpi4dl.parallel.pipeline.program import map_leaves, pack, unpack
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.pipeline.stage import Stage

SEED = 7


def tensors_of(nested: Any) -> list[Tensor]:
    return pack((nested,))[0]


def loss_of(output: Any) -> Tensor:
    """A loss that weighs every element of every tensor of the output differently."""
    total = torch.zeros(())
    for i, tensor in enumerate(tensors_of(output), start=1):
        weights = torch.linspace(-1, i, tensor.numel(), dtype=tensor.dtype).view_as(tensor)
        total = total + (tensor * weights).sum() + tensor.square().mean()
    return total


def plain_step(model: nn.Module, *inputs: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """The output of the model, and its gradients and buffers after one backward pass, all by name."""
    torch.manual_seed(SEED)
    output = model(*inputs)
    if model.training:
        loss_of(output).backward()
    return output, values_of([model])


def stepped(cuttable: Cuttable, counts: Sequence[int], *inputs: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """`staged_step` of the model cut so; the model itself stays as it was before."""
    with unchanged(cuttable.model):
        return staged_step(cuttable.stages(counts), *inputs)


def assert_cuts_like_the_model(cuttable: Cuttable, all_counts: Iterable[Sequence[int]], *inputs: Tensor) -> None:
    """Cut in each of these ways, the stages do what the model does."""
    with unchanged(cuttable.model):
        expected = plain_step(cuttable.model, *inputs)
    for counts in all_counts:
        assert_same_step(stepped(cuttable, counts, *inputs), expected)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Without gradients at the start, and with the same buffers at the end."""
    model.zero_grad()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    model.zero_grad()


def staged_step(stages: Sequence[Stage], *inputs: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """The same from the stages, each of which gets copies of what the one before it sends."""
    torch.manual_seed(SEED)
    values: tuple[Any, ...] = inputs
    received: list[list[Tensor]] = []
    sent: list[list[Tensor]] = []
    for stage in stages[:-1]:
        outputs, header = pack(stage(*values), stage.stage_program.outputs)
        sent.append(outputs)
        received.append(
            [
                t.detach().clone().requires_grad_(spec.requires_grad)
                for t, spec in zip(outputs, header.tensors, strict=True)
            ]
        )
        assert len({id(t) for t in outputs}) == len(outputs)
        values = unpack(received[-1], header)
    output = stages[-1](*values)
    if stages[0].training:
        loss_of(output).backward()
        for outputs, copies in zip(reversed(sent), reversed(received), strict=True):
            pairs = [(t, c.grad) for t, c in zip(outputs, copies, strict=True) if c.grad is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return output, values_of(stages)


def problem_of(build: Callable[[], nn.Module], cut: int | str, image: tuple[int, ...]) -> str:
    """How the model cut before a unit differs from the plain one, by running both; '' if it does not."""
    cuttable = Cuttable(outline(build), image=image)
    at = cuttable.names.index(cut) if isinstance(cut, str) else cut
    parts = [[stage.stage_program] for stage in cuttable.stages((at, len(cuttable) - at))]
    found = check_cut(cuttable, parts, build, SEED, image)
    assert found.left_out is None
    return found.problem or ""


def values_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Gradients and buffers by name; stages that have the same name must have the same parameter."""
    found: dict[str, Tensor] = {}
    known: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            assert known.setdefault(name, parameter) is parameter
            found[name] = torch.tensor(torch.nan) if parameter.grad is None else parameter.grad
        for name, buffer in module.named_buffers():
            assert name not in found
            found[name] = buffer.clone()
    return found


def random_counts(num_units: int, stages: int, seed: int = 0) -> tuple[int, ...]:
    cuts = sorted(random.Random(seed * 1000 + stages).sample(range(1, num_units), stages - 1))
    bounds = [0, *cuts, num_units]
    return tuple(high - low for low, high in pairwise(bounds))


def assert_same_step(got: tuple[Any, dict[str, Tensor]], expected: tuple[Any, dict[str, Tensor]]) -> None:
    """Bit for bit, and in the same structure, whose containers have the same types."""
    assert map_leaves(type, got[0]) == map_leaves(type, expected[0])
    assert type(got[0]) is type(expected[0])
    for mine, other in zip(tensors_of(got[0]), tensors_of(expected[0]), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert got[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(
            got[1][name], value, rtol=0, atol=0, equal_nan=True, msg=functools.partial("{}: {}".format, name)
        )
