"""PyTorch's own samples of operators on images: exact or refused on tiles, never wrong, and no rank alone in it.

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
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Arrangement, all_arrive, compare_results, difference, tiled
from tests.pool.ranks import Ranks, RanksFailed

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
    torch.manual_seed(SEED)  # for the same weights on all ranks
    wrong, our_loss, plain_loss = compare_results(comm, ours, plain, finite=True)
    if wrong or not plain_loss.requires_grad:
        return wrong
    our_loss = our_loss + sum((x.sum() * 0 for x in our_sources), torch.zeros(()))
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


MAPS = (3, 4)  # the dims of (C, H, W) and (N, C, H, W)
BATCHES = (4,)  # where PyTorch takes three dims for a batch of signals

OPERATORS = {
    **dict.fromkeys(
        """
        nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.max_pool2d nn.functional.avg_pool2d
        nn.functional.adaptive_avg_pool2d nn.functional.adaptive_max_pool2d nn.functional.fractional_max_pool2d
        nn.functional.normalize linalg.vector_norm linalg.norm norm norm/inf norm/fro
        nn.functional.layer_norm nn.functional.rms_norm
        nn.functional.pad/circular nn.functional.pad/constant nn.functional.pad/reflect nn.functional.pad/replicate
        nn.functional.pad/replicate_negative constant_pad_nd nn.functional.unfold unfold
        nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
        softmax softmax/with_dtype log_softmax log_softmax/with_dtype nn.functional.softmin
        nn.functional.softmin/with_dtype logsumexp
        nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits nn.functional.mse_loss
        nn.functional.l1_loss nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.kl_div
        nn.functional.gaussian_nll_loss nn.functional.poisson_nll_loss nn.functional.soft_margin_loss
        nn.functional.hinge_embedding_loss nn.functional.margin_ranking_loss
        all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod cumsum kthvalue logcumsumexp
        max/binary max/reduction_no_dim max/reduction_with_dim mean median min/binary min/reduction_no_dim
        roll flip fliplr flipud rot90 repeat_interleave unbind select __getitem__ dist
        matmul bmm __rmatmul__ baddbmm tensordot nn.functional.linear nn.functional.cosine_similarity
        nn.functional.grid_sample
        diff nn.functional.avg_pool3d
        min/reduction_with_dim mode msort nanmean nanmedian nanquantile nansum prod quantile sort argsort std
        std/unbiased std_mean std_mean/unbiased sum sum_to_size topk var var/unbiased var_mean var_mean/unbiased
        """.split(),
        MAPS,
    ),
    **dict.fromkeys(
        """
        nn.functional.batch_norm nn.functional.group_norm nn.functional.instance_norm nn.functional.local_response_norm
        nn.functional.interpolate/area nn.functional.interpolate/bicubic nn.functional.interpolate/bilinear
        nn.functional.interpolate/nearest nn.functional.interpolate/nearest-exact
        nn.functional.upsample_bilinear nn.functional.upsample_nearest
        nn.functional.cross_entropy nn.functional.nll_loss
        """.split(),
        BATCHES,
    ),
}
FEW = "nn.functional.avg_pool2d amax nn.functional.interpolate/bilinear"
MANY = "nn.functional.max_pool2d"  # has as many samples as all others together, and is left out of their share
LEAST_EXACT = 0.95
GRIDS = [Arrangement(2, 2), Arrangement(1, 3)]


def outcomes(ranks: Ranks, arrangement: Arrangement, names: list[str]) -> dict[str, list[Outcome]]:
    """Of each operator's samples; an operator that one rank left alone is one crash."""
    found: dict[str, list[Outcome]] = {}
    for name in names:
        try:
            for body in (try_operator, try_errors):
                rows = ranks(arrangement.num_ranks, timeout=2 * HANG_SECONDS).run(
                    body, name, OPERATORS[name], arrangement
                )
                found.setdefault(name, []).extend(max(row) for row in zip(*rows, strict=True))
        except RanksFailed as error:
            found.setdefault(name, []).append(Outcome(name, "crashed", str(error)))
    return found


def table(found: dict[str, list[Outcome]]) -> str:
    """Each operator's counts, and what is wrong with it."""
    lines = []
    for name, results in found.items():
        counts = Counter(outcome.word for outcome in results)
        lines.append(f"{name:50} {dict(counts)}")
        lines += [f"    {o.word}: {o.sample}: {o.detail}" for o in results if o.word not in ("exact", "refused")]
    return "\n".join(lines)


def check(found: dict[str, list[Outcome]]) -> None:
    everything = [outcome for results in found.values() for outcome in results]
    assert not [o for o in everything if o.word in ("wrong", "crashed")], table(found)
    samples = [
        o for name, results in found.items() if name != MANY for o in results if not o.sample.startswith("error")
    ]
    exact = sum(o.word == "exact" for o in samples)
    assert exact >= LEAST_EXACT * len(samples), f"{exact} of {len(samples)} are exact\n{table(found)}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("arrangement", GRIDS, ids=str)
def test_samples_of_all_operators_on_images_are_exact_or_refused(ranks: Ranks, arrangement: Arrangement) -> None:
    check(outcomes(ranks, arrangement, list(OPERATORS)))


def test_samples_of_some_operators_are_exact_or_refused(ranks: Ranks) -> None:
    check(outcomes(ranks, Arrangement(1, 2), FEW.split()))
