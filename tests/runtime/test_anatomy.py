"""What the planning command says about memory is what PyTorch's allocator counts."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.held import split
from mpi4dl.parallel.plan import Plan
from mpi4dl.runtime.overview import overview
from tests.pool.ranks import Ranks

SIZE = (64, 64)
PLANS = {
    "data": (Plan(data=2), 8),
    "tiles": (Plan(((1, 2),)), 4),
    "data4": (Plan(data=4), 8),
    "stages-data": (Plan(((1, 1), (1, 1)), data=2, microbatches=2), 16),
}


def build() -> nn.Module:
    return models.build("resnet_v2", 10, depth=29, num_filters=24)


def peak_bytes(comm: Communicator, plan: Plan, batch: int, trace: str) -> int:
    """The most bytes that PyTorch had allocated at one time in two steps of training."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        held = split(build, plan, comm, image=(batch // plan.num_microbatches, 3, *SIZE))
        optimizer = torch.optim.Adam(held.parameters(), lr=1e-3)
        engine = Engine(held, plan, optimizer, F.cross_entropy, comm=comm)
        for _ in range(2):
            boxes = [read.box for read in engine.reads(batch, SIZE)]
            tiles = [torch.randn(box.batch.length, 3, box.rows.length, box.cols.length) for box in boxes]
            engine.step(tiles, torch.zeros(batch, dtype=torch.int64), SIZE)
    path = Path(trace).with_suffix(f".{comm.rank}.json")
    found.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    first = min(events, key=lambda event: event["ts"])["args"]
    return max(event["args"]["Total Allocated"] for event in events) - first["Total Allocated"] + first["Bytes"]


EVERY_TIME = {("data", 3), ("tiles", 1), ("stages-data", 1)}
CASES = [
    pytest.param(name, zero, marks=() if (name, zero) in EVERY_TIME else pytest.mark.exhaustive)
    for name in PLANS
    for zero in range(4)
]


@pytest.mark.parametrize(("name", "zero"), CASES)
def test_memory_is_that_which_is_counted(ranks: Ranks, tmp_path: Path, name: str, zero: int) -> None:
    plan, batch = PLANS[name]
    plan = replace(plan, zero=zero)
    seen = overview("resnet_v2", build, plan, (batch, 3, *SIZE), optimizer=partial(torch.optim.Adam, lr=1e-3))
    (share,) = (share for stage, _, share in seen.anatomy() if stage == zero)
    measured = max(ranks(plan.num_ranks).run(peak_bytes, plan, batch, str(tmp_path / "trace")))
    assert share.together == pytest.approx(measured, rel=0.1)


def test_ranks_with_nobody_to_share_with_need_the_same_under_every_zero() -> None:
    plan = Plan(((1, 1), (1, 1)), microbatches=2)
    seen = overview("resnet_v2", build, plan, (4, 3, *SIZE), optimizer=partial(torch.optim.Adam, lr=1e-3))
    alone, *others = ((rank, share) for _, rank, share in seen.anatomy())
    assert others == [alone] * 3
    assert alone[1].buffers == 0 < alone[1].gradients
