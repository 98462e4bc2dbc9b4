"""Options that commands have in common which run a trained model: how it lies over ranks, and how much runs at once."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mpi4dl.options.declare import option
from mpi4dl.options.kinds import COUNT, choice, optional

if TYPE_CHECKING:
    from mpi4dl.parallel.plan import Plan


@dataclass(frozen=True)
class Ranks:
    stages: int = option(1, "into how many stages the model is cut, one behind the other", COUNT)
    tensor: int = option(1, "how many ranks share the parameters of each layer, and its features", COUNT)
    data: int = option(1, "how many copies of the model share the requests", COUNT)
    experts: int = option(1, "how many ranks share experts, and the requests as those of --data do", COUNT)
    moe: str = option(
        "tensor",
        "what the ranks of --tensor have of experts: a part of each, or whole ones",
        choice("tensor", "expert"),
    )
    precision: Literal["fp32", "bf16", "int8", "int4"] = option(
        "fp32",
        "the type of weights; fp32: as they were trained; int8 and int4: of linear layers, else bf16",
        choice("fp32", "bf16", "int8", "int4"),
    )
    device: str = option("auto", "where to compute; auto: on a GPU if there is one", choice("auto", "cpu", "cuda"))

    def plan(self) -> "Plan":
        """Raises ValueError for what cannot be."""
        from mpi4dl.parallel.plan import Plan  # which imports torch

        return Plan.of(
            stages=self.stages, tiles=((1,),), data=self.data, tensor=self.tensor, experts=self.experts, moe=self.moe
        )


@dataclass(frozen=True)
class Batching:
    max_batch: int = option(16, "how many requests run at once at most", COUNT)
    page_size: int = option(16, "how many tokens' keys and values are in a page", COUNT)
    pages: int | None = option(
        None,
        "how many pages each copy of the model has; none: enough for its share of --max-batch requests of half the "
        "context",
        optional(COUNT),
    )
    prefill_chunk: int = option(128, "how many tokens of prompts a step works on at most", COUNT)
