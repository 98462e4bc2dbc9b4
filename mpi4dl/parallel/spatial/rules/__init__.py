"""One small rule per family of operators: what PyTorch's function does on a tensor that is spread over ranks.

Importing a module registers its rules.
"""

import mpi4dl.parallel.spatial.rules.along_dim
import mpi4dl.parallel.spatial.rules.attention
import mpi4dl.parallel.spatial.rules.composed
import mpi4dl.parallel.spatial.rules.contraction
import mpi4dl.parallel.spatial.rules.convolution
import mpi4dl.parallel.spatial.rules.custom_functions
import mpi4dl.parallel.spatial.rules.draws
import mpi4dl.parallel.spatial.rules.hooks
import mpi4dl.parallel.spatial.rules.indexing
import mpi4dl.parallel.spatial.rules.losses
import mpi4dl.parallel.spatial.rules.normalization
import mpi4dl.parallel.spatial.rules.padding
import mpi4dl.parallel.spatial.rules.pointwise
import mpi4dl.parallel.spatial.rules.pooling
import mpi4dl.parallel.spatial.rules.reductions
import mpi4dl.parallel.spatial.rules.resampling
import mpi4dl.parallel.spatial.rules.views
import mpi4dl.parallel.spatial.rules.windows
