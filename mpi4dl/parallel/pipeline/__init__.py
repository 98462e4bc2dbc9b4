"""Pipelines: a model cut into stages, a table of who does what in which order, and what it comes to."""

from mpi4dl.parallel.pipeline.checker import Report, TableError, check
from mpi4dl.parallel.pipeline.schedules import SCHEDULES, forward_only, gems, table_for
from mpi4dl.parallel.pipeline.simulator import Costs, Simulation, simulate
from mpi4dl.parallel.pipeline.table import Action, Placement, Table

__all__ = [
    "Action",
    "Costs",
    "Placement",
    "Report",
    "SCHEDULES",
    "Simulation",
    "Table",
    "TableError",
    "check",
    "forward_only",
    "gems",
    "simulate",
    "table_for",
]
