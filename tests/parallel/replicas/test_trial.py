"""How an optimizer steps is found by trying copies of it, and what cannot be tried is not trusted."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from mpi4dl.parallel.replicas.optimizer_traits import manner_of
from tests.parallel.replicas.test_update import parameter

Make = Callable[[Iterable[Any]], optim.Optimizer]
CUTTABLE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
WHOLE = ("Adafactor", "Muon")
REFUSED = ("LBFGS", "SparseAdam")


def test_all_optimizers_of_pytorch_are_known() -> None:
    kinds = {name for name, kind in vars(optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert kinds == {*CUTTABLE, *WHOLE, *REFUSED}


@pytest.mark.parametrize("name", CUTTABLE + WHOLE)
def test_which_steps_can_be_cut_up(name: str) -> None:
    p = parameter(2, 3)
    before = p.detach().clone()
    assert manner_of(getattr(optim, name)([p])) == (name in CUTTABLE, True, True, "")
    assert torch.equal(p, before)


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_make_a_plain_step_is_not_trusted(name: str) -> None:
    manner = manner_of(getattr(optim, name)([parameter(2, 3)]))
    assert manner[:3] == (False, False, False)
    assert str(manner.problem(name, turns=False)).startswith(f"{name} cannot be tried on parameters of other shapes (")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.Adam(p, amsgrad=True, maximize=True, foreach=True),
        lambda p: optim.AdamW(p, fused=True),
        lambda p: optim.SGD(p, lr=0.0, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
        lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
        lambda p: optim.Adagrad(p, initial_accumulator_value=0.5),
    ],
)
def test_options_are_tried_too(make: Make) -> None:
    assert manner_of(make([parameter(2, 3), parameter(4)])) == (True, True, True, "")


class Failing(optim.SGD):
    """Raises `error` at a step."""

    error: Exception

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        OSError("no such device"),
    ],
    ids=repr,
)
def test_what_this_machine_lacks_is_no_property_of_an_optimizer(error: Exception) -> None:
    optimizer = Failing([parameter(2, 3)])
    Failing.error = error
    with pytest.raises(type(error)):
        manner_of(optimizer)
    Failing.error = RuntimeError("it takes matrices alone")
    assert "matrices alone" in manner_of(optimizer).error


class Trusting(optim.SGD):
    """Goes as far as a parameter is long, in groups that ask for it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad * (p.norm() if group.get("trusting") else 1.0)


class Projecting(optim.SGD):
    """Leaves out gradients that are nearly orthogonal to a matrix, as AdamP does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and (p.dim() < 2 or (p * p.grad).sum().abs() > 1e-3 * p.norm() * p.grad.norm()):
                    p -= group["lr"] * p.grad


def test_conditions_that_are_rare_are_met() -> None:
    assert manner_of(Projecting([parameter(2, 3)], lr=0.1)) == (False, True, True, "")


def test_every_group_counts() -> None:
    plain, trusting = {"params": [parameter(2)]}, {"params": [parameter(3)], "trusting": True}
    assert manner_of(Trusting([plain], lr=0.1)) == (True, True, True, "")
    assert manner_of(Trusting([plain, trusting], lr=0.1)) == (False, True, True, "")


class OfAll(optim.SGD):
    """Looks at all gradients together in `look`, with an option that it requires."""

    def __init__(self, params: Any, limit: float, lr: float = 0.1) -> None:
        self.limit, self.seen = limit, 0
        super().__init__(params, lr)

    def gradients(self) -> list[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def look(self) -> None:
        """Do with all gradients what the class is about."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.look()
        super().step()


class Clipping(OfAll):
    """Limits the norm of all gradients."""

    def look(self) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.limit)


class Late(OfAll):
    """Averages what it sees from its sixth step on."""

    def look(self) -> None:
        self.seen += 1
        if self.seen > 5:
            mean = torch.stack([g.mean() for g in self.gradients()]).mean()
            for g in self.gradients():
                g.sub_(mean)


class InGroup(OfAll):
    """Takes for all parameters of a group the largest gradient among them."""

    def look(self) -> None:
        for group in self.param_groups:
            found = [p.grad for p in group["params"] if p.grad is not None]
            largest = max((float(g.abs().max()) for g in found), default=1.0)
            for g in found:
                g.div_(largest)


class Counting(OfAll):
    """Counts its steps for all parameters, beside its groups, and goes more slowly."""

    def look(self) -> None:
        self.seen += 1
        for g in self.gradients():
            g.div_(self.seen)


class CountingInGroups(OfAll):
    """Counts its steps in its groups, and does not use that."""

    def look(self) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


class OwnList(OfAll):
    """Keeps a list of the parameters for itself, with buffers that it makes at once."""

    def __init__(self, params: Any, limit: float) -> None:
        super().__init__(params, limit)
        self.own = [p for group in self.param_groups for p in group["params"]]
        self.sums = [torch.zeros_like(p) for p in self.own]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, total in zip(self.own, self.sums, strict=True):
            if p.grad is not None:
                p.data.sub_(total.add_(p.grad), alpha=0.1)


class Noisy(OfAll):
    """Adds noise, of which parts and lone parameters get other numbers."""

    def look(self) -> None:
        for g in self.gradients():
            g.add_(torch.randn_like(g))


class Locked(OfAll):
    """Cannot be copied."""

    def __init__(self, params: Any, limit: float) -> None:
        self.lock = threading.Lock()
        super().__init__(params, limit)

    def look(self) -> None:
        pass


class Wrapper(optim.Optimizer):
    """Holds another optimizer, and shares its groups and state, as a Lookahead does."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize(
    ("kind", "separate", "error"),
    [
        (Clipping, False, ""),
        (Late, False, ""),
        (InGroup, False, ""),
        (Counting, True, ""),
        (CountingInGroups, True, ""),
        (OwnList, False, "RuntimeError"),
        (Noisy, False, ""),
        (Locked, False, "TypeError: cannot pickle"),
    ],
)
def test_what_is_not_a_step_for_each_parameter_is_found(kind: Any, separate: bool, error: str) -> None:
    optimizer = kind([{"params": [parameter(2, 3)]}, {"params": [parameter(3)], "lr": 0.2}], limit=0.1)
    state = torch.get_rng_state()
    manner = manner_of(optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert manner.separate == separate
    assert not (manner.separate and manner.in_turns)
    assert manner.error.startswith(error)
    assert optimizer.seen == 0
    assert "steps" not in optimizer.param_groups[0]


@pytest.mark.parametrize("limit", [1e-3, 0.1, 1e5])
def test_a_limit_is_found_whatever_it_is(limit: float) -> None:
    assert not manner_of(Clipping([parameter(2), parameter(3)], limit)).separate


def test_optimizers_within_others_are_tried_with_them() -> None:
    p, q = parameter(2, 3), parameter(3)
    assert manner_of(Wrapper(optim.Adam([p, q]))) == (True, True, True, "")
    assert not manner_of(Wrapper(Clipping([p, q], 0.1))).separate


def test_hooks_schedulers_and_replaced_steps_are_not_called() -> None:
    calls: list[int] = []
    optimizer = optim.Adam([parameter(2)], lr=0.1)
    optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    optimizer.register_step_pre_hook(lambda *_: calls.append(0))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert manner_of(optimizer) == (True, True, True, "")
    assert calls == []


def test_what_it_says() -> None:
    kind, clipping = "Clipping", Clipping([parameter(2)], 0.1)
    manner = manner_of(clipping)
    assert manner.problem(kind, turns=False) == (
        "Clipping steps by all parameters together, but ranks have stages of their own: use one stage"
    )
    assert str(manner.problem(kind, turns=True)).startswith("Clipping steps by all parameters together, but ZeRO, low_")
    counting = manner_of(Counting([parameter(2)], 0.1))
    assert counting.problem("Counting", turns=False) is None
    assert str(counting.problem("Counting", turns=True)).startswith("Counting counts its steps for all parameters to")
    assert manner_of(optim.SGD([parameter(2)], lr=0.1)).problem("SGD", turns=True) is None
