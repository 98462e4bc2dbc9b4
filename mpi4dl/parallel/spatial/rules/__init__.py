"""One small rule per family of operators: what PyTorch's function does on a tensor that is spread over ranks."""

from mpi4dl.parallel.spatial.rules import (  # noqa: F401  (importing a module registers its rules)
    attributes,
    convolution,
    indexing,
    losses,
    normalization,
    padding,
    pointwise,
    pooling,
    randomness,
    reductions,
    resampling,
    views,
)
