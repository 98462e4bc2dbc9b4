"""Spatial parallelism: tiles of an image over ranks, and models that use them as if they were the whole image.

from mpi4dl.comm import world
from mpi4dl.parallel import spatial

grid = spatial.Grid(world(), rows=2, cols=2)
logits = spatial.gather(model(spatial.shard(image, grid)))

`mpi4dl.parallelize` trains such a model; see also `mpi4dl.tiles`.
"""

from typing import TYPE_CHECKING, Any

from mpi4dl.parallel.spatial import rules  # noqa: F401  (registers them)
from mpi4dl.parallel.spatial.gathering import GatheredWarning, gathering
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import gather, retile, widen
from mpi4dl.parallel.spatial.rules.hooks import whole_gradients
from mpi4dl.parallel.spatial.sharding import from_tile, from_tiling, shard, shard_like
from mpi4dl.parallel.spatial.tensor import NoRule, SpatialTensor, register, wrap

if TYPE_CHECKING:
    from mpi4dl.parallel.spatial.explaining import explain, require_rules

__all__ = [
    "GatheredWarning",
    "Grid",
    "Layout",
    "NoRule",
    "SpatialTensor",
    "explain",
    "from_tile",
    "from_tiling",
    "gather",
    "gathering",
    "register",
    "require_rules",
    "retile",
    "shard",
    "shard_like",
    "whole_gradients",
    "widen",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """`explain` and `require_rules` bring what counts messages, which training does not need."""
    if name not in ("explain", "require_rules"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mpi4dl.parallel.spatial import explaining

    return getattr(explaining, name)
