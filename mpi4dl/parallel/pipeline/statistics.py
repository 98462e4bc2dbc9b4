"""Running statistics of batch norm where two copies of a stage (GEMS) see every other wave of microbatches.

A plain loop updates them once per microbatch, in order. Here each copy keeps what its own microbatches would add; after
the step the copies exchange that, and both update their statistics in the order of the plain loop, to the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.microbatches import Microbatch
from mpi4dl.parallel.pipeline.decisions import attributes_of

Norm = nn.modules.batchnorm._NormBase


class RunningStatistics:
    """Those of one stage, whose copies are on the ranks of `comm`; `speaks[direction]`: this rank tells the others."""

    def __init__(self, module: nn.Module, comm: Communicator, speaks: dict[int, bool]) -> None:
        self.module, self.comm, self.speaks = module, comm, speaks
        self.norms = [m for m in module.modules() if isinstance(m, Norm) and m.training and m.running_mean is not None]
        norms = {id(value) for m in self.norms for value in m.buffers(recurse=False)}
        self.others = [(name, b) for name, b in module.named_buffers() if id(b) not in norms]
        self._found: dict[tuple[int, int], list[dict[str, Tensor | None]]] = {}

    @contextmanager
    def collect(self, direction: int, number: int) -> Iterator[None]:
        """Keep what this microbatch adds to the statistics, and leave them as they are."""
        versions, attributes = [b._version for _, b in self.others], attributes_of(self.module)
        before = [(m.momentum, dict(m._buffers)) for m in self.norms]
        for m in self.norms:
            m.momentum = 1.0  # so that the statistics become those of this microbatch
            for name, value in m._buffers.items():
                m._buffers[name] = None if value is None else torch.zeros_like(value)
        row = []
        try:
            yield
        finally:
            for m, (momentum, buffers) in zip(self.norms, before, strict=True):
                row.append(dict(m._buffers))
                m.momentum = momentum
                m._buffers.update(buffers)
        for m, found in zip(self.norms, row, strict=True):
            times = found["num_batches_tracked"]
            if times is not None and times > 1:
                raise Refusal(
                    f"a {type(m).__name__} is used {int(times)} times on one image: the copies of a model that runs in "
                    "both directions cannot follow its running statistics; leave out `bidirectional`"
                )
        for (name, buffer), version in zip(self.others, versions, strict=True):
            if buffer._version != version:
                raise Refusal(
                    f"the model changes its buffer {name} as it runs, which is no batch norm's: its copies in both "
                    "directions would differ; leave out `bidirectional`"
                )
        changed = next(
            (name for name, value in attributes_of(self.module).items() if attributes.get(name) != value), None
        )
        if changed is not None:
            raise Refusal(
                f"the model changes its attribute {changed} as it runs: its copies in both directions would differ; "
                "leave out `bidirectional`"
            )
        self._found[direction, number] = row

    @torch.no_grad()
    def apply(self, microbatches: Sequence[Microbatch]) -> None:
        """Update the statistics by all microbatches in order. Collective."""
        if not self.norms:
            return
        like = self.norms[0].running_mean
        assert like is not None
        sizes = [1 + 2 * int(m.num_features) for m in self.norms]
        rows = torch.zeros(len(microbatches), sum(sizes), dtype=torch.float64, device=like.device)
        for row, microbatch in zip(rows, microbatches, strict=True):
            found = self._found.pop((microbatch.direction, microbatch.number), None)
            if found is not None and self.speaks.get(microbatch.direction):
                row.copy_(torch.cat([_flat(values) for values in found]))
        self.comm.all_reduce(rows)
        for row in rows:
            for m, values in zip(self.norms, row.split(sizes), strict=True):
                if values[0] == 0:
                    continue
                if m.num_batches_tracked is not None:
                    m.num_batches_tracked.add_(1)
                factor = m.momentum
                if factor is None:
                    assert m.num_batches_tracked is not None
                    factor = 1.0 / float(m.num_batches_tracked)
                mean, variance = values[1:].split(int(m.num_features))
                for running, value in ((m.running_mean, mean), (m.running_var, variance)):
                    assert running is not None
                    running.mul_(1 - factor).add_(value.to(running.dtype), alpha=factor)


def _flat(values: dict[str, Tensor | None]) -> Tensor:
    """How often a norm was used on a microbatch, the mean, the variance."""
    mean, variance, times = values["running_mean"], values["running_var"], values["num_batches_tracked"]
    assert mean is not None
    assert variance is not None
    used = torch.ones_like(mean[:1]) if times is None else times.to(mean.dtype).view(1)
    return torch.cat([used, mean, variance])
