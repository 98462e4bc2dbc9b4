"""One rank of a job that runs all scenarios over one backend and stores what came out: BACKEND FOLDER [NAME ...]."""

import ast
import datetime
import sys
import time
import traceback
import warnings
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

import mpi4dl.torch_backend  # noqa: F401 for the backend that it registers
from mpi4dl.comm import world

PATIENCE = datetime.timedelta(minutes=10)
# Gloo of PyTorch 2.10 loses connections of pipelines, and its FSDP2 mixes types in the backward pass, over any backend.
BROKEN = {"pipelines", "fsdp2_mixed_precision"} if torch.__version__.startswith("2.10.") else set()


def scenarios() -> dict[str, str]:
    """The module of each scenario, which is a function of a rank and of how many there are; imported by nobody yet."""
    found = {}
    for module in ("collectives", "api", "training", "pipelines"):
        for node in ast.parse((Path(__file__).parent / f"backend_{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and [each.arg for each in node.args.args] == ["rank", "size"]:
                found[node.name] = f"tests.comm.backend_{module}"
    return found


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
    modules = scenarios()
    for name in names or sorted(modules.keys() - BROKEN, key=[*modules].index):
        torch.manual_seed(0)
        begin = time.perf_counter()
        try:
            results[name] = getattr(import_module(modules[name]), name)(rank, size)
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
