"""How an optimizer steps is known for torch.optim, declared by others, and not assumed of the rest."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas.optimizer_traits import OF_PYTORCH, problem_with_unit, step_unit
from mpi4dl.parallel.replicas.update import MultiOptimizer
from tests.parallel.replicas.test_update import parameter
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import SKIPPING, check, engine_of, label

REFUSED = ("LBFGS", "SparseAdam")


def test_all_optimizers_of_pytorch_are_known() -> None:
    kinds = {name for name, kind in vars(optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert kinds <= {*OF_PYTORCH, *REFUSED}
    for name in kinds:
        optimizer = getattr(optim, name)([parameter(2, 3)])
        optim.lr_scheduler.StepLR(optimizer, 1)
        assert step_unit(optimizer) == OF_PYTORCH.get(name, "all")


class Named(optim.SGD):
    """Adds nothing but a constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)


class Changed(optim.SGD):
    """May do anything in a step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


class Prepared(optim.Adam):
    """May do anything to what a step is made of."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)  # type: ignore[no-untyped-call]


class Declared(Changed):
    step_unit = "parameter"

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)


def test_units_of_other_optimizers() -> None:
    kinds = (Named, Changed, Prepared, Declared, Named)
    assert [step_unit(kind([parameter(2)])) for kind in kinds] == ["element", "all", "all", "parameter", "element"]
    for kind, unit in ((Named, "element"), (Declared, "parameter"), (Changed, "all")):
        assert step_unit(MultiOptimizer([optim.Adam([parameter(2)]), kind([parameter(3)])])) == unit
    optimizer = Named([parameter(2)])
    optimizer.step_unit = "elements"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Named is 'elements', but must be one of element, parameter, all"):
        step_unit(optimizer)


def test_what_is_said_of_units_that_do_not_fit() -> None:
    optimizer = Changed([parameter(2)])
    assert problem_with_unit(optimizer, "element", True, "tensor(2)") is None
    assert problem_with_unit(optimizer, "parameter", True, None) is None
    assert "under tensor(2) ranks have parts" in str(problem_with_unit(optimizer, "parameter", True, "tensor(2)"))
    for turns, words in ((True, "ZeRO, low_precision_weights and offload"), (False, "use one stage")):
        said = str(problem_with_unit(optimizer, "all", turns, None))
        assert said.startswith("Changed may step by all parameters together, but ")
        assert words in said
        assert "declare `step_unit`" in said


class Clipping(optim.SGD):
    """Limits the norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class Lion(optim.Optimizer):
    """Steps by the sign of a momentum, element by element, as it declares."""

    step_unit = "element"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * momentum.tanh())


def of_parameters(kind: Any, model: nn.Module) -> optim.Optimizer:
    return kind(model.parameters())


TWO = Plan(((1, 1), (1, 1)), microbatches=2)


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        (Clipping, Plan(((1, 2),))),
        (Lion, replace(TWO, data=2, zero=2)),
        pytest.param(Lion, Plan(data=2, zero=3), marks=pytest.mark.exhaustive),
        pytest.param(Declared, replace(TWO, data=2, zero=1), marks=pytest.mark.exhaustive),
    ],
    ids=label,
)
def test_unknown_optimizers_step_as_a_whole_and_declared_ones_in_parts(
    ranks: Ranks, optimizer: Any, plan: Plan
) -> None:
    check(ranks, replace(SKIPPING, optimizer=partial(of_parameters, optimizer)).with_engine(bucket_bytes=100), plan)


@pytest.mark.parametrize("plan", [Plan(data=2, zero=1), TWO], ids=label)
@on_ranks()
def test_an_unknown_optimizer_is_refused_where_ranks_step_on_parts(comm: Communicator, plan: Plan) -> None:
    with pytest.raises(Refusal, match="Clipping may step by all parameters"):
        engine_of(comm, replace(SKIPPING, optimizer=partial(of_parameters, Clipping)), plan)
