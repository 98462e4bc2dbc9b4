"""One rank of a job that runs the bodies of PyTorch's own distributed tests: BACKEND FOLDER [NAME ...].

PyTorch's harness starts a process for each rank of each test; here the ranks of one job run all bodies, one after the
other, each with a process group of its own, until one fails. What became of each is stored as soon as it is known, for
the next job, which goes on with the bodies that nobody has begun:

    "passed"
    "skipped: ..."   why, in PyTorch's words
    "begun"          the process ended in it, or its job did: a failure too
    a traceback      and the job ends, since other ranks may wait for this one
"""

import datetime
import faulthandler
import json
import os
import sys
import tempfile
import traceback
import unittest
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mpi4dl.torch_backend  # noqa: F401 for the backend that it registers
from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator, world

PATIENCE = datetime.timedelta(seconds=600)
HANGS_SECONDS = 1200
MEETING_SECONDS = 600.0
ONE_FAILED = 1
PASSED, SKIPPED, BEGUN = "passed", "skipped", "begun"


class LikeGloo(str):
    """The name of a backend, for tests that ask whether it is gloo before they do what every backend can."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)


def bodies(backend: str, size: int) -> Any:
    """PyTorch's tests, of which it chooses those that a backend has to pass by its name: here those of gloo."""
    import_torchvision()
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR=tempfile.gettempdir())
    from torch.testing._internal import common_distributed

    if size > 2:  # what PyTorch asks 8 ranks for uses the ranks 1 and 2
        common_distributed.skip_if_small_worldsize = lambda body: body
    from torch.testing._internal.distributed import distributed_test

    for able in common_distributed.DistTestCases.backend_feature.values():
        able |= {backend} if "gloo" in able else set()
    distributed_test.BACKEND = LikeGloo(backend)

    class Bodies(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def _barrier(self, wait_for: int | None = None, timeout: float = 0) -> None:
            distributed_test.Barrier.sync(wait_for, MEETING_SECONDS)

    Bodies.meeting = distributed_test.Barrier
    return Bodies


def run(comm: Communicator, cls: Any, backend: str, name: str, folder: Path) -> str:
    """Run a body, and return "passed", or why it was skipped."""
    (folder / "barrier").mkdir(parents=True, exist_ok=True)
    (folder / "test_dir").mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    cls.meeting.barrier_id = 0
    (folder / "lockfile").touch()
    options: dict[str, Any] = {"rank": comm.rank, "world_size": comm.size, "timeout": PATIENCE}
    if backend == "gloo":
        options["store"] = dist.FileStore(str(folder / "store"), comm.size)
    dist.init_process_group(backend, **options)
    comm.barrier()  # or the end of a body that is skipped at once would be an error to who still connects
    body = cls(name)
    body.rank = comm.rank
    body.file_name = str(folder / "file")
    torch.manual_seed(1234)
    result = PASSED
    try:
        getattr(body, name)()
    except unittest.SkipTest as skip:
        result = f"{SKIPPED}: {skip}"
    except SystemExit as skip:
        result = f"{SKIPPED}: {_why(skip)}"
    comm.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _why(skip: SystemExit) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    (reason,) = {test_skip.message for test_skip in TEST_SKIPS.values() if test_skip.exit_code == skip.code}
    return reason


class Results:
    """What became of the bodies on one rank, in a file that is complete at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_name: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}

    def store(self, name: str, result: str) -> None:
        self.by_name[name] = result
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.by_name))
        new.replace(self.path)


def main(backend: str, folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comm = world()
    cls = bodies(backend, comm.size)
    os.environ["RANK"] = str(comm.rank)
    results = Results(folder / f"{backend}-{comm.rank}.json")
    known = {name for each in comm.all_gather_object(list(results.by_name)) for name in each}
    for name in names or sorted(name for name in dir(cls) if name.startswith("test_")):
        if name in known:
            continue
        faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
        comm.barrier()
        results.store(name, BEGUN)
        try:
            results.store(name, run(comm, cls, backend, name, folder / backend / name))
        except Exception:
            results.store(name, traceback.format_exc())
            comm.mpi.Abort(ONE_FAILED)
    faulthandler.cancel_dump_traceback_later()
    comm.barrier()
    os._exit(0)  # the threads that some bodies leave behind do not matter


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
