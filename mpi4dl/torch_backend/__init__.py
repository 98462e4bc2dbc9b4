"""A backend of torch.distributed over MPI: `import mpi4dl.torch_backend`, then `init_process_group("mpi4dl")`.

Ranks find each other through MPI: `mpirun -n 4 python program.py` needs no address, no port and no variables.
DistributedDataParallel, DTensor, `fully_shard`, pipelining and checkpoints then run on the same wire as mpi4dl.
"""

import torch.distributed as dist

from mpi4dl.torch_backend.departure import Departed, Mismatch, TimedOut
from mpi4dl.torch_backend.group import (
    MpiGroup,
    devices,
    gather_into_given_tensors,
    hand_on_monitored_barriers,
    keep_what_ddp_waits_for,
)
from mpi4dl.torch_backend.rendezvous import create_group, meet_through_mpi

__all__ = ["Departed", "Mismatch", "MpiGroup", "TimedOut"]

dist.Backend.register_backend("mpi4dl", create_group, extended_api=True, devices=devices())
meet_through_mpi()
_LIBRARY = gather_into_given_tensors()
hand_on_monitored_barriers()
keep_what_ddp_waits_for()
