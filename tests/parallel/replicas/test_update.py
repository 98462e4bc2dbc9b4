"""What an optimizer begins with is cut up with its parameters, and what a checkpoint has of it goes to its place."""

import torch
from torch import nn, optim

from mpi4dl.parallel.replicas.buckets import BucketSegment
from mpi4dl.parallel.replicas.update import Device, Master, Update, make_master

F64 = torch.float64


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=F64).view(shape))


def test_pieces_have_the_names_of_their_parameters() -> None:
    named = [("p", parameter(2, 3)), ("q", parameter(2)), ("r", parameter(2))]
    optimizer = optim.Adam(named)
    p, q = named[0][1], named[1][1]
    halves = [make_master(BucketSegment(0, i, i + 3, 0), p, p.detach().view(-1)[i : i + 3], Device()) for i in (0, 3)]
    Update(optimizer, [p, q], [halves], Device())
    (group,) = optimizer.param_groups
    assert group["param_names"] == ["p", "p", "r"]
    assert [value.numel() for value in group["params"]] == [3, 3, 2]


def test_what_an_optimizer_begins_with_is_cut_up() -> None:
    p = parameter(2, 3)
    optimizer = optim.Adagrad([p], initial_accumulator_value=0.5)
    optimizer.state[p]["sum"].view(-1).copy_(torch.arange(6))
    master = make_master(BucketSegment(0, 2, 5, 0), p, p.detach().view(-1)[2:5], Device())
    Update(optimizer, [p], [[master]], Device())
    (state,) = optimizer.state.values()
    assert (state["sum"].tolist(), float(state["step"])) == ([2.0, 3.0, 4.0], 0.0)
    assert state["sum"].untyped_storage().nbytes() == 3 * 8


def test_state_from_a_checkpoint_goes_where_its_parameter_is() -> None:
    saved = {"exp_avg": torch.ones(6, dtype=F64), "row": torch.ones(2, dtype=F64), "step": torch.tensor(3.0), "n": 2}
    where = {}
    for fused in (False, True):
        p = nn.Parameter(torch.empty(2, 3, device="meta"))
        master = Master(BucketSegment(0, 0, 6, 0), p, None)
        update = Update(optim.Adam([p], fused=fused), [p], [[master]], Device())
        found = {key: update.receive(master, key, value, F64) for key, value in saved.items()}
        assert [found[key].dtype for key in ("exp_avg", "row", "step")] == [torch.float32] * 3
        assert (found["exp_avg"].shape, found["n"]) == ((2, 3), 2)
        where[fused] = [found[key].device.type for key in ("exp_avg", "row", "step")]
    assert where == {False: ["meta", "meta", "cpu"], True: ["meta", "meta", "meta"]}
