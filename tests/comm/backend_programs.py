"""One rank of a job that runs all scenarios over one backend and stores what came out: BACKEND FOLDER [NAME ...]."""

import datetime
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

import mpi4dl.torch_backend  # noqa: F401 for the backend that it registers
from mpi4dl.comm import world
from tests.comm import backend_api, backend_collectives, backend_pipelines, backend_training
from tests.comm.backend_names import API, COLLECTIVES, PIPELINES, SCENARIOS

PATIENCE = datetime.timedelta(minutes=10)


def module_of(name: str) -> ModuleType:
    if name in API:
        return backend_api
    if name in PIPELINES:
        return backend_pipelines
    return backend_collectives if name in COLLECTIVES else backend_training


def main(backend: str, folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")  # of PyTorch, about PyTorch
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if backend == "gloo":
        comm = world()
        store = dist.FileStore(str(folder / "store"), comm.size)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=PATIENCE)
    else:
        dist.init_process_group("mpi4dl", timeout=PATIENCE)
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}
    for name in names or SCENARIOS:
        torch.manual_seed(0)
        begin = time.perf_counter()
        try:
            results[name] = getattr(module_of(name), name)(rank, size)
        except Exception:
            results[name] = traceback.format_exc()
            if names:
                traceback.print_exc()
        if names:
            print(f"{name}: {time.perf_counter() - begin:.2f} s", file=sys.stderr)
        torch.save(results, folder / f"{backend}-{rank}-of-{size}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
