"""Tools for those who change mpi4dl; no part of the package."""
