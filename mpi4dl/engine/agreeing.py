"""Whether all ranks were given the same model, optimizer and settings, before any waits for another."""

import hashlib
from typing import Any, NamedTuple, Protocol

import torch

from mpi4dl.comm import Communicator
from mpi4dl.parallel.pipeline.held import Held
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas import learners
from mpi4dl.parallel.replicas.problems import problem_with
from mpi4dl.parallel.replicas.trial import Manner
from mpi4dl.parallel.replicas.update import options_of


class Started(Protocol):
    """What an engine was started with."""

    comm: Communicator
    plan: Plan
    held: Held
    optimizer: torch.optim.Optimizer


class Known(NamedTuple):
    """What this rank alone knows of the model and the optimizer: why it cannot train them, and what must be alike."""

    problem: str | None
    facts: dict[str, Any]
    learnt: list[frozenset[str]]  # the names of what may be trained, for each group of ranks that hold the same


def known_of_model(given: Started, manner: Manner | None, turns: bool) -> Known:
    """What `agree_on_model` compares. No other rank is asked."""
    held, optimizer, name = given.held, given.optimizer, type(given.optimizer).__name__
    description = [(name, shape, str(dtype), name in held.trained) for name, (shape, dtype) in held.shapes.items()]
    digest = hashlib.sha256(repr(description).encode()).hexdigest()[:16]
    settings = [options_of(group) for group in optimizer.param_groups]
    named = {name.split(".", 2)[-1]: p for name, p in held.named_parameters()}  # without stages.0.
    holders = max(each.comm.size for each in held.together)
    problem = problem_with(optimizer, named, holders, given.plan.num_microbatches, given.plan.cuts_parameters)
    if problem is None and manner is not None:
        problem = manner.problem(name, turns)
    if problem is None and manner is not None and given.plan.cuts_parameters and not manner.elementwise:
        which = "tensor" if given.plan.tensor > 1 else "experts"
        problem = (
            f"under {which}({getattr(given.plan, which)}) ranks have parts of parameters, but {name} works on whole "
            "ones: choose another optimizer"
        )
    facts = {"plan": given.plan, "model": digest, "balance": held.counts, "optimizer": f"{name} {settings}"}
    learnt = [frozenset(name for name, _ in learners(each.parameters, optimizer)) for each in held.together]
    return Known(problem, facts, learnt)


def agree_on_model(given: Started, known: Known, **facts: Any) -> None:
    """Raise Refusal on all ranks if they were started with different models or settings, or with what cannot be."""
    given.comm.agree(known.problem, **known.facts, **facts)
    # All ranks come here, and have the same groups.
    unlike = None
    for together, mine in zip(given.held.together, known.learnt, strict=True):
        for other in together.comm.all_gather_object(mine):
            if mine != other:
                unlike = f"the optimizer has {min(mine ^ other)} on some ranks alone: pass it the same on all"
    given.comm.agree(unlike)
