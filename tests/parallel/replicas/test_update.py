"""Optimizers whose steps can be cut up are told from others, and what they begin with is cut up too."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim

from mpi4dl.parallel.replicas.buckets import Span
from mpi4dl.parallel.replicas.offload import Device
from mpi4dl.parallel.replicas.update import Piece, Update, is_elementwise, is_separate, keeps_options, make_piece

F64 = torch.float64
Make = Callable[[Iterable[Any]], optim.Optimizer]
CUTTABLE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class Trusting(optim.SGD):
    """Goes as far as a parameter is long, in groups that ask for it."""

    def __init__(self, params: Any, lr: float = 0.1, trusting: bool = False) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("trusting", trusting)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad * (p.norm() if group["trusting"] else 1.0)


class Counting(optim.SGD):
    """Counts its steps for all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=F64).view(shape))


def test_all_optimizers_of_pytorch_are_known() -> None:
    assert {name for name, kind in vars(optim).items() if isinstance(kind, type)} - {"Optimizer"} == {*CUTTABLE, *WHOLE}


@pytest.mark.parametrize("name", CUTTABLE + WHOLE)
def test_which_steps_can_be_cut_up(name: str) -> None:
    kind = getattr(optim, name)
    assert is_elementwise(kind([parameter(2, 3)])) == (name in CUTTABLE)
    assert keeps_options(kind([parameter(2, 3)]))
    assert is_separate(kind([parameter(2, 3)]))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.Adam(p, amsgrad=True, maximize=True, foreach=True),
        lambda p: optim.AdamW(p, fused=True),
        lambda p: optim.SGD(p, lr=0.0, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
        lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    ],
)
def test_options_are_tried_too(make: Make) -> None:
    assert is_elementwise(make([parameter(2, 3)]))


def test_every_group_counts() -> None:
    plain, trusting = {"params": [parameter(2)]}, {"params": [parameter(3)], "trusting": True}
    assert is_elementwise(Trusting([plain]))
    assert not is_elementwise(Trusting([plain, trusting]))


def test_an_optimizer_that_counts_in_its_options_is_found() -> None:
    counting = Counting([parameter(2)], lr=0.1)
    assert not keeps_options(counting)
    assert "steps" not in counting.param_groups[0]


class Clipping(optim.SGD):
    """Limits the norm of all gradients of a group, in groups that ask for it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group.get("clipping"):
                nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step()


def test_an_optimizer_that_looks_at_all_gradients_is_found() -> None:
    plain, clipping = {"params": [parameter(2)]}, {"params": [parameter(3)], "clipping": True}
    assert is_separate(Clipping([plain], lr=0.1))
    assert not is_separate(Clipping([plain, clipping], lr=0.1))
    assert is_separate(Trusting([{"params": [parameter(3)], "trusting": True}]))


def test_pieces_have_the_names_of_their_parameters() -> None:
    named = [("p", parameter(2, 3)), ("q", parameter(2)), ("r", parameter(2))]
    optimizer = optim.Adam(named)
    p, q = named[0][1], named[1][1]
    halves = [make_piece(Span(0, i, i + 3, 0), p, p.detach().view(-1)[i : i + 3], Device()) for i in (0, 3)]
    assert is_elementwise(optimizer)
    Update(optimizer, [p, q], [halves], Device())
    (group,) = optimizer.param_groups
    assert group["param_names"] == ["p", "p", "r"]
    assert [value.numel() for value in group["params"]] == [3, 3, 2]


def test_what_an_optimizer_begins_with_is_cut_up() -> None:
    p = parameter(2, 3)
    optimizer = optim.Adagrad([p], initial_accumulator_value=0.5)
    optimizer.state[p]["sum"].view(-1).copy_(torch.arange(6))
    piece = make_piece(Span(0, 2, 5, 0), p, p.detach().view(-1)[2:5], Device())
    Update(optimizer, [p], [[piece]], Device())
    (state,) = optimizer.state.values()
    assert (state["sum"].tolist(), float(state["step"])) == ([2.0, 3.0, 4.0], 0.0)
    assert state["sum"].untyped_storage().nbytes() == 3 * 8


def test_state_from_a_checkpoint_goes_where_its_parameter_is() -> None:
    saved = {"exp_avg": torch.ones(6, dtype=F64), "row": torch.ones(2, dtype=F64), "step": torch.tensor(3.0), "n": 2}
    where = {}
    for fused in (False, True):
        p = nn.Parameter(torch.empty(2, 3, device="meta"))
        piece = Piece(Span(0, 0, 6, 0), p, None)
        update = Update(optim.Adam([p], fused=fused), [p], [[piece]], Device())
        found = {key: update.receive(piece, key, value, F64) for key, value in saved.items()}
        assert [found[key].dtype for key in ("exp_avg", "row", "step")] == [torch.float32] * 3
        assert (found["exp_avg"].shape, found["n"]) == ((2, 3), 2)
        where[fused] = [found[key].device.type for key in ("exp_avg", "row", "step")]
    assert where == {False: ["meta", "meta", "cpu"], True: ["meta", "meta", "meta"]}
