"""What is foreseen of tokens that travel, where nobody knows their choices: nearly what ranks then send."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl.comm import Communicator
from mpi4dl.models.experts import Router, Routing
from mpi4dl.parallel import spatial
from mpi4dl.parallel.costs.sites import planned_cuts
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.sharding import even_layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.tensor.cutting import with_cuts
from tests.parallel.experts.test_training import VOCABULARY, build
from tests.pool.ranks import Ranks

SAMPLES, LENGTH = 16, 16
EXPERTS = Plan(((1,),), experts=2)
PLANS = [EXPERTS, replace(EXPERTS, experts=4), replace(EXPERTS, tensor=2, moe="expert")]


def choose_evenly(module: nn.Module, inputs: Any, routing: Routing) -> Routing:
    """A router's choices with others in their place, all as likely, and alike on ranks that have the same tokens."""
    chosen: Any = routing.chosen
    generator = torch.Generator().manual_seed(chosen.layout.owned[0].start)
    scores = torch.rand(*chosen.local.shape[:-1], 4, generator=generator)
    return routing._replace(chosen=SpatialTensor(scores.topk(chosen.shape[-1]).indices, chosen.layout))


def forward(comm: Communicator, plan: Plan) -> tuple[int, int, int]:
    """The bytes of experts that are foreseen, those that this rank sends, and those of all sums as foreseen."""
    stages = LocalStages.whole(build("softmax"), plan, comm)
    grid, cuts = stages.parts[0, 0].grid, planned_cuts(build("softmax"), plan)
    found = spatial.explain(build("softmax"), (SAMPLES, LENGTH), grid, partial(with_cuts, cutting=cuts))
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    layout = even_layout(grid, (SAMPLES, LENGTH))
    sent, exchange, reduce, inside = 0, Communicator.iexchange, Communicator.ireduce, False

    def iexchange(self: Any, sends: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 0 if inside else sum(tensor.nbytes for peer, tensor in sends if peer != self.rank)
        return exchange(self, sends, *args, **kwargs)

    def ireduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return reduce(self, *args, **kwargs)
        finally:
            inside = False

    for module in stages.modules():
        if isinstance(module, Router):
            module.register_forward_hook(choose_evenly)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "iexchange", iexchange)
        patch.setattr(Communicator, "ireduce", ireduce)
        stages.modules_of[0](SpatialTensor(tokens[slice(*layout.owned[0])], layout))
    names = [operator.module for operator in found.operators if operator.name == "Experts"]
    assert names == ["blocks.0.feed_forward.experts", "blocks.1.feed_forward.experts"]
    return found.total("halo_bytes"), sent, found.total("reduced_bytes")


@pytest.mark.parametrize("plan", [PLANS[0], *(pytest.param(p, marks=pytest.mark.exhaustive) for p in PLANS[1:])])
def test_bytes_of_tokens_that_travel(ranks: Ranks, plan: Plan) -> None:
    answers = ranks(plan.num_ranks).run(forward, plan)
    foreseen = answers[0][0]
    assert foreseen == pytest.approx(sum(sent for _, sent, _ in answers) / len(answers), rel=0.1)


def test_sums_over_parts_of_experts_are_counted(ranks: Ranks) -> None:
    """Each layer has two sums of all features, of attention and of experts; and there is one of embeddings."""
    plan = replace(EXPERTS, experts=1, tensor=2)
    for foreseen, sent, reduced in ranks(2).run(forward, plan):
        assert foreseen == sent == 0
        assert reduced == (2 * 2 + 1) * SAMPLES * LENGTH * 24 * 8
