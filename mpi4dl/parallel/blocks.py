"""The blocks of a model: what stands in a row, and may be computed again, or fetch its halo, as a whole."""

from torch import nn

from mpi4dl.parallel.pipeline.stage import Stage


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Those of a model, or the composite modules that a stage calls one after the other."""
    if not isinstance(module, Stage):
        return blocks(module)
    called = (module.get_submodule(call.target) for call in module.recipe.calls if call.kind == "call_module")
    return [step for step in dict.fromkeys(called) if next(step.children(), None) is not None]


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
