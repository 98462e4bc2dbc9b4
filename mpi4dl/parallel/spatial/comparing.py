"""What ranks compare in a training loop of the user's own, so that none goes on alone or with other numbers."""

import math
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.tensor import function_name

UNLIKE = {
    "places": "ranks {} are in different calls of models, backward passes of outputs, or uses of maps that hooks keep, "
    "of gradients that they see, or of spread outputs: make all of them on all ranks, in the same order (a set has "
    "none)",
    "modes": "ranks {} call the model in other modes (train or eval, with or without gradients), or train other "
    "parameters: do the same on all ranks",
    "inputs": "ranks {} called the model with other inputs, but tiles are cut of one image that all ranks have: seed "
    "the shuffle and the augmentations of your data alike on all ranks (torch.manual_seed, or a generator for the "
    "DataLoader), and give no rank a part of the data alone",
    "weights": "the parameters or buffers of ranks {} differ: change them on all ranks alike, and let each parameter "
    "be used by its module's attribute, through a call of the model",
}


def compared(comm: Communicator, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of all ranks, unless they differ where they must not."""
    found = comm.all_gather_object(facts)
    for name, words in UNLIKE.items():
        for rank, theirs in enumerate(found):
            if theirs.get(name) != facts.get(name):
                raise comm.told(Refusal(words.format(f"{min(rank, comm.rank)} and {max(rank, comm.rank)}")))
    return found


def compare_use(grid: Grid, function: Any) -> None:
    """Refuse a function that not all ranks of the grid call now. Collective."""
    compared(grid.comm, {"places": function_name(function)})


def compare_gradients(comm: Communicator, gradient: Tensor, place: Any) -> None:
    """Refuse gradients of other outputs, or that differ by more than rounding: kernels of GPUs may add in any order."""
    numbers = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).double().flatten()
    places = torch.arange(len(numbers), device=numbers.device) % 251 + 1
    facts = {"places": place, "sums": (float(numbers.abs().sum()), float((numbers * places).sum()))}
    sizes, sums = zip(*(theirs["sums"] for theirs in compared(comm, facts)), strict=True)
    limit = 251 * max(sizes) * max(1e-9, 10 * torch.finfo(gradient.dtype).eps)
    if len({math.isfinite(each) for each in sums}) > 1 or max(sums) - min(sums) > limit:
        raise Refusal(
            "the ranks computed other losses of the same outputs of the model: seed them alike before heads beside the "
            "model and losses are made (torch.manual_seed), use the same targets, and take gradients in the same order"
        )
