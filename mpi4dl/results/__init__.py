"""The results of runs, predictions and evaluations in Python; it needs neither MPI nor pandas.

    import mpi4dl.results
    import pandas

    found = mpi4dl.results.open("runs/mine")
    pandas.DataFrame(found.metrics)         a row for each report: phase, step, epoch, loss ...
    pandas.DataFrame(found.evaluations)     a row for each metric, with its interval
    pandas.DataFrame(found.predictions)     a row for each image

`names`, `formats` and `evaluations` know and write the files. `runs` reads them. By `job`, jobs over many items go on.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4dl.results.runs import FolderResults


def open(path: str | Path) -> "FolderResults":
    """The results in the folder of a run, or in one that `mpi4dl predict` or `mpi4dl evaluate` wrote.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    from mpi4dl.results.runs import FolderResults

    if not Path(path).is_dir():
        raise FileNotFoundError(f"{path}: no such folder: name that of a run, or what predict or evaluate wrote")
    return FolderResults(path)
