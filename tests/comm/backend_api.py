"""Scenarios of how groups and what they return may be used, run over one backend; see backend_programs."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.comm.backend_collectives import numbers, values
from tests.comm.backend_training import batch, network, parameters, train
from tests.comm.single import all_gather_single, reduce_scatter_single

MINUTE = datetime.timedelta(minutes=1)


def ours() -> bool:
    return dist.get_backend() == "mpi4dl"


def methods_of_groups(rank: int, size: int) -> list[Any]:
    """A group's own methods, with tensors alone, lists, options, and their parts by name or place."""
    group: Any = dist.group.WORLD
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    xs = [values(rank) for _ in range(5)]
    group.allreduce(xs[0]).wait()
    group.allreduce(xs[1], dist.ReduceOp.MAX).wait()
    group.allreduce([xs[2]], op=dist.ReduceOp.MIN, timeout=MINUTE).wait()
    group.allreduce([xs[3]], options).wait()
    group.allreduce(tensors=[xs[4]], opts=options).wait()
    ys = [values(rank) for _ in range(3)]
    group.broadcast(ys[0], root=1).wait()
    group.broadcast(ys[1], 0, MINUTE).wait()
    group.reduce(ys[2], 1, dist.ReduceOp.MAX).wait()
    outputs = [torch.zeros(5) for _ in range(size)]
    group.allgather(outputs, values(rank)).wait()
    gathered = [torch.zeros(5) for _ in range(size)] if rank == 1 else []
    group.gather(gathered, values(rank), 1).wait()
    scattered = torch.zeros(5)
    group.scatter(scattered, [values(to) for to in range(size)] if rank == 0 else [], root=0).wait()
    summed = torch.zeros(5)
    group.reduce_scatter(summed, [values(rank + to) for to in range(size)]).wait()
    joined, part, swapped = torch.zeros(5 * size), torch.zeros(5), torch.zeros(size)
    group._allgather_base(joined, values(rank)).wait()
    group._reduce_scatter_base(part, values(rank, 5 * size)).wait()
    group.alltoall_base(swapped, values(rank, size), [], []).wait()
    group.barrier().wait()
    group.barrier(timeout=MINUTE).wait()
    return [*xs, *ys[:2], *(ys[2:] if rank == 1 else []), *outputs, *gathered, scattered, summed, joined, part, swapped]


def scalars(rank: int, size: int) -> list[Tensor]:
    """Tensors without dims, of which gloo knows not all calls."""
    x, total = torch.tensor(float(rank)), torch.tensor(float(rank))
    dist.all_reduce(total)
    dist.broadcast(x, 1)
    everyone = [torch.zeros(()) for _ in range(size)]
    dist.all_gather(everyone, torch.tensor(float(rank)))
    joined, part = torch.zeros(size), torch.tensor(0.0)
    if ours():
        all_gather_single(joined, torch.tensor(float(rank)))
        reduce_scatter_single(part, torch.arange(float(size)))
    else:
        joined, part = torch.arange(float(size)), torch.tensor(float(rank * size))
    return [x, total, *everyone, joined, part]


def averages_of_integers(rank: int, size: int) -> list[Tensor]:
    """Cut off towards zero, as NCCL's; gloo has none."""
    results = []
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16):
        signs = (1, -1) if dtype.is_signed else (1,)
        rows = [torch.tensor([sign * (3 * other + i) for sign in signs for i in range(4)]) for other in range(size)]
        x = rows[rank].to(dtype)
        total = torch.stack(rows).sum(0).div(size, rounding_mode="trunc").to(dtype)
        y = torch.zeros_like(x)
        if ours():
            dist.all_reduce(x, dist.ReduceOp.AVG)
            dist.reduce_scatter(y, [rows[rank].to(dtype)] * size, dist.ReduceOp.AVG)
        results += [x, y] if ours() else [total, total]
    return results


def sparse_sums(rank: int, size: int) -> list[Tensor]:
    """Of other numbers of entries on each rank, some of them at the same places; and of an embedding's gradient."""
    places = torch.tensor([[(rank + i) % 5, i % 3] for i in range(rank + 2)]).t()
    x = torch.sparse_coo_tensor(places, values(rank, rank + 2), (5, 3))
    dist.all_reduce(x)
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Embedding(7, 4, sparse=True))
    model(torch.tensor([rank, 3, 3])).square().sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return [x.to_dense(), gradient.to_dense()]


def highest_tags(rank: int, size: int) -> list[Any]:
    """Tags beyond what MPI has, whose messages overtake each other, and one from any rank."""
    highest = 2**31 - 1
    after, before = (rank + 1) % size, (rank - 1) % size
    tags = [highest, 5, highest - 1, highest - 4096]
    sending = [dist.isend(numbers(10 * rank + i, 3), after, tag=tag) for i, tag in enumerate(tags)]
    received = [torch.zeros(3) for _ in tags]
    for i in (2, 3, 1, 0):
        dist.recv(received[i], before, tag=tags[i])
    sending.append(dist.isend(numbers(rank, 4), after, tag=highest))
    last = torch.zeros(4)
    source = dist.recv(last, tag=highest)
    for work in sending:
        work.wait()
    return [*received, last, source]


def futures(rank: int, size: int) -> list[Any]:
    """Of what is complete, of several at once, and of errors in what follows."""
    work = dist.all_reduce(x := values(rank), async_op=True)
    work.wait()
    assert work.get_future().done()
    both = [dist.all_reduce(values(rank + i), async_op=True).get_future() for i in range(2)]
    collected = torch.futures.collect_all(both).wait()
    waited = torch.futures.wait_all([dist.all_reduce(values(rank), async_op=True).get_future()])
    dist.barrier(async_op=True).get_future().wait()
    failing = dist.all_reduce(values(rank), async_op=True).get_future().then(lambda done: 1 / 0)
    try:
        failing.wait()
    except RuntimeError as error:
        told = str(error).split("\n")[0]
    return [x, *(future.value()[0] for future in collected), waited[0][0], told]


def in_hook(wait: Any) -> Any:
    """A hook of DDP that waits within backward in some way."""

    def hook(model: DistributedDataParallel, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        bucket.buffer().div_(dist.get_world_size())
        total = wait(model, bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(total)
        return future

    return hook


def reduced(bucket: dist.GradBucket) -> Any:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def ddp_waiting_hooks(rank: int, size: int) -> list[Tensor]:
    hooks = [
        lambda model, bucket: torch.futures.collect_all([reduced(bucket)]).wait()[0].value()[0],
        lambda model, bucket: torch.futures.wait_all([reduced(bucket)])[0][0],
        lambda model, bucket: reduced(bucket).then(lambda done: done.value()[0].clone()).wait(),
        lambda model, bucket: model.reducer._run_allreduce_hook(bucket).wait()[0] * size,
    ]
    results: list[Tensor] = []
    for wait in hooks:
        model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
        model.register_comm_hook(model, in_hook(wait))
        results += train(model, lambda step: batch(step, rank)) + parameters(model)
    return results


def events(rank: int, size: int) -> list[Any]:
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(values(rank))
        dist.broadcast(values(rank, 7), 0)
    prefix = f"{dist.get_backend()}:"
    found = [event for event in profile.events() if event.name.startswith(prefix)]
    return sorted((e.name.removeprefix(prefix), str(e.input_shapes)) for e in found if "wait" not in e.name)


def monitored(rank: int, size: int) -> list[Any]:
    """Gloo works no more after one that has failed: it only passes one."""
    dist.monitored_barrier()
    told = f"rank 1 {rank}"
    if rank != 1 and ours():
        try:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))
        except RuntimeError as error:
            told = str(error).lower()
    dist.barrier()
    dist.monitored_barrier(dist.new_group())
    return ["rank 1 " in told if rank == 0 else bool(told)]
