"""The blocks of a model: what stands in a row, and may be computed again, or fetch its halo, as a whole."""

from itertools import groupby

from torch import nn

from mpi4dl.parallel.pipeline.program import Value
from mpi4dl.parallel.pipeline.stage import Stage


def rows_of(module: nn.Module) -> list[list[nn.Module]]:
    """The blocks of a model, or the composite modules of a stage, in rows: each returns what the next one takes."""
    return _called(module) if isinstance(module, Stage) else _standing(module)


def _standing(model: nn.Module) -> list[list[nn.Module]]:
    """Rows of a model's blocks, as far as they stand in an ordinary Sequential; others by themselves."""
    left = dict.fromkeys(blocks(model))
    rows = []
    for module in model.modules():
        if type(module).forward is nn.Sequential.forward:
            for goes_on, members in groupby(list(module.children()), left.__contains__):
                rows += [list(members)] if goes_on else []
            for block in module.children():
                left.pop(block, None)
    return rows + [[block] for block in left]


def _called(stage: Stage) -> list[list[nn.Module]]:
    """Rows of the composite modules that a stage calls, each once."""
    rows: list[list[nn.Module]] = []
    known: set[nn.Module] = set()
    last = ""  # whose call was just before
    for call in stage.stage_program.calls:
        block = stage.get_submodule(call.target) if call.kind == "call_module" else None
        if block is None or block in known or next(block.children(), None) is None:
            last = ""
            continue
        goes_on = call.training == call.evaluation == ((Value(last),), {})
        rows = [*rows[:-1], [*rows[-1], block]] if goes_on else [*rows, [block]]
        known.add(block)
        last = call.name
    return rows


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks: the outermost composite modules that stand in a row, in a Sequential or a ModuleList."""
    rows = nn.Sequential | nn.ModuleList | nn.ModuleDict
    found: list[nn.Module] = []

    def is_block(module: nn.Module) -> bool:
        """Composite, with a forward of its own, and not itself a row of blocks."""
        if type(module).forward is nn.Module.forward:
            return False
        nested = any(any(True for _ in child.children()) for child in module.children())
        return any(True for _ in module.children()) and not (isinstance(module, rows) and nested)

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, rows) and is_block(child):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found
