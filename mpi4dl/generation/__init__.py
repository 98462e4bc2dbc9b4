"""Text out of trained models: many requests in one batch, which join and leave it at any token."""

from mpi4dl.generation.batcher import Batcher
from mpi4dl.generation.requests import Event, Sampling, Stats, Usage

__all__ = ["Batcher", "Event", "Sampling", "Stats", "Usage"]
