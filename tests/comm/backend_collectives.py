"""Scenarios of single collectives and messages, run over one backend of torch.distributed; see backend_programs."""

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm.single import all_gather_single, reduce_scatter_single

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
COMPLEX = [torch.complex64, torch.complex128]
LARGE = 700_001  # more than one piece of a reduction


def values(rank: int, n: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers, of which every dtype knows the exact sums and products."""
    entries = [1 + (3 * rank + 2 * i) % 3 for i in range(n)]
    if dtype.is_complex:
        return torch.tensor([complex(x, rank - i) for i, x in enumerate(entries)], dtype=dtype)
    return torch.tensor(entries, dtype=dtype)


def numbers(rank: int, n: int) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def broadcast(rank: int, size: int) -> list[Tensor]:
    results = []
    for root in range(size):
        for dtype in (*DTYPES, *COMPLEX, torch.bool):
            x = values(rank, 5, dtype)
            dist.broadcast(x, root)
            results.append(x)
    strided = numbers(rank, 12).view(3, 4)[:, :2] if dist.get_backend() == "mpi4dl" else numbers(rank, 12).view(3, 4)
    dist.broadcast(strided, 1)
    return [*results, strided[:, :2].clone()]


def all_reduce_dtypes(rank: int, size: int) -> list[Tensor]:
    in_order = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    bits = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
    kinds = ((DTYPES, in_order), (COMPLEX, in_order[:1]), ((torch.int64, torch.int32, torch.uint8), bits))
    results = []
    for dtypes, operations in kinds:
        for dtype, op in product(dtypes, operations):
            x = values(rank, 5, dtype)
            dist.all_reduce(x, op)
            results.append(x)
    return results


def all_reduce_bool(rank: int, size: int) -> list[Tensor]:
    """Gloo stores the sum of two truths as 2, so the reference is plain logic."""
    rows = [torch.tensor([True, False, other == 0, other % 2 == 1]) for other in range(size)]
    operations: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
        (dist.ReduceOp.SUM, lambda x: x.any(0)),
        (dist.ReduceOp.MAX, lambda x: x.any(0)),
        (dist.ReduceOp.BOR, lambda x: x.any(0)),
        (dist.ReduceOp.MIN, lambda x: x.all(0)),
        (dist.ReduceOp.BAND, lambda x: x.all(0)),
        (dist.ReduceOp.PRODUCT, lambda x: x.all(0)),
        (dist.ReduceOp.BXOR, lambda x: x.sum(0) % 2 == 1),
    ]
    if dist.get_backend() == "gloo":
        return [plain(torch.stack(rows)) for _, plain in operations]
    results = []
    for op, _ in operations:
        x = rows[rank].clone()
        dist.all_reduce(x, op)
        results.append(x)
    return results


def all_reduce_averages(rank: int, size: int) -> list[Tensor]:
    """Gloo has neither operation for all dtypes, so the reference is plain arithmetic."""
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        everyone = torch.stack([values(other, 7, dtype) for other in range(size)]).double()
        half = dist._make_nccl_premul_sum(0.5)
        if dist.get_backend() == "gloo":
            results += [everyone.mean(0).to(dtype), (everyone * 0.5).sum(0).to(dtype), everyone.mean(0).to(dtype)]
            continue
        for op in (dist.ReduceOp.AVG, half):
            x = values(rank, 7, dtype)
            dist.all_reduce(x, op)
            results.append(x)
        x = torch.zeros(7, dtype=dtype)
        dist.reduce_scatter(x, [values(rank, 7, dtype)] * size, dist.ReduceOp.AVG)
        results.append(x)
    return results


def all_reduce_shapes(rank: int, size: int) -> list[Tensor]:
    results = [numbers(rank, LARGE), torch.tensor(float(rank)), torch.empty(0)]
    for x in results:
        dist.all_reduce(x)
    strided = numbers(rank, 20).view(4, 5).t()
    dense = strided.contiguous()
    dist.all_reduce(dense if dist.get_backend() == "gloo" else strided)
    return [*results, dense if dist.get_backend() == "gloo" else strided.contiguous()]


def coalesced(rank: int, size: int) -> list[Tensor]:
    xs = [values(rank, n) for n in (3, 7)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    if dist.get_backend() == "gloo":
        gathered = [torch.cat([values(other, n) for other in range(size)]) for n in (2, 3)]
        scattered = [sum(values(other, n * size).view(size, n)[rank] for other in range(size)) for n in (2, 3)]
        return [*xs, *gathered, *scattered]
    gathered = [torch.zeros(n * size) for n in (2, 3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for out, n in zip(gathered, (2, 3), strict=True):
            all_gather_single(out, values(rank, n))
    manager.wait()
    scattered = [torch.zeros(n) for n in (2, 3)]
    with dist.distributed_c10d._coalescing_manager():
        for out, n in zip(scattered, (2, 3), strict=True):
            reduce_scatter_single(out, values(rank, n * size))
    return [*xs, *gathered, *scattered]


def reduce_to_roots(rank: int, size: int) -> list[Tensor]:
    results = []
    for root in range(size):
        for x in (values(rank), values(rank, 5, torch.bfloat16), values(rank, 5, torch.int64)):
            dist.reduce(x, root, dist.ReduceOp.SUM)
            results.append(x if rank == root else torch.zeros(1))
    return results


def all_gathers(rank: int, size: int) -> list[Tensor]:
    results = []
    for dtype in (*DTYPES, *COMPLEX, torch.bool):
        outputs = [torch.zeros(5, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, values(rank, 5, dtype))
        results += outputs
    stacked, joined = torch.zeros(size, 2, 3), torch.zeros(2 * size, 3)
    into = stacked if dist.get_backend() == "mpi4dl" else stacked.view(-1, 3)  # gloo cannot stack
    all_gather_single(into, numbers(rank, 6).view(2, 3))
    dist.all_gather_into_tensor(joined, numbers(rank, 6).view(2, 3))
    in_place = torch.zeros(size, 4)
    in_place[rank] = float(rank + 1)
    all_gather_single(in_place.view(-1), in_place[rank])
    return [*results, stacked, joined, in_place]


def all_gather_uneven(rank: int, size: int) -> list[Tensor]:
    """Gloo wants equal sizes, so the reference is what the others hold. Empty ones are part of it."""
    if dist.get_backend() == "gloo":
        return [numbers(other, 3 * other) for other in range(size)]
    outputs = [torch.zeros(3 * other) for other in range(size)]
    dist.all_gather(outputs, numbers(rank, 3 * rank))
    return outputs


def gather_and_scatter(rank: int, size: int) -> list[Tensor]:
    results = []
    for root in range(size):
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            outputs = [torch.zeros(4, dtype=dtype) for _ in range(size)] if rank == root else None
            if dtype.is_complex and dist.get_backend() == "gloo":  # it gathers no such numbers
                outputs = [values(source, 4, dtype) for source in range(size)] if rank == root else None
            else:
                dist.gather(values(rank, 4, dtype), outputs, root)
            x = torch.zeros(4, dtype=dtype)
            rows = [values(root * 10 + to, 4, dtype) for to in range(size)] if rank == root else None
            if dtype.is_complex and dist.get_backend() == "gloo":
                x = values(root * 10 + rank, 4, dtype)
            else:
                dist.scatter(x, rows, root)
            results += [*(outputs or []), x]
    return results


def reduce_scatters(rank: int, size: int) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        x = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter(x, [values(rank + 7 * to, 3, dtype) for to in range(size)])
        y = torch.zeros(2, 2, dtype=dtype)
        reduce_scatter_single(y, values(rank, 4 * size, dtype).view(2 * size, 2))
        z = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter(z, [values(rank + 7 * to, 3, dtype) for to in range(size)], dist.ReduceOp.MAX)
        results += [x, y, z]
    uneven = torch.zeros(2 + rank)
    if dist.get_backend() == "gloo":  # it wants equal sizes
        uneven = torch.stack([numbers(100 * other + rank, 2 + rank) for other in range(size)]).sum(0)
    else:
        dist.reduce_scatter(uneven, [numbers(100 * rank + to, 2 + to) for to in range(size)])
    source = numbers(rank, 64 * size)
    kept = source.clone()
    out = torch.zeros(64)
    dist.reduce_scatter_tensor(out, source)
    return [*results, uneven, out, (source == kept).all()]


def all_to_alls(rank: int, size: int) -> list[Tensor]:
    results = []
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        x = torch.zeros(2 * size, 3, dtype=dtype)
        dist.all_to_all_single(x, values(rank, 6 * size, dtype).view(2 * size, 3))
        results.append(x)
    sizes = [[(a + 2 * b) % 3 for b in range(size)] for a in range(size)]  # rows that rank a has for rank b
    arriving = [sizes[source][rank] for source in range(size)]
    y = torch.zeros(sum(arriving), 2)
    dist.all_to_all_single(y, numbers(rank, 2 * sum(sizes[rank])).view(-1, 2), arriving, sizes[rank])
    outputs = [torch.zeros(n + 1) for n in arriving]
    if dist.get_backend() == "gloo":  # it has no lists here
        outputs = [numbers(10 * source + rank, sizes[source][rank] + 1) for source in range(size)]
    else:
        dist.all_to_all(outputs, [numbers(10 * rank + to, n + 1) for to, n in enumerate(sizes[rank])])
    return [*results, y, *outputs]


def messages(rank: int, size: int) -> list[Tensor]:
    after, before = (rank + 1) % size, (rank - 1) % size
    x, y, z = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(LARGE)
    sending = [
        dist.isend(values(rank, 4), after, tag=5),
        dist.isend(values(rank, 4, torch.bfloat16), after, tag=70_000),
    ]
    dist.irecv(y, before, tag=70_000).wait()
    dist.irecv(x, before, tag=5).wait()
    for work in sending:
        work.wait()
    batch = [dist.P2POp(dist.isend, numbers(rank, LARGE), after), dist.P2POp(dist.irecv, z, before)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    found = torch.zeros(size)
    if rank == 0:
        for _ in range(size - 1):
            w = torch.zeros(1)
            source = dist.recv(w)  # from any rank
            found[source] = w
    else:
        dist.send(torch.tensor([10.0 * rank]), 0)
    return [x, y, z, found]


def objects(rank: int, size: int) -> list[Any]:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(("of", rank), gathered, dst=1)
    told: list[Any] = ["secret", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {to}" for to in range(size)] if rank == 0 else None, src=0)
    return [everyone, gathered, told, mine]


def groups(rank: int, size: int) -> list[Any]:
    """Groups that overlap, one that was given its ranks in another order, one of one rank, and destroyed ones."""
    evens = dist.new_group(list(range(0, size, 2)))
    pairs = [dist.new_group([a, b]) for a in range(size) for b in range(a + 1, size)]
    backwards = dist.new_group(list(range(size))[::-1])
    results: list[Any] = []
    for group in (evens, *pairs, backwards):
        if dist.get_rank(group) >= 0:
            x = numbers(rank, 3)
            dist.all_reduce(x, group=group)
            results += [x, dist.get_rank(group), dist.get_process_group_ranks(group)]
    for group in pairs:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    local = dist.new_group([rank], use_local_synchronization=True)
    x = values(rank)
    dist.all_reduce(x, group=local)
    return [*results, x]


def asynchronous(rank: int, size: int) -> list[Any]:
    """Many at once, waited for in another order, or never; and futures."""
    xs = [numbers(rank + 10 * i, 1000 + i) for i in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    outputs = [torch.zeros(3) for _ in range(size)]
    works.append(dist.all_gather(outputs, numbers(rank, 3), async_op=True))
    dist.all_reduce(torch.ones(100_000), async_op=True)  # nobody waits, and nobody keeps the tensor
    barrier = dist.barrier(async_op=True)
    for work in reversed(works):
        work.wait()
    barrier.wait()
    future = dist.all_reduce(torch.full((3,), float(rank)), async_op=True).get_future()
    (total,) = future.then(lambda done: [done.value()[0] * 2]).wait()
    return [*xs, *outputs, total, works[0].is_completed()]


def in_pieces(rank: int, size: int) -> list[Any]:
    """What is too large for one message, imitated by a limit that nearly all is too large for."""
    group: Any = dist.group.WORLD
    wires = [group._messages, group._collectives] if dist.get_backend() == "mpi4dl" else []
    limits = [wire.max_message_bytes for wire in wires]
    for wire in wires:
        wire.max_message_bytes, wire.max_reduction_bytes = 24, 24
    x = numbers(rank, 50)
    dist.broadcast(x, 1)
    y, z = torch.zeros(50), torch.zeros(50)
    if rank == 0:
        dist.send(numbers(5, 50), 1)
    if rank == 1:
        dist.recv(y, 0)
    dist.all_reduce(numbers(rank, 50))
    reduce_scatter_single(z, numbers(rank, 50 * size))
    results = [x, y, z, *all_gathers(rank, size), *all_to_alls(rank, size)]
    for wire, limit in zip(wires, limits, strict=True):
        wire.max_message_bytes, wire.max_reduction_bytes = limit, 1 << 21
    return results


def threads(rank: int, size: int) -> list[Tensor]:
    """A second thread works on a group of its own at the same time."""
    aside = dist.new_group()
    other = [numbers(rank + i, 1000) for i in range(30)]

    def work_aside() -> None:
        for x in other:
            dist.all_reduce(x, group=aside)

    thread = threading.Thread(target=work_aside)
    thread.start()
    mine = [numbers(rank - i + 100, 1000) for i in range(30)]
    for x in mine:
        dist.all_reduce(x)
    thread.join()
    return mine + other


def functional(rank: int, size: int) -> list[Tensor]:
    """What DTensor and compiled programs call."""
    name = dist.distributed_c10d._get_default_group().group_name
    operations = torch.ops._c10d_functional
    x = numbers(rank, 2 * size)
    given = torch.zeros(2 * size * size)
    results = [
        operations.all_reduce(x, "sum", name),
        operations.all_reduce_(x.clone(), "max", name),
        operations.all_gather_into_tensor(x, size, name),
        operations.all_gather_into_tensor_out(x, size, name, out=given),
        operations.reduce_scatter_tensor(x, "sum", size, name),
        operations.all_to_all_single(x, [2] * size, [2] * size, name),
        operations.broadcast(x, 1, name),
        *operations.all_reduce_coalesced([x, x + 1], "sum", name),
        *operations.all_gather_into_tensor_coalesced([x, x + 1], size, name),
        *operations.reduce_scatter_tensor_coalesced([x, x + 1], "sum", size, name),
    ]
    return [operations.wait_tensor(result) for result in results]
