"""What can go wrong between ranks. PyTorch's programs expect a RuntimeError of all of it; each is also what it is."""

import torch.distributed as dist

from mpi4dl.comm.refusal import Mismatch

__all__ = ["Departed", "Mismatch", "TimedOut"]


class TimedOut(TimeoutError, dist.DistBackendError):
    """Other ranks did not come to a call in time. What they do later still arrives: it may be waited for again."""


class Departed(ConnectionError, dist.DistBackendError):
    """A rank has left the job without coming to a call, so that the others would wait for it for ever."""
