"""Scenarios that train, shard and save over one backend of torch.distributed; see backend_programs.

Where one process can do the same, its numbers are the reference of both backends.
"""

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.comm.backend_collectives import numbers

ROWS = 3  # of a batch, on each rank
STEPS = 3
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Network(nn.Module):
    """Two ways, of which a forward takes one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 32)
        self.detour = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor, way: int = 2) -> Tensor:
        x = self.first(x).tanh()
        y = x
        if way != 1:
            y = y + self.second(x).tanh()
        if way != 0:
            y = y + self.detour(x).tanh()
        return self.last(y)


def network() -> Network:
    torch.manual_seed(7)
    return Network()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    both = numbers(100 * step + rank, ROWS * 12).view(ROWS, 12)
    return both[:, :8], both[:, 8:]


def whole_batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    x, y = zip(*(batch(step, rank) for rank in range(size)), strict=True)
    return torch.cat(x), torch.cat(y)


def train(model: nn.Module, batches: Callable[[int], tuple[Tensor, Tensor]], **options: Any) -> list[Tensor]:
    """The losses of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batches(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x, **options), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def parameters(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def trained_plainly(size: int) -> list[Tensor]:
    model = network()
    train(model, lambda step: whole_batch(step, size))
    return parameters(model)


def check_against_plain(model: nn.Module, size: int) -> None:
    for ours, plain in zip(parameters(model), trained_plainly(size), strict=True):
        torch.testing.assert_close(ours, plain, **CLOSE)


def ddp(rank: int, size: int) -> list[Tensor]:
    results = []
    for options in ({}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = DistributedDataParallel(network(), **options)
        results += train(model, lambda step: batch(step, rank))
        check_against_plain(model.module, size)
    return results


def ddp_unused_parameters(rank: int, size: int) -> list[Tensor]:
    model = DistributedDataParallel(network(), find_unused_parameters=True, bucket_cap_mb=0.001)
    losses = train(model, lambda step: batch(step, rank), way=rank % 2)
    losses += train(model, lambda step: batch(step, rank), way=0)
    return losses + parameters(model)


def ddp_no_sync(rank: int, size: int) -> list[Tensor]:
    model = DistributedDataParallel(network())
    with model.no_sync():
        model(batch(0, rank)[0]).sum().backward()
    alone = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model(batch(1, rank)[0]).sum().backward()
    return alone + [p.grad.clone() for p in model.parameters() if p.grad is not None]


def add_up_twice(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that waits within `then`, and before it."""
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def again(done: Any) -> Tensor:
        total = done.value()[0]
        dist.all_reduce(total, async_op=True).get_future().wait()
        return total / dist.get_world_size() ** 2

    return future.then(again)


def trained_with(rank: int, *hooks: Any) -> list[Tensor]:
    results = []
    for hook in hooks:
        model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
        if isinstance(hook, dist.BuiltinCommHookType):
            model._register_builtin_comm_hook(hook)
        else:
            model.register_comm_hook(None, hook)
        results += train(model, lambda step: batch(step, rank)) + parameters(model)
    return results


def ddp_hooks(rank: int, size: int) -> list[Tensor]:
    # Gloo runs what `then` was given on threads of its own, where the order of collectives is anyone's guess.
    waiting = default_hooks.allreduce_hook if dist.get_backend() == "gloo" else add_up_twice
    return trained_with(rank, default_hooks.allreduce_hook, waiting)


def ddp_builtin_hooks(rank: int, size: int) -> list[Tensor]:
    return trained_with(rank, dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS)


def ddp_low_precision_hooks(rank: int, size: int) -> list[Tensor]:
    def in_bfloat16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return default_hooks.bf16_compress_hook(group, bucket)  # DDP itself admits it on GPUs alone

    return trained_with(rank, in_bfloat16, default_hooks.fp16_compress_hook)


def ddp_power_sgd(rank: int, size: int) -> list[Tensor]:
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, lambda step: batch(step, rank)) + parameters(model)


def ddp_join(rank: int, size: int) -> list[Tensor]:
    """Some ranks have more batches than others; averages are over all ranks, or over those that are still there."""
    results = []
    for over_all in (True, False):
        model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model], divide_by_initial_world_size=over_all):
            for step in range(2 + rank):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(batch(step, rank)[0]), batch(step, rank)[1]).backward()
                optimizer.step()
        results += parameters(model)
    return results


def ddp_of_a_group(rank: int, size: int) -> list[Tensor]:
    """Replicas in pairs, with buffers that rank 0 of each pair gives the other."""
    group, _ = dist.new_subgroups(2)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    model = DistributedDataParallel(model, process_group=group)
    losses = train(model, lambda step: batch(step, rank))
    return [*losses, *parameters(model), *model.buffers()]


def zero_redundancy_optimizer(rank: int, size: int) -> list[Tensor]:
    results = []
    for overlap in (False, True):
        model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, parameters_as_bucket_view=overlap
        )
        for step in range(STEPS):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        optimizer.consolidate_state_dict(to=0)
        results += parameters(model)
    return results


def dtensor(rank: int, size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (size,))
    whole = numbers(1, 9 * 10).view(9, 10)  # which no number of ranks divides
    results: list[Any] = []
    for before in (Shard(0), Shard(1), Replicate()):
        for after in (Shard(0), Shard(1), Replicate()):
            moved = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
            assert torch.equal(moved.full_tensor(), whole)
            results.append(moved.to_local())
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t(), mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t(), **CLOSE)
    total = distribute_tensor(whole, mesh, [Shard(0)]).mean()
    results += [product.redistribute(mesh, [Shard(0)]).to_local(), total.full_tensor()]
    return results


def tensor_parallel(rank: int, size: int) -> list[Tensor]:
    model = network()
    stack = nn.Sequential(model.first, nn.Tanh(), model.second, nn.Tanh(), model.last)
    plain = copy.deepcopy(stack)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(stack, init_device_mesh("cpu", (size,)), plan)
    losses = train(stack, lambda step: batch(step, 0))
    train(plain, lambda step: batch(step, 0))
    for ours, alone in zip(parameters(stack), parameters(plain), strict=True):
        torch.testing.assert_close(ours, alone, **CLOSE)
    return losses + parameters(stack)


def mesh_of_two_axes(rank: int, size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    whole = numbers(2, 7 * 9).view(7, 9)
    piece = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(piece.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor(), whole)
    x = numbers(rank, 3)
    dist.all_reduce(x, group=mesh.get_group("inner"))
    y = numbers(rank, 3)
    dist.all_reduce(y, group=mesh["outer"].get_group())
    return [piece.to_local(), x, y, mesh["inner"].get_local_rank(), mesh.get_coordinate()]


def shard_fully(model: Network, **options: Any) -> Network:
    for layer in (model.first, model.second, model.detour):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def fsdp2(rank: int, size: int) -> list[Tensor]:
    results = []
    for reshard in (True, False):
        model = shard_fully(network(), reshard_after_forward=reshard)
        results += train(model, lambda step: batch(step, rank))
        check_against_plain(model, size)
        results += parameters(model)
    return results


def fsdp2_mixed_precision(rank: int, size: int) -> list[Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_fully(network().float(), mp_policy=policy)
    return train(model, lambda step: tuple(x.float() for x in batch(step, rank)))  # type: ignore[arg-type,return-value]


def fsdp2_of_two_axes(rank: int, size: int) -> list[Tensor]:
    """Shards within pairs of ranks, replicas across them; and then columns and rows within pairs, shards across."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    model = shard_fully(network(), mesh=mesh)
    results = train(model, lambda step: batch(step, rank))
    check_against_plain(model, size)
    model = network()
    stack = nn.Sequential(model.first, nn.Tanh(), model.second)
    parallelize_module(stack, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(stack, mesh=mesh["outer"])
    targets = numbers(5, ROWS * 32).view(ROWS, 32)
    results += train(stack, lambda step: (batch(step, rank // 2)[0], targets))
    return results + parameters(stack)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    yield folder[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def checkpoint(rank: int, size: int) -> list[Tensor]:
    """What is saved as shards is read as it was, also in another cut, and also when it was saved in the background."""
    model = shard_fully(network())
    train(model, lambda step: batch(step, rank))
    before = parameters(model)
    results = []
    for background in (False, True):
        with shared_folder() as folder:
            state = {"model": get_model_state_dict(model)}
            if background:
                dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group()).result()
            else:
                dcp.save(state, checkpoint_id=folder)
            dist.barrier()
            other = network()
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            if not background:
                fully_shard(other)
            loaded = {"model": get_model_state_dict(other)}
            dcp.load(loaded, checkpoint_id=folder)
            set_model_state_dict(other, loaded["model"])
            for ours, saved in zip(parameters(other), before, strict=True):
                assert torch.equal(ours, saved)
        results += parameters(other)
    return results
