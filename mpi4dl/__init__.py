"""mpi4dl trains unmodified PyTorch models on images too large for one device, exactly, over MPI."""

__version__ = "0.1.0"
