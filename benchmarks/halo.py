"""Halo exchange against raw mpi4py, alone and around a convolution: microseconds by size of image and grid.

    python -m benchmarks run halo --sizes 256,512,1024 --grids 1x2,2x2 --channels 64 --halo 1

           _______________
          | halo: strips  |     strips            only what travels, packed, sent, received
          |   _________   |     forward           a new padded tensor: the tile, the strips, zeros outside the image
          |  |  tile   |  |     forward_backward  that, and its adjoint: strips of the gradient return and are added
          |  |_________|  |     convolution       forward and backward of one of kernel 2 * halo + 1, against the same
          |_______________|                       on a tile that is padded already

Each grid is a job, and the grids take turns. Both contestants run on the same ranks of it, burst by burst; a burst
takes as long as on its slowest rank.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import options as declared
from benchmarks.common.charts import Lines, lines
from benchmarks.common.options import Options
from benchmarks.common.report import publish
from benchmarks.common.results import Column, spread, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from mpi4dl.comm import Communicator
    from mpi4dl.parallel.spatial import Grid

Work = Callable[[], Any]


class Measure(NamedTuple):
    """What is timed: who is compared with whom, and how often the strips travel in it."""

    title: str
    ours: str
    baseline: str
    trips: int


CONVOLUTION = "convolution"
BURST_SECONDS = 0.05  # the shortest burst: in a few milliseconds one change of context would count for much
MEASURES = {
    "strips": Measure("strips alone", "ours", "raw mpi4py", 1),
    "forward": Measure("exchange, forward", "ours", "raw mpi4py", 1),
    "forward_backward": Measure("exchange, forward and backward", "ours", "raw mpi4py", 2),
    CONVOLUTION: Measure("convolution, forward and backward", "with exchange", "without", 2),
}
OPTIONS = (
    declared.grids("1x2,2x1,2x2"),
    declared.counts("--sizes", "256,512,1024", "heights and widths of the images, in pixels"),
    declared.count("--channels", 64),
    declared.count("--halo", 1, "rows and columns of a neighbour that a rank needs"),
    declared.batch_size(1),
    declared.count("--iterations", 10, "exchanges in a turn, at least"),
    declared.count("--convolutions", 1, "convolutions in a turn, at least"),
    declared.rounds(7),
    declared.DEVICE,
)
QUICK = {"sizes": "32", "grids": "1x2", "channels": 4, "iterations": 2, "rounds": 1}


def check(options: Options) -> str | None:
    for grid, size in product(options.grids, options.sizes):
        if len(grid) != 2 or math.prod(grid) < 2:
            return f"--grids {grid}: an exchange takes two ranks or more, as 1x2"
        if size // max(grid) < options.halo:
            return (
                f"{size} px on a grid of {grid} are tiles of {size // max(grid)} px, less than --halo "
                f"{options.halo}, which would reach beyond the neighbour: use larger --sizes"
            )
    return None


class Neighbour(NamedTuple):
    """A rank that is next to this one, which strips they swap, and the buffers that MPI reads and writes."""

    rank: int
    inside: "tuple[slice, slice]"  # of the tile: what it needs of this rank
    outside: "tuple[slice, slice]"  # of the padded tile: what this rank needs of it
    leaving: "torch.Tensor"
    arriving: "torch.Tensor"
    leaving_bytes: Any
    arriving_bytes: Any


def spans(step: int, length: int, halo: int) -> tuple[slice, slice]:
    """Along one axis, towards the neighbour `step` further: what it needs of the tile, and where its own part goes."""
    if step < 0:
        return slice(0, halo), slice(0, halo)
    if step > 0:
        return slice(length - halo, length), slice(halo + length, halo + length + halo)
    return slice(0, length), slice(halo, halo + length)


class RawExchange:
    """The exchange as one writes it by hand: pack, Irecv, Isend, Waitall, unpack, with up to 8 neighbours.

    `tile` (N, C, h, w) is like the tiles to come. On a GPU, buffers are pinned host memory unless `direct`.
    """

    def __init__(
        self, mpi: "MPI.Comm", shape: tuple[int, ...], tile: "torch.Tensor", halo: int, direct: bool = False
    ) -> None:
        import torch
        from mpi4py import MPI

        def as_bytes(tensor: torch.Tensor) -> Any:
            return [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE]

        self.mpi = mpi
        self.wait = MPI.Request.Waitall
        self.halo = halo
        *images, height, width = tile.shape
        self.shape = (*images, height + 2 * halo, width + 2 * halo)
        rows, cols = shape
        row, col = divmod(mpi.rank, cols)
        staged = tile.is_cuda and not direct
        self.neighbours = []
        for down, right in product((-1, 0, 1), repeat=2):
            if (down, right) != (0, 0) and 0 <= row + down < rows and 0 <= col + right < cols:
                (inner_rows, outer_rows), (inner_cols, outer_cols) = (
                    spans(down, height, halo),
                    spans(right, width, halo),
                )
                inside, outside = (inner_rows, inner_cols), (outer_rows, outer_cols)
                size = tile[(..., *inside)].shape
                where = "cpu" if staged else tile.device
                buffers = [torch.empty(size, dtype=tile.dtype, device=where, pin_memory=staged) for _ in range(2)]
                rank = (row + down) * cols + col + right
                self.neighbours.append(Neighbour(rank, inside, outside, *buffers, *map(as_bytes, buffers)))

    @property
    def sent_bytes(self) -> int:
        return sum(neighbour.leaving.nbytes for neighbour in self.neighbours)

    def tile_of(self, padded: "torch.Tensor") -> "torch.Tensor":
        return padded[..., self.halo : -self.halo, self.halo : -self.halo]

    def post(self, strips: "list[torch.Tensor]") -> "list[MPI.Request]":
        import torch

        for neighbour, strip in zip(self.neighbours, strips, strict=True):
            neighbour.leaving.copy_(strip, non_blocking=True)
        if strips[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        requests = [self.mpi.Irecv(other.arriving_bytes, other.rank) for other in self.neighbours]
        return requests + [self.mpi.Isend(other.leaving_bytes, other.rank) for other in self.neighbours]

    def swap(self, padded: "torch.Tensor") -> None:
        """Bring the strips into a padded tensor that holds the tile already."""
        tile = self.tile_of(padded)
        requests = self.post([tile[(..., *other.inside)] for other in self.neighbours])
        self.unpack(requests, padded)

    def forward(self, tile: "torch.Tensor") -> "torch.Tensor":
        """A new padded tensor, as every activation needs one of its own."""
        requests = self.post([tile[(..., *other.inside)] for other in self.neighbours])
        halo = self.halo
        padded = tile.new_empty(self.shape)
        for side in (padded[..., :halo, :], padded[..., -halo:, :], padded[..., :halo], padded[..., -halo:]):
            side.zero_()
        self.tile_of(padded).copy_(tile)
        self.unpack(requests, padded)
        return padded

    def unpack(self, requests: "list[MPI.Request]", padded: "torch.Tensor") -> None:
        self.wait(requests)
        for other in self.neighbours:
            padded[(..., *other.outside)].copy_(other.arriving, non_blocking=True)

    def adjoint(self, gradient: "torch.Tensor") -> "torch.Tensor":
        """The gradient of the tile, where each strip of the padded tensor's gradient is added where it came from."""
        import torch

        requests = self.post([gradient[(..., *other.outside)] for other in self.neighbours])
        result = self.tile_of(gradient).clone(memory_format=torch.contiguous_format)
        self.wait(requests)
        for other in self.neighbours:
            result[(..., *other.inside)] += other.arriving.to(result.device, non_blocking=True)
        return result


def contests(options: Options, size: int, grid: "Grid") -> tuple[int, dict[str, tuple[Work, Work]]]:
    """The bytes that this rank sends in one exchange, and for every measure what we do and what we compare it with.

    Raises `Refusal` on all ranks if ours and raw mpi4py do not lead to the same numbers.
    """
    import torch
    from torch.nn import functional as F

    from mpi4dl.geometry import Split, Tiling
    from mpi4dl.parallel import spatial

    device, halo, channels = grid.comm.node.device(options.device), options.halo, options.channels
    box = grid.box(options.batch_size, (size, size))

    def integers(height: int, width: int) -> "torch.Tensor":
        """Small integers, so that sums are exact in any order."""
        values = torch.randint(-8, 9, (options.batch_size, channels, height, width), device=device)
        return values.to(torch.float32)

    torch.manual_seed(grid.rank)
    tile = integers(box.rows.length, box.cols.length)
    layout = spatial.from_tile(tile, grid, (size, size)).layout
    batch, rows, cols = layout.tiling.splits
    wider = [Split(axis.cuts, tuple(held.grow(halo, halo) for held in axis.held)) for axis in (rows, cols)]
    beyond = Tiling((batch, wider[0], wider[1]))
    direct = tile.is_cuda and grid.comm.gpu_wire == "direct"
    raw = RawExchange(grid.comm.mpi, grid.shape.space, tile, halo, direct)

    padded, by_hand = layout.exchange_to(beyond)(tile), raw.forward(tile)
    gradient = integers(*padded.shape[-2:])
    leaf, padded_leaf = tile.clone().requires_grad_(), padded.clone().requires_grad_()
    weight = torch.randn(channels, channels, 2 * halo + 1, 2 * halo + 1, device=device, requires_grad=True)

    def forward_backward() -> "torch.Tensor":
        return torch.autograd.grad(layout.exchange_to(beyond)(leaf), leaf, gradient)[0]

    def convolution() -> None:
        result = F.conv2d(spatial.wrap(leaf, layout), weight, padding=halo)
        assert isinstance(result, spatial.SpatialTensor)
        torch.autograd.grad(result.local, (leaf, weight), tile)

    def local_convolution() -> None:
        torch.autograd.grad(F.conv2d(padded_leaf, weight), (padded_leaf, weight), tile)

    pixels = sum(slab.box.rows.length * slab.box.cols.length for slab in layout.exchange_to(beyond).plan.sends)
    sent_bytes = pixels * options.batch_size * channels * tile.itemsize
    agree(grid.comm, "the padded tensor", torch.equal(padded, by_hand))
    agree(grid.comm, "the gradient of the tile", torch.equal(forward_backward(), raw.adjoint(gradient)))
    agree(grid.comm, "the number of bytes sent", sent_bytes == raw.sent_bytes)
    return sent_bytes, {
        "strips": (lambda: layout.exchange_to(beyond).start(tile).pending.wait(), lambda: raw.swap(by_hand)),
        "forward": (lambda: layout.exchange_to(beyond)(tile), lambda: raw.forward(tile)),
        "forward_backward": (forward_backward, lambda: (raw.forward(tile), raw.adjoint(gradient))),
        CONVOLUTION: (convolution, local_convolution),
    }


def agree(comm: "Communicator", what: str, same: bool) -> None:
    comm.agree(None if same else f"{what} differs between our exchange and raw mpi4py's: nothing was measured")


def work(options: Options) -> None:
    """All contests on one grid; an answer has per size and measure the microseconds of ours and of the other."""
    import torch

    from benchmarks.common.ranks import begin, burst_seconds
    from mpi4dl.parallel import spatial

    comm = begin(threads=None)
    grid = spatial.Grid(comm, *options.worker)
    by_size = {size: contests(options, size, grid) for size in options.sizes}
    device = torch.device(options.device)

    def turn() -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for size, (sent_bytes, pairs) in by_size.items():
            most = comm.all_reduce(torch.tensor(sent_bytes), "max")
            answer[str(size)] = {"sent_bytes": int(most)}
            for name, pair in pairs.items():
                count = options.convolutions if name == CONVOLUTION else options.iterations
                count = max(count, math.ceil(BURST_SECONDS / burst_seconds(comm, pair[1], 1, device)))
                answer[str(size)][name] = [1e6 * burst_seconds(comm, each, count, device) for each in pair]
        return answer

    answer_turns(turn, comm)


def run(options: Options) -> None:
    contestants = [options.contestant(str(grid), math.prod(grid), grid) for grid in options.grids]
    take_turns(contestants, options.rounds)
    rows = summarise(contestants)
    channels = f"{options.channels} channels, batch {options.batch_size}, float32, {options.device}"
    title = f"halo of {options.halo}, {channels}"
    publish(options, title, as_tables(rows), draw(rows, title), rows)


def summarise(contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Medians over the turns, and the medians of ratios and differences within a turn."""
    rows = []
    for name, measure in MEASURES.items():
        for contestant in contestants:
            for size in contestant.answers[0]:
                ours, other = zip(*(answer[size][name] for answer in contestant.answers), strict=True)
                moved_bytes = contestant.answers[0][size]["sent_bytes"] * measure.trips
                row = {
                    "measure": name,
                    "grid": contestant.name,
                    "ranks": contestant.ranks,
                    "size_px": int(size),
                    "moved_bytes": moved_bytes,
                    **spread("microseconds", ours),
                    **spread("baseline_microseconds", other),
                    **spread("ratio", [a / b for a, b in zip(ours, other, strict=True)]),
                    **spread("difference_microseconds", [a - b for a, b in zip(ours, other, strict=True)]),
                }
                if name != CONVOLUTION:
                    row["megabytes_per_second"] = moved_bytes / row["microseconds"]
                    row["baseline_megabytes_per_second"] = moved_bytes / row["baseline_microseconds"]
                rows.append(row)
    return rows


def as_tables(rows: list[dict[str, Any]]) -> str:
    """A table for each measure. Bytes are those that the busiest rank sends; MB are 10^6 bytes."""
    parts = []
    for name, measure in MEASURES.items():
        columns = [Column("grid", "grid"), Column("px", "size_px"), Column("kB sent", "moved_bytes", 1, 1e-3)]
        columns += [Column(f"{measure.ours} us", "microseconds", 0)]
        columns += [
            Column(f"{measure.baseline} us", "baseline_microseconds", 0),
            Column("ratio", "ratio", 2, ends=True),
        ]
        if name == CONVOLUTION:
            columns.append(Column("difference us", "difference_microseconds", 0))
        else:
            columns += [Column("ours MB/s", "megabytes_per_second", 0)]
            columns += [Column("raw MB/s", "baseline_megabytes_per_second", 0)]
        parts.append(f"\n{measure.title}\n{table([row for row in rows if row['measure'] == name], columns)}")
    return "\n".join(parts)


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Microseconds over the size of the image: a panel for each measure, lines for each grid, ours and the other."""
    panels = []
    for name, measure in MEASURES.items():
        points = [
            {"who": f"{row['grid']}, {who}", "px": row["size_px"], "us": row[key]}
            for row in rows
            if row["measure"] == name
            for who, key in ((measure.ours, "microseconds"), (measure.baseline, "baseline_microseconds"))
        ]
        panels.append(Lines(points, "px", "us", lambda p: p["who"], "px", "microseconds", measure.title, log="xy"))
    return lines(panels, title)
