"""Fine-tuning: what of a model is frozen or stays in evaluation mode, and groups of parameters for an optimizer."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import nn

from mpi4dl._patterns import Names, first_match, select
from mpi4dl.parallel.pipeline.local_stages import LocalStages, names_by_first

Patterns = str | Sequence[str]


def freeze(model: nn.Module, patterns: Patterns) -> list[str]:
    """Freeze the parameters of a plain model whose names match; returns these. Raises ValueError if none do."""
    names = select(patterns, names_by_first(model))
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names


def keep_in_evaluation(model: nn.Module, patterns: Patterns) -> list[str]:
    """Put the modules of a plain model whose paths match, and what is in them, into evaluation mode, to stay there.

    Batch norms then use their running statistics, and leave them. Raises ValueError if a pattern matches none.
    """
    modules = dict(model.named_modules())
    names = select(patterns, {name: (name,) for name in modules if name}, "module")
    for name in names:
        modules[name].eval()
    return names


def names_and_trained(model: nn.Module) -> tuple[Names, Set[str]]:
    """The names of each parameter of a plain model, or of what ranks hold of one; and the first ones of the trained."""
    if isinstance(model, LocalStages):
        return model.names_of, model.trained
    return names_by_first(model), {name for name, p in model.named_parameters() if p.requires_grad}


def parameter_groups(
    model: nn.Module,
    rates: Mapping[str, float] | None = None,
    decays: Mapping[str, float] | None = None,
    later: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer, by patterns of their names: learning `rates`, and weight `decays`.

    The first pattern that matches one of a parameter's names counts. Frozen parameters are left out, but those that are
    to be trained `later`, by their first names. `model` is a plain one, or what ranks hold of one: all ranks of any
    plan get the same groups, in the order in which the whole model comes to them, some of them without parameters.

    Raises ValueError if a pattern matches nothing, or nothing is trained.
    """
    names, trained = names_and_trained(model)
    modules = [*model.modules_of.values()] if isinstance(model, LocalStages) else [model]
    learning, keys = {*trained, *later}, {"lr": rates or {}, "weight_decay": decays or {}}
    for pattern in (pattern for values in keys.values() for pattern in values):
        select((pattern,), names)
    options: dict[str, tuple[tuple[str, float], ...]] = {}
    for first, same in names.items():
        if first in learning:
            found = ((key, values.get(first_match(values, same) or "")) for key, values in keys.items())
            options |= dict.fromkeys(same, tuple((key, value) for key, value in found if value is not None))
    groups: dict[tuple[tuple[str, float], ...], dict[str, Any]] = {
        chosen: {"params": [], **dict(chosen)} for chosen in dict.fromkeys(options.values())
    }
    if not groups:
        raise ValueError("all parameters are frozen: nothing is trained")
    seen: set[int] = set()
    for name, p in (pair for module in modules for pair in module.named_parameters()):
        if name in options and id(p) not in seen:
            seen.add(id(p))
            groups[options[name]]["params"].append(p)
    return list(groups.values())
