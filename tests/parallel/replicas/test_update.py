"""What an optimizer begins with is cut up with its parameters, and lives where it was asked to."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.replicas import update
from mpi4dl.parallel.replicas.buckets import BucketSegment
from mpi4dl.parallel.replicas.group import ReplicaGroup
from mpi4dl.parallel.replicas.update import Device, Disk, Host, Master, Update, home_for, make_master
from tests.pool.ranks import on_ranks

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


def mapped_files(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("value", [torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.bfloat16), torch.zeros(0)])
def test_disk_keeps_values_in_files_without_names(tmp_path: Path, value: torch.Tensor) -> None:
    home = Disk(tmp_path)
    first, second = home.place(value), home.place(value.t() if value.dim() == 2 else value)
    assert mapped_files(tmp_path) == 1
    assert os.listdir(tmp_path) == []
    for placed, wanted in ((first, value), (second, value.t() if value.dim() == 2 else value)):
        assert placed.dtype == wanted.dtype
        assert torch.equal(placed, wanted)
    if value.numel():
        first.zero_()
        assert torch.equal(second.reshape(value.shape[::-1]).t() if value.dim() == 2 else second, value)
        assert home.place(first) is first


def test_a_value_larger_than_a_block_has_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "BLOCK_BYTES", 256)
    home = Disk(tmp_path)
    placed = [home.place(torch.full((n,), float(n))) for n in (16, 16, 100, 16)]
    assert mapped_files(tmp_path) == 3  # 64 + 64, 400, 64 bytes
    assert [float(value.mean()) for value in placed] == [16.0, 16.0, 100.0, 16.0]


def test_values_stay_where_they_are_on_the_host() -> None:
    value = torch.ones(2)
    assert Device().place(value) is value
    assert Host().place(value) is value


def test_homes_by_name(tmp_path: Path) -> None:
    assert [type(home_for(name, tmp_path)) for name in ("none", "cpu", "disk")] == [Device, Host, Disk]
    with pytest.raises(ValueError, match="offload is 'tape', but must be one of none, cpu, disk"):
        home_for("tape")


class Full(Disk):
    """A disk that is full after some values."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def place(self, value: torch.Tensor) -> torch.Tensor:
        self.room -= 1
        if self.room < 0:
            raise OSError("there is no room")
        return super().place(value)


def build_and_step(comm: Communicator, home: Disk) -> None:
    model = nn.Linear(4, 4)
    group = ReplicaGroup(model.named_parameters(), comm, torch.optim.Adam(model.parameters()), home)
    group.reducer.prepare()
    model(torch.ones(1, 4)).sum().backward()
    group.reducer.finish()
    group.step(1.0)


@pytest.mark.parametrize("room", [0, 2], ids=["when built", "in the first step"])
@on_ranks(2)
def test_all_ranks_learn_that_the_disk_of_one_is_full(comm: Communicator, room: int) -> None:
    with pytest.raises(Refusal, match=r"^rank 1: there is no room$"):
        build_and_step(comm, Full(room if comm.rank == 1 else 100))


def test_a_full_disk_says_where_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"no room .* in .*nowhere \(No such file .*name another folder by .* TMPDIR"):
        Disk(tmp_path / "nowhere").place(torch.ones(1))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"no room for 64 MiB more in {tmp_path} .*name another folder by .* TMPDIR"):
        Disk(tmp_path).place(torch.ones(1))
