"""Random statements on an image that is spread over ranks, against plain PyTorch on the whole image.

Values with ties, equal ones, infinities and NaN; images of 1 to 3 axes, smaller than the grid, and tiles without
pixels; integers and truth values; memory formats; with gradients, without, and in inference mode.
"""

import math
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Arrangement, all_arrive, arrange, compare_results, difference
from tests.pool.ranks import Ranks, RanksFailed

SECONDS = 60.0
SCALE = 1e4  # of rounding: norms of equal pixels divide by the root of their epsilon
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": lambda x: (2 * x).round(),
    "equal": lambda x: torch.full_like(x, 0.5),
    "zero": torch.zeros_like,
    "infinite": lambda x: torch.where(x > 1, torch.inf, torch.where(x < -1, -torch.inf, x)),
    "no numbers": lambda x: torch.where(x > 1, torch.nan, x),
    "huge": lambda x: 1e150 * x,
}
DTYPES = {"float64": torch.float64, "int64": torch.int64, "bool": torch.bool, "uint8": torch.uint8}
MODES = {"gradients": torch.enable_grad, "none": torch.no_grad, "inference": torch.inference_mode}


@dataclass(frozen=True)
class Statements:
    """Lines of Python on `x`, the image of `shape`, and `y`, another one like it."""

    lines: tuple[str, ...]
    shape: tuple[int, ...]
    arrangement: Arrangement
    values: str = "normal"
    dtype: str = "float64"
    channels_last: bool = False
    mode: str = "gradients"
    both: bool = True
    seed: int = 0

    def images(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for _ in range(2):
            image = VALUES[self.values](torch.randn(self.shape, generator=generator, dtype=torch.float64))
            if self.dtype != "float64":
                image = (2 * image.nan_to_num(0, 1, -1).clamp(-100, 100)).abs().to(DTYPES[self.dtype])
            if self.channels_last:
                formats = {4: torch.channels_last, 5: torch.channels_last_3d}
                image = image.contiguous(memory_format=formats[image.dim()])
            found.append(image)
        return found

    def run(self, x: Tensor, y: Tensor) -> Any:
        names = {"torch": torch, "F": F, "x": x, "y": y}
        torch.manual_seed(self.seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec("\n".join(self.lines), names)
        finally:
            torch.set_default_dtype(before)
        return names["x"]

    def plain(self) -> tuple[Any, list[Tensor]]:
        sources = [self._source(image) for image in self.images()]
        with MODES[self.mode]():
            return self.run(
                *(source * 1 if source.is_floating_point() else source.clone() for source in sources)
            ), sources

    def _source(self, image: Tensor) -> Tensor:
        return image.requires_grad_() if self.mode == "gradients" and image.is_floating_point() else image


def compare(comm: Communicator, statements: Statements) -> str:
    """A body: "exact", "refused: ...", or what is wrong."""
    torch.set_default_dtype(torch.float64)
    control = comm.split(0)
    try:
        said = _compare(comm, statements)
    except (spatial.NoRule, NotImplementedError) as error:
        said = f"refused: {str(error).split('. Either')[0]}"
    except Exception:
        said = traceback.format_exc(limit=-4)
    if not all_arrive(control, SECONDS / 3 if said != "exact" else math.inf):
        raise AssertionError(f"other ranks wait for this one: {said}")
    return said


def _compare(comm: Communicator, statements: Statements) -> str:
    plain, plain_sources = statements.plain()
    sources = [statements._source(image) for image in statements.images()]
    with MODES[statements.mode]():
        spread = [arrange(source, comm, statements.arrangement) for source in sources]
        if not statements.both:
            spread[1] = sources[1]
        ours = statements.run(*(each * 1 if each.is_floating_point() else each.clone() for each in spread))
        torch.manual_seed(statements.seed)
        wrong, our_loss, plain_loss = compare_results(comm, ours, plain, finite=True, scale=SCALE)
    if not wrong and statements.mode == "gradients" and plain_loss.requires_grad:
        our_loss = our_loss + sum((x.sum() * 0 for x in sources if x.requires_grad), torch.zeros(()))
        plain_loss = plain_loss + sum((x.sum() * 0 for x in plain_sources if x.requires_grad), torch.zeros(()))
        expected = torch.autograd.grad(plain_loss, [x for x in plain_sources if x.requires_grad])
        found = torch.autograd.grad(our_loss, [x for x in sources if x.requires_grad])
        for number, (mine, whole) in enumerate(zip(found, expected, strict=True)):
            if statements.both or number == 0:
                wrong += difference(f"gradient {number}", comm.all_reduce(mine.clone()), whole, SCALE)
    return "; ".join(wrong) or "exact"


def problem(ranks: Ranks, statements: Statements) -> str | None:
    try:
        found = ranks(statements.arrangement.num_ranks, SECONDS).run(compare, statements)
    except RanksFailed as error:
        return str(error)
    if all(each == "exact" for each in found):
        return None
    if len(set(found)) > 1 and any(each.startswith("refused") for each in found):
        return f"ranks say different: {found}"
    return next(each for each in found if each != "exact")


# What is drawn: lines with {names} of what is drawn for them.

UNARY = (
    "abs sin tanh exp sigmoid relu neg square floor round sign logical_not isnan isfinite nan_to_num rsqrt log1p erf "
    "reciprocal frac trunc angle positive conj isinf ceil sinc softplus"
).split()
BINARY = "add sub mul div maximum minimum atan2 fmod remainder hypot copysign eq lt logical_and fmax where".split()
LINES = (
    "x = x.{unary}()",
    "x = torch.{binary}(x, y)",
    "x = x + y.mean({dims}, keepdim=True)",
    "x = x.{reduction}({dims}, keepdim={truth})",
    "x = x.{indexed}({dim}, keepdim={truth})",
    "x = x.{indexed}({dim})[1] + x.amax()",
    "x = x.{whole}()",
    "x = x.{cumulative}({dim})",
    "x = x.cummax({dim})",
    "x = x.sort({dim}, stable=True)[0]",
    "x = x.sort({dim}, descending={truth}, stable=True)",
    "x = x.topk(min({small}, x.shape[{dim}]), {dim})[0]",
    "x = x.kthvalue(1, {dim})[0]",
    "x = x.{soft}({dim})",
    "x = F.normalize(x, dim={dim})",
    "x = x.flip({dims})",
    "x = x.roll({shift}, {dim})",
    "x = x.transpose({dim}, {other})",
    "x = x.movedim({dim}, {other})",
    "x = x.narrow({dim}, 0, max(1, x.shape[{dim}] // 2))",
    "x = x.select({dim}, {index})",
    "x = x.unbind({dim})[{index}]",
    "x = x.unsqueeze({dim})",
    "x = x.squeeze({dim})",
    "x = x.flatten({dim}, {other})",
    "x = x.reshape(*x.shape[:{positive}], -1)",
    "x = x.unflatten({dim}, (1, -1))",
    "x = x.chunk({small}, {dim})[-1]",
    "x = x.split({small}, {dim})[0]",
    "x = torch.cat([x, y], {dim})",
    "x = torch.cat([x, x[..., :{small}]], -1)",
    "x = torch.stack([x, y], {dim})[0]",
    "x = x.repeat_interleave({small}, {dim})",
    "x = x.repeat(*[1] * (x.dim() - 1), {small})",
    "x = x.expand(*x.shape)",
    "x = x[..., ::{small}]",
    "x = x[..., {shift}:]",
    "x = x[..., :{shift}]",
    "x = x[..., None, :]",
    "x = x[:, {index}]",
    "x = x[..., [0, {index}]]",
    "x = x.index_select({dim}, torch.tensor([0, 0]))",
    "x = x.gather({dim}, (y > 0).long() * (x.shape[{dim}] - 1))",
    "x = x.take_along_dim(y.argsort({dim}, stable=True), {dim})",
    "x = torch.where(y > 0, x, {number})",
    "x = x.masked_fill(y > 0, {number})",
    "x = x.clamp({number}, 1)",
    "x = x.diff(dim={dim})",
    "x = x.tril() if {truth} else x.triu({shift})",
    "x = F.pad(x, ({pad}, {pad2}))",
    "x = F.pad(x, ({pad}, {pad2}, {pad2}, {pad}), value={number})",
    "x = F.pad(x, ({pad}, {pad2}), mode='{padding}')",
    "x = F.interpolate(x, scale_factor={scale}, mode='nearest')",
    "x = F.interpolate(x, scale_factor={scale}, mode='nearest-exact')",
    "x = F.interpolate(x, size=x.shape[2:][0] + {small}, mode='nearest')",
    "x = F.unfold(x, {small}, padding={pad3}, stride={small2})",
    "x = F.max_pool{axes}d(x, {small}, {small2}, return_indices={truth})",
    "x = F.avg_pool{axes}d(x, {small}, {small2}, ceil_mode={truth}, count_include_pad=False)",
    "x = F.lp_pool{axes}d(x, 2, {small}, {small2})",
    "x = F.adaptive_avg_pool{axes}d(x, {small})",
    "x = F.adaptive_max_pool{axes}d(x, {small})",
    "x = F.conv{axes}d(x, torch.ones(2, x.shape[1], *[{small}] * {axes}), stride={small2}, padding={pad3})",
    "x = F.conv_transpose{axes}d(x, torch.ones(x.shape[1], 2, *[{small}] * {axes}), stride={small2})",
    "x = x @ torch.ones(x.shape[-1], 3)",
    "x = torch.ones(3, x.shape[-2]) @ x",
    "x = x @ y.transpose(-1, -2)",
    "x = torch.einsum('ab...,ab...->a...', x, y)",
    "x = F.linear(x, torch.ones(2, x.shape[-1]))",
    "x = F.group_norm(x, 1)",
    "x = F.instance_norm(x)",
    "x = F.layer_norm(x, x.shape[{dim}:])",
    "x = F.batch_norm(x, None, None, training=True)",
    "x = F.local_response_norm(x, 2)",
    "x = F.cosine_similarity(x, y, {dim})",
    "x = F.pairwise_distance(x, y)",
    "x = F.mse_loss(x, y, reduction='{loss}')",
    "x = F.smooth_l1_loss(x, y, reduction='{loss}')",
    "x = F.cross_entropy(x, y.argmax(1), reduction='{loss}')",
    "x = F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction='{loss}')",
    "x = F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2)",
    "x = F.pixel_unshuffle(x, 1)",
    "x = F.one_hot(x.long().clamp(0, 2), 3)",
    "x = F.glu(x.repeat_interleave(2, {dim}), {dim})",
    "x = torch.linalg.vector_norm(x, dim={dims})",
    "x = x.var({dims}, correction={pad3}, keepdim={truth})",
    "x = x.std({dims})",
    "x = x.logsumexp({dims})",
    "x = x.unfold({dim}, {small}, {small2})",
    "x = x.long()",
    "x = x.to(torch.bool)",
    "x = x.detach() * y",
    "x = x.contiguous() + y.contiguous()",
    "x[..., ::2] = 0",
    "x[..., {index}] += 1",
    "x[x > 0] = {number}",
    "x[..., :1] = y[..., :1]",
    "x.mul_(2).add_(y)",
    "x.{unary}_()",
    "x.copy_(y)",
    "x.fill_({number})",
    "x.zero_()",
    "x.clamp_(min={number})",
    "x.masked_fill_(y > 0, {number})",
    "x.transpose({dim}, {other}).add_(1)",
    "y = x.view(x.shape); x = x + 1; x = x + y",
    "y = x[..., 1:]; y += 1",
    "x, y = y, x",
    "y = y * x.sum()",
    "x = (x, y)[{pad3}]",
    "x = x * x.shape[{dim}] + x.numel() + x.size(0)",
    "x = x + torch.arange(x.shape[-1])",
    "x = x + torch.linspace(0, 1, x.shape[-2])[:, None]",
    "x = x + torch.zeros_like(x) + torch.ones_like(x) + x.new_zeros(x.shape)",
    "x = torch.full_like(x, {number}) * x",
    "x = x.sum().item() * x",
    "x = x if x.mean() > 0 else -x",
    "x = x.bucketize(torch.tensor([-1.0, 0.0, 1.0]))",
    "x = x.nonzero()",
    "x = x[y > 0]",
    "x = x.unique()",
    "x = x.histc(4, -2, 2)",
    "x = x.all({dim}) if {truth} else x.any({dim})",
    "x = x.count_nonzero({dim})",
    "x = x.argsort({dim}, stable=True)",
    "x = x.tolist() and x",
    "x = torch.fft.rfft(x, dim={dim}).real",
    "x = torch.func.vmap(lambda a: a.sin())(x)",
    "x = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)",
)  # fmt: skip


@st.composite
def lines(draw: st.DrawFn, axes: int) -> str:
    dims = st.integers(-axes - 2, axes + 1)
    draws: dict[str, st.SearchStrategy[Any]] = {
        "unary": st.sampled_from(UNARY),
        "binary": st.sampled_from(BINARY),
        "reduction": st.sampled_from(["sum", "mean", "amax", "amin", "nansum", "any", "all", "prod", "logsumexp"]),
        "indexed": st.sampled_from(["max", "min", "median", "nanmedian", "mode"]),
        "whole": st.sampled_from(["sum", "mean", "max", "min", "argmax", "argmin", "norm", "var", "median", "aminmax"]),
        "cumulative": st.sampled_from(["cumsum", "cumprod", "logcumsumexp"]),
        "soft": st.sampled_from(["softmax", "log_softmax"]),
        "dim": dims,
        "other": dims,
        "dims": st.one_of(dims.map(str), st.lists(dims, min_size=1, max_size=2).map(lambda each: str(tuple(each)))),
        "truth": st.booleans(),
        "small": st.integers(1, 3),
        "small2": st.integers(1, 3),
        "positive": st.integers(1, axes + 1),
        "index": st.sampled_from([0, 0, -1, 1]),
        "shift": st.integers(-3, 3),
        "number": st.sampled_from([0.5, 0, -1]),
        "pad": st.integers(-1, 3),
        "pad2": st.integers(-1, 3),
        "pad3": st.integers(0, 1),
        "padding": st.sampled_from(["reflect", "replicate", "circular"]),
        "scale": st.sampled_from([2, 0.5, 1.5]),
        "loss": st.sampled_from(["mean", "sum", "none"]),
        "axes": st.just(axes),
    }
    template = draw(st.sampled_from(LINES))
    for name, values in draws.items():
        if f"{{{name}}}" in template:
            template = template.replace(f"{{{name}}}", str(draw(values)))
    return template


NORMS = ("norm", "distance", "std", "var", "prod", "cosine")  # whose gradients are NaN at other places among infinities


ARRANGEMENTS = {
    1: [
        Arrangement(2), Arrangement(3), Arrangement(3, style="uneven"), Arrangement(2, style="empty"),
        Arrangement(2, batch=2), Arrangement(4, style="wide"),
    ],
    2: [
        Arrangement(1, 2), Arrangement(2, 2), Arrangement(1, 3, style="uneven"), Arrangement(2, 2, style="wide"),
        Arrangement(2, 1, style="empty"), Arrangement(1, 2, batch=2), Arrangement(4, 1), Arrangement(1, 1, batch=3),
    ],
    3: [Arrangement(1, 2, depth=2), Arrangement(2, 1, depth=1), Arrangement(1, 2, depth=1, batch=2)],
}  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Statements:
    axes = draw(st.sampled_from([2, 2, 1, 3]))
    sides = st.integers(1, 40) if axes == 1 else st.integers(1, 9)
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), *(draw(sides) for _ in range(axes)))
    statements = Statements(
        tuple(draw(st.lists(lines(axes), min_size=1, max_size=4))),
        shape,
        draw(st.sampled_from(ARRANGEMENTS[axes])),
        draw(st.sampled_from(sorted(VALUES))),
        draw(st.sampled_from(["float64", *DTYPES])),
        axes > 1 and draw(st.booleans()),
        draw(st.sampled_from(["gradients", *MODES])),
        draw(st.booleans()),
        draw(st.integers(0, 9)),
    )
    endless = statements.values in ("infinite", "no numbers") and statements.mode == "gradients"
    assume(not endless or not any(word in line for line in statements.lines for word in NORMS))
    try:
        result = statements.plain()[0]
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        grown = sum((leaf.sum() for leaf in leaves if leaf.requires_grad), torch.zeros(()))
        if grown.requires_grad:
            grown.backward()
        for leaf in leaves:
            assume(leaf.numel() <= 1 << 16)
            if leaf.is_floating_point():
                assume(not leaf.isfinite().any() or float(leaf[leaf.isfinite()].abs().max()) < 1e200)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AttributeError):
        assume(False)
    return statements
