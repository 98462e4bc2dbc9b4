"""Mixture of experts: a router sends each token to a few of many feed-forward layers, which are its experts.

    x (.., T, C) -> router -> chosen (.., T, k), weights (.., T, k)     k of E experts for each token
                 -> experts -> y = sum over the k of weight * expert(x)  +  a shared expert of all tokens

Shazeer et al. 2017, "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer",
https://arxiv.org/abs/1701.06538. Every number that decides where a token goes is of its own sequence, or of the whole
batch: what is computed does not depend on how a batch is divided among ranks.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl.models.transformer import INITIAL_STD, Activation, FeedForward, check_sizes, default_ff_dim

Scoring = Literal["softmax", "sigmoid"]
GROUPED, ALIGNED_BYTES = (torch.float32, torch.bfloat16), 16  # what grouped_mm takes on CPUs and GPUs


@dataclass(frozen=True)
class Mixture:
    """Options of models whose feed-forward layers are mixtures of experts; those of routing are explained by `Router`.

    Every `every`-th block has one, the last among them. `top_k` of `num_experts` are chosen for each token;
    `shared_experts` see all tokens. Each is `expert_dim` wide (None: as wide as the feed-forward layer in its place).

    Raises:
        ValueError: an unknown option, a factor that is not positive, or more experts to choose than there are.
    """

    num_experts: int
    top_k: int = 2
    every: int = 1
    shared_experts: int = 0
    expert_dim: int | None = None
    scoring: Scoring = "softmax"
    capacity_factor: float | None = None
    balance: float = 0.01
    balance_over: Literal["sequence", "batch"] = "sequence"
    z: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(num_experts=self.num_experts, top_k=self.top_k, every=self.every)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} experts cannot be chosen of num_experts={self.num_experts}")
        if self.scoring not in get_args(Scoring):
            raise ValueError(f"scoring={self.scoring!r} is unknown: choose 'softmax' or 'sigmoid'")
        if self.balance_over not in ("sequence", "batch"):
            raise ValueError(f"balance_over={self.balance_over!r} is unknown: choose 'sequence' or 'batch'")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be above 0, or None to drop no tokens")
        for name in ("shared_experts", "balance", "z", "bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")

    def layer(
        self, number: int, hidden: int, ff_dim: int | None, activation: Activation, dropout: float
    ) -> "MixtureOfExperts | None":
        """That of block `number`, counted from 0; None if it has none."""
        if (number + 1) % self.every:
            return None
        return MixtureOfExperts(self, hidden, ff_dim, activation, dropout)


class Routing(NamedTuple):
    """Where tokens (.., T) go: `chosen` experts (.., T, k), int64, E for none; `weights` (.., T, k); `penalty` (..,).

    The penalty is what routing adds to the loss of each sequence, if anything. `scores` (.., T, E) sum to 1.
    """

    chosen: Tensor
    weights: Tensor
    penalty: Tensor
    scores: Tensor


class Router(nn.Module):
    """Chooses experts for tokens by a linear layer: x (N, T, C) to a `Routing`.

    Scores are the softmax of the logits over experts, or their sigmoid; weights are those of the chosen, which sum to 1
    if there are several (with one, its score is its weight: Switch).

    `capacity_factor`: an expert takes no more than ceil(factor * k * T / E) tokens of each sequence, the first ones
    (GShard, whose groups are sequences here); None drops nothing. Penalties, times their weights:

        balance   E * sum over experts of (share of choices) * (mean score), 1 if even; of each "sequence", or of the
                  "batch" as `balance_over` says (Fedus et al. 2021, "Switch transformers", arXiv 2101.03961)
        z         mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, "ST-MoE", arXiv 2202.08906)

    `bias_rate`: instead of a penalty, add to the scores by which experts are chosen, but not to weights, a bias that
    grows by this rate in each forward pass of training for experts with less than the mean load, and shrinks for those
    with more (Wang et al. 2024, "Auxiliary-loss-free load balancing", arXiv 2408.15664).
    """

    bias: Tensor | None

    def __init__(self, hidden: int, options: Mixture) -> None:
        super().__init__()
        check_sizes(hidden=hidden)
        self.options, self.num_experts, self.capacity_factor = options, options.num_experts, options.capacity_factor
        self.weight = nn.Parameter(torch.empty(self.num_experts, hidden))
        nn.init.normal_(self.weight, std=INITIAL_STD)
        self.register_buffer("bias", torch.zeros(self.num_experts) if options.bias_rate else None)
        self.last: tuple[Tensor, Tensor] | None = None  # where tokens went in the last step of training, and the scores

    @property
    def penalizes(self) -> bool:
        """Whether routing adds anything to the loss."""
        return self.options.balance > 0 or self.options.z > 0

    def forward(self, x: Tensor) -> Routing:
        logits = F.linear(x, self.weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if self.options.scoring == "softmax" else logits.sigmoid()
        by = scores.detach() if self.bias is None else scores.detach() + self.bias
        chosen = by.topk(self.options.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.options.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        # (N, T, E), 1 for each expert that a token chose: no token chooses one twice.
        numbers = torch.arange(self.num_experts, device=x.device)
        chose = (chosen[..., None] == numbers).to(scores.dtype).sum(-2)
        if self.capacity_factor is not None:
            # Expert by expert, how many tokens of the sequence came before; those beyond the capacity go nowhere.
            capacity = math.ceil(self.capacity_factor * self.options.top_k * x.shape[1] / self.num_experts)
            before = (chose.cumsum(1) - chose).gather(-1, chosen)
            fits = before < capacity
            chosen = torch.where(fits, chosen, self.num_experts)
            weights = weights * fits.to(weights.dtype)
        shares = scores if self.options.scoring == "softmax" else scores / scores.sum(-1, keepdim=True)
        penalty = self._penalty(logits, shares, chose)
        if self.bias is not None and self.training:
            with torch.no_grad():
                load = chose.sum((0, 1))
                self.bias += self.options.bias_rate * (load.mean() - load).sign().to(self.bias.dtype)
        if self.training:
            self.last = chosen, shares.detach()
        return Routing(chosen, weights.to(x.dtype), penalty, shares)

    def _penalty(self, logits: Tensor, shares: Tensor, chose: Tensor) -> Tensor:
        penalty = torch.zeros((), dtype=logits.dtype, device=logits.device)
        if self.options.balance:
            chosen, mean = chose.mean(1) / self.options.top_k, shares.mean(1)
            if self.options.balance_over == "batch":
                chosen, mean = chosen.mean(0, keepdim=True), mean.mean(0, keepdim=True)
            penalty = penalty + self.options.balance * self.num_experts * (chosen * mean).sum(-1)
        if self.options.z:
            penalty = penalty + self.options.z * logits.logsumexp(-1).square().mean(1)
        return penalty


class Experts(nn.Module):
    """Feed-forward layers without biases, E of them: tokens (.., C), of which each goes to those `chosen` for it.

    `chosen` (.., k) are numbers of experts, E for none, and what they make of a token is summed by `weights` (.., k).
    With `row_multiple` each expert's product has a multiple of it in rows, on whose number a row's last bits depend.
    The matrices of all experts are one parameter, (E, out, in), so that they are multiplied as groups.
    """

    def __init__(self, num_experts: int, hidden: int, ff_dim: int, activation: Activation = "gelu") -> None:
        super().__init__()
        if activation not in get_args(Activation):
            raise ValueError(f"activation={activation!r} is unknown: choose 'gelu' or 'swiglu'")
        check_sizes(num_experts=num_experts, hidden=hidden, ff_dim=ff_dim)
        self.num_experts, self.row_multiple = num_experts, 0
        self.up = nn.Parameter(torch.empty(num_experts, ff_dim, hidden))
        self.gate = nn.Parameter(torch.empty(num_experts, ff_dim, hidden)) if activation == "swiglu" else None
        self.output = nn.Parameter(torch.empty(num_experts, hidden, ff_dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=INITIAL_STD)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens, k = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
        slots = chosen.reshape(-1)
        order = slots.argsort(stable=True)
        counts = (slots[:, None] == torch.arange(self.num_experts, device=x.device)).sum(0)
        if not order.is_meta:
            order = order[: int(counts.sum())]  # behind them are those that go nowhere
        source = order // k
        rows = tokens[source]
        real: Tensor | slice = slice(None)
        if self.row_multiple and not order.is_meta:
            rows, counts, real = padded(rows, counts, self.row_multiple)
        up = grouped_linear(rows, self.up, counts)
        if self.gate is None:
            inner = F.gelu(up, approximate="tanh")
        else:
            inner = F.silu(grouped_linear(rows, self.gate, counts)) * up
        made = grouped_linear(inner, self.output, counts)[real] * weights.reshape(-1)[order, None]
        return torch.zeros_like(tokens).index_add(0, source, made.to(tokens.dtype)).view(x.shape)


def padded(rows: Tensor, counts: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of groups with zeros behind them, so that each group has a multiple; their counts; where rows are."""
    full = (counts + multiple - 1) // multiple * multiple
    shift = (full.cumsum(0) - full) - (counts.cumsum(0) - counts)
    places = torch.arange(len(rows), device=rows.device) + shift.repeat_interleave(counts)
    found = rows.new_zeros(int(full.sum()), rows.shape[1]).index_copy(0, places, rows)
    return found, full, places


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows (R, in) times the matrices (E, out, in) of their groups: the first counts[0] rows the first, and so on.

    By PyTorch's grouped matrix product, where there is one: not for float64, nor for rows that are not multiples of 16
    bytes, or begin at no such multiple on a GPU. Of tensors without values, which are there to be counted, every row
    meets the first matrix.
    """
    if rows.is_meta:
        return F.linear(rows, weight[0])
    if torch.is_autocast_enabled(rows.device.type):
        low = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(low), weight.to(low)
    even = all(width * rows.itemsize % ALIGNED_BYTES == 0 for width in weight.shape[1:])
    if rows.is_cuda:  # ZeRO's buckets begin a parameter at any element
        even &= all(x.data_ptr() % ALIGNED_BYTES == 0 for x in (rows, weight))
    if rows.dtype == weight.dtype and rows.dtype in GROUPED and even and len(rows):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(), strict=True)])


class MixtureOfExperts(nn.Module):
    """A router and its experts in the place of a feed-forward layer: (N, T, C) to (N, T, C), and a penalty (N,).

    The shared experts, to which all tokens go beside those chosen for them, are one layer of as many times the width.
    """

    def __init__(
        self, options: Mixture, hidden: int, ff_dim: int | None, activation: Activation, dropout: float
    ) -> None:
        super().__init__()
        width = ff_dim if options.expert_dim is None else options.expert_dim
        width = default_ff_dim(hidden, activation) if width is None else width
        self.router = Router(hidden, options)
        self.experts = Experts(options.num_experts, hidden, width, activation)
        shared = options.shared_experts * width
        self.shared = FeedForward(hidden, shared, activation) if shared else None
        self.dropout = nn.Dropout(dropout)
        self.penalizes = self.router.penalizes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.router(x)
        y = self.experts(x, routing.chosen, routing.weights)
        if self.shared is not None:
            y = y + self.shared(x)
        return self.dropout(y), routing.penalty
