"""Gradients are the sums over the ranks, in buckets that every rank starts in the same order."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Pending, exchange
from mpi4dl.parallel.replicas.buckets import plan_buckets
from mpi4dl.parallel.replicas.parameter_sums import summed
from mpi4dl.parallel.replicas.reducer import Reducer, plan_layout
from tests.pool.ranks import Ranks, on_ranks

F64, F32 = torch.float64, torch.float32


class Branches(nn.Module):
    """A trunk, and branches of which each rank may use others. One parameter is frozen, one never takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 3, dtype=F64)
        self.left = nn.Linear(3, 3, dtype=F64)
        self.right = nn.Linear(3, 3, dtype=F64)
        self.head = nn.Linear(3, 2, dtype=F64)
        self.idle = nn.Parameter(torch.ones(2, dtype=F64))
        self.frozen = nn.Parameter(torch.ones(2, dtype=F64), requires_grad=False)

    def forward(self, x: Tensor, branches: str) -> Tensor:
        x = self.trunk(x)
        for name in branches:
            x = torch.tanh({"l": self.left, "r": self.right}[name](x))
        return (self.head(x) * self.frozen) ** 2


def model_and_images(num_ranks: int) -> tuple[Branches, Tensor]:
    torch.manual_seed(3)
    return Branches(), torch.randn(num_ranks, 5, 4, dtype=F64)


def reference(images: Tensor, branches: list[str]) -> dict[str, Tensor | None]:
    """The gradients of the sum of what the ranks compute, by plain autograd in one process."""
    model, _ = model_and_images(len(images))
    for image, used in zip(images, branches, strict=True):
        model(image, used).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def compare(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for name, p in model.named_parameters():
        wanted = expected[name]
        assert (p.grad is None) == (wanted is None), name
        if p.grad is not None and wanted is not None:
            torch.testing.assert_close(p.grad, wanted, rtol=1e-12, atol=1e-12, msg=name)


class Recording:
    """Writes down the number of elements of every reduction that a communicator starts, in order."""

    def __init__(self, comm: Communicator) -> None:
        self.lengths: list[int] = []
        self._reduce = comm.iall_reduce
        comm.iall_reduce = self.start  # type: ignore[method-assign]

    def start(self, tensor: Tensor, op: str = "sum") -> Pending:
        self.lengths.append(tensor.numel())
        return self._reduce(tensor, op)


def reducer_of(parameters: Iterable[nn.Parameter], comm: Communicator, bucket_bytes: int, zero: int = 0) -> Reducer:
    trained = [p for p in parameters if p.requires_grad]
    return Reducer(trained, comm, plan_layout(trained, comm, bucket_bytes), zero)


def reduce_branches(comm: Communicator, branches: list[str], bucket_bytes: int) -> list[int]:
    """Two steps on different images; returns the lengths of the reductions of a step."""
    model, images = model_and_images(comm.size)
    reducer = reducer_of(model.parameters(), comm, bucket_bytes).attach()
    recording = Recording(reducer.comm)
    for step in (0, 1):
        recording.lengths.clear()
        reducer.prepare()
        model(images[comm.rank] + step, branches[comm.rank]).sum().backward()
        reducer.finish()
        compare(model, reference(images + step, branches))
        check_views(reducer)
    return recording.lengths


def check_views(reducer: Reducer) -> None:
    for number, bucket in enumerate(reducer.layout.buckets):
        flat = reducer.owned(number)
        for i, offset in zip(bucket.members, bucket.offsets, strict=True):
            gradient = reducer.parameters[i].grad
            if gradient is not None:
                assert gradient.data_ptr() == flat.data_ptr() + offset * flat.element_size()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    "branches",
    [["l"], ["lr", "lr"], ["lr", "rl"], ["l", "r"], ["", "lr", "l"], ["l", "l", "l"], ["r", "", "rl", "l"]],
    ids=lambda branches: "-".join(branches),
)
def test_gradients_are_the_sum_over_ranks_whichever_branches_each_uses(
    ranks: Ranks, branches: list[str], bucket_bytes: int
) -> None:
    """A parameter that no rank used has no gradient, as in plain PyTorch; the order of reductions is the plan's."""
    model, _ = model_and_images(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    plan = plan_buckets([p.numel() for p in trained], [0] * len(trained), bucket_bytes // 8)
    results = ranks(len(branches)).run(reduce_branches, branches, bucket_bytes)
    assert results == [[*(b.length for b in plan), len(trained)]] * len(branches)


def shared_out(comm: Communicator, zero: int, bucket_bytes: int, num_passes: int) -> list[tuple[str, list[float]]]:
    """What this rank owns after passes over different branches, which the reference sums up on its own."""
    branches = ["lr", "r", "l", ""]
    model, images = model_and_images(comm.size)
    reducer = reducer_of(model.parameters(), comm, bucket_bytes, zero).attach()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for step in (0, 1):
        reducer.prepare(accumulate=True)
        sums: dict[str, Tensor | None] = {}
        for number in range(num_passes):
            used = [branches[(rank + number) % 4] for rank in range(comm.size)]
            reducer.begin_pass(last=number == num_passes - 1)
            model(images[comm.rank] + number + step, used[comm.rank]).sum().backward()
            reducer.end_pass()
            for name, gradient in reference(images + number + step, used).items():
                before = sums.get(name)
                sums[name] = gradient if before is None else before if gradient is None else before + gradient
        reducer.finish()
    found = []
    for number in range(len(reducer.layout.buckets)):
        own = reducer.layout.own(number)
        mine = reducer.owned(number)
        assert mine.numel() == own.stop - own.start
        for segment in reducer.layout.segments(number, own):
            wanted, values = (
                sums[names[segment.member]],
                mine[segment.offset - own.start :][: segment.stop - segment.start],
            )
            assert reducer.used[segment.member] == (wanted is not None)
            whole = (
                torch.zeros(reducer.layout.lengths[segment.member], dtype=F64) if wanted is None else wanted.view(-1)
            )
            torch.testing.assert_close(values, whole[segment.start : segment.stop], rtol=1e-12, atol=1e-12)
            found += [(names[segment.member], element) for element in range(segment.start, segment.stop)]
    assert zero < 2 or all(p.grad is None for p in model.parameters())
    return found


@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize(("num_ranks", "zero"), [(2, 1), (2, 2), (3, 2), (4, 1), (4, 2), (1, 2)])
def test_each_rank_gets_the_sum_of_its_own_part(
    ranks: Ranks, num_ranks: int, zero: int, bucket_bytes: int, num_passes: int
) -> None:
    model, _ = model_and_images(1)
    owned = [part for parts in ranks(num_ranks).run(shared_out, zero, bucket_bytes, num_passes) for part in parts]
    everything = [(name, i) for name, p in model.named_parameters() if p.requires_grad for i in range(p.numel())]
    assert sorted(owned) == sorted(everything)


@on_ranks(2)
def test_full_buckets_are_under_way_while_backward_still_runs(comm: Communicator) -> None:
    """Of a plain chain with two buckets one reduction began before backward was over."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    reducer = reducer_of(model.parameters(), comm, 2 * 9 * 4).attach()
    recording, seen = Recording(reducer.comm), []
    model[0].weight.register_hook(lambda gradient: seen.append(len(recording.lengths)))
    reducer.prepare()
    model(torch.ones(1, 3)).sum().backward()
    reducer.finish()
    assert (seen[0], len(reducer.layout.buckets)) == (1, 2)


@on_ranks(3)
def test_reductions_do_not_get_between_the_collectives_of_backward(comm: Communicator) -> None:
    """Backward has collectives of its own, as batch normalisation does, while ranks fill their buckets unevenly."""
    model, images = model_and_images(comm.size)
    reducer = reducer_of(model.parameters(), comm, 1).attach()
    reducer.prepare()
    x = exchange.all_reduce(model.trunk(images[comm.rank]), comm)
    x = (model.left if comm.rank == 0 else model.right)(x)
    x = exchange.all_reduce(x, comm)
    if comm.rank == 0:
        x = x + model.idle.sum()
    x = exchange.all_reduce(x.clone(), comm)
    (model.head(x) ** 2).sum().backward()
    reducer.finish()

    plain, _ = model_and_images(comm.size)
    x = torch.stack([plain.trunk(image) for image in images]).sum(0)
    parts = [(plain.left if rank == 0 else plain.right)(x) for rank in range(comm.size)]
    x = comm.size * torch.stack(parts).sum(0) + plain.idle.sum()
    ((plain.head(x) ** 2).sum() * comm.size).backward()
    compare(model, {name: p.grad for name, p in plain.named_parameters()})


@on_ranks(3)
def test_gradients_that_exist_already_are_summed(comm: Communicator) -> None:
    """The second has none on any rank, the third on one alone."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=F64)) for shape in ((2,), (1, 2), (2,), (2,))]
    parameters.append(nn.Parameter(torch.zeros(2, dtype=F32)))
    for i, p in enumerate(parameters):
        if i != 1 and (i != 2 or comm.rank == 1):
            p.grad = torch.full_like(p, float(comm.rank + 1 + 10 * i))
    wholes = summed(parameters, [p.grad for p in parameters], comm)
    found = [[] if whole is None else whole.flatten().tolist() for whole in wholes]
    assert found == [[6.0] * 2, [], [22.0] * 2, [96.0] * 2, [126.0] * 2]


@on_ranks(4)
def test_low_precision_gradients_round_once(comm: Communicator) -> None:
    """256 + 1 + 1 + 1 = 259, of which bfloat16's neighbours are 258 and 260; added one by one it would stay 256."""
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    reducer = Reducer([p], comm).attach()
    reducer.prepare()
    (p * (256.0 if comm.rank == 0 else 1.0)).sum().backward()
    reducer.finish()
    assert p.grad is not None
    assert p.grad.dtype == torch.bfloat16
    assert p.grad.tolist() == [260.0, 260.0]


@on_ranks(2)
def test_only_a_prepared_backward_is_reduced(comm: Communicator) -> None:
    """An attached reducer leaves a backward pass that it was not prepared for alone."""
    p = nn.Parameter(torch.ones(()))
    reducer = Reducer([p], comm).attach()
    (p * (comm.rank + 1)).backward()
    assert p.grad is not None
    assert float(p.grad) == comm.rank + 1
    reducer.prepare()
    (p * 10).backward()
    reducer.finish()
    assert float(p.grad) == 10.0 * comm.size
    (p * 1).backward()
    assert float(p.grad) == 10.0 * comm.size + 1


@pytest.mark.parametrize("zero", [0, 2])
@on_ranks(2)
def test_gradients_that_share_their_memory_are_left_alone(comm: Communicator, zero: int) -> None:
    """The gradient of a parameter is a view of one that others still need."""
    p, x = nn.Parameter(torch.zeros(1, 4, dtype=F64)), torch.zeros(4, dtype=F64, requires_grad=True)
    reducer = reducer_of([p], comm, 1, zero).attach()
    reducer.prepare()
    y, seen = x + p.view(4), []
    y.register_hook(seen.append)
    (y * torch.arange(4)).sum().backward()
    reducer.finish()
    own = reducer.layout.own(0) if zero else slice(None)
    assert reducer.owned(0).tolist() == [comm.size * i for i in (0.0, 1.0, 2.0, 3.0)[own]]
    assert seen[0].tolist() == [0.0, 1.0, 2.0, 3.0]
