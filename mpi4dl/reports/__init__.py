"""Results of runs, as a page for a browser: read from their folders, without MPI."""

from mpi4dl.reports.page import write

__all__ = ["write"]
