"""PyTorch's own samples of operators on images: exact or refused on tiles, never wrong, and no rank alone in it."""

from collections import Counter

import pytest

from tests.parallel.spatial.comparing import Arrangement
from tests.parallel.spatial.operator_samples import HANG_SECONDS, Outcome, try_errors, try_operator
from tests.pool.ranks import Ranks, RanksFailed

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
                rows = ranks(arrangement.size, timeout=2 * HANG_SECONDS).run(body, name, OPERATORS[name], arrangement)
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
    check(outcomes(ranks, Arrangement(2, 2), FEW.split()))
