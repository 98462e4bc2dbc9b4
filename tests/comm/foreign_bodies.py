"""One rank of a job that runs the bodies of PyTorch's own distributed tests: BACKEND FOLDER [NAME ...].

PyTorch's harness starts a process for each rank of each test; here the ranks of one job run all bodies, one after the
other, each with a process group of its own. What became of each is stored: "passed", "skipped", or a traceback.
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

import mpi4dl.comm.backend  # noqa: F401 for the backend that it registers
from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator, world

PATIENCE = datetime.timedelta(seconds=60)
HANGS_SECONDS = 600
MEETING_SECONDS = 120.0


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
    from torch.testing._internal.common_distributed import DistTestCases
    from torch.testing._internal.distributed import distributed_test

    for able in DistTestCases.backend_feature.values():
        able |= {backend} if "gloo" in able else set()
    distributed_test.BACKEND = LikeGloo(backend)

    class Bodies(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def _barrier(self, wait_for: int | None = None, timeout: float = 0) -> None:
            distributed_test.Barrier.sync(wait_for, MEETING_SECONDS)

    Bodies.meeting = distributed_test.Barrier
    return Bodies


def outcome(comm: Communicator, cls: Any, backend: str, name: str, folder: Path) -> str:
    (folder / "barrier").mkdir(parents=True, exist_ok=True)
    (folder / "test_dir").mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    cls.meeting.barrier_id = 0
    (folder / "lockfile").touch()
    options: dict[str, Any] = {"rank": comm.rank, "world_size": comm.size, "timeout": PATIENCE}
    if backend == "gloo":
        options["store"] = dist.FileStore(str(folder / "store"), comm.size)
    dist.init_process_group(backend, **options)
    body = cls(name)
    body.rank = comm.rank
    body.file_name = str(folder / "file")
    torch.manual_seed(1234)
    try:
        getattr(body, name)()
    except (unittest.SkipTest, SystemExit):
        return "skipped"
    except Exception:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "passed"


def main(backend: str, folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comm = world()
    cls = bodies(backend, comm.size)
    os.environ["RANK"] = str(comm.rank)
    results = {}
    for name in names or sorted(name for name in dir(cls) if name.startswith("test_")):
        faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
        comm.barrier()
        results[name] = outcome(comm, cls, backend, name, folder / backend / name)
        (folder / f"{backend}-{comm.rank}.json").write_text(json.dumps(results))
    faulthandler.cancel_dump_traceback_later()
    comm.barrier()
    os._exit(0)  # the threads that some bodies leave behind do not matter


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
