"""Tables: for each rank, who does what in which order, made by schedules, checked, timed and drawn: no tensors."""

from mpi4dl.parallel.tables.schedules import SCHEDULES, forward_only, gems, table_for
from mpi4dl.parallel.tables.simulator import Costs, Report, Simulation, TableError, check, simulate
from mpi4dl.parallel.tables.table import Action, Placement, Table

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
