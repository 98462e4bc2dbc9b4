"""Imports torchvision beside any build of torch, a CPU-only one included, and only when it is asked for.

Published torchvision wheels may be CUDA builds. Beside a CPU-only torch their compiled operators cannot load, and then
`import torchvision` itself fails, because it gives shape rules for two operators that nobody has declared. Declaring
the *schemas* of these two is enough for its models, transforms and data sets; calling such an operator still fails with
torchvision's own message.
"""

import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from mpi4dl._wording import to_install

UNGUARDED_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def import_torchvision() -> ModuleType:
    """Return the torchvision package, whose import may need two operator schemas declared first.

    On an installation whose compiled operators load, this is `import torchvision` and nothing else.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    prepare_torchvision()
    return import_module("torchvision")


def prepare_torchvision() -> None:
    """Let others import torchvision in their own way from now on. Raises as `import_torchvision`."""
    if "torchvision" not in sys.modules and not _compiled_operators_load():
        _declare_schemas()


@cache
def torchvision_models() -> Mapping[str, str]:
    """The family of each of `torchvision.models.list_models()`, read in its source: the import takes seconds.

    A family is the package of torchvision.models that has it, such as "video"; empty for classifiers.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    found: dict[str, str] = {}
    for models, path in ((at, path) for at in _folders() for path in sorted(Path(at, "models").rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        for registered in re.finditer(r'^@register_model\((?:name="(\w+)")?\)', text, re.MULTILINE):
            function = re.compile(r"^def (\w+)", re.MULTILINE).search(text, registered.end())
            if function is not None:
                found[registered[1] or function[1]] = path.relative_to(Path(models, "models")).parent.name
    return found


def _folders() -> list[str]:
    # Found without importing the package: a failed import would leave some of its modules and shape rules behind.
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        message = f"torchvision is not installed; run {to_install('torchvision')}"
        raise ModuleNotFoundError(message, name="torchvision")
    return [*spec.submodule_search_locations]


def _compiled_operators_load() -> bool:
    libraries = [path for folder in _folders() for path in Path(folder).glob("_C*.so")]
    try:
        for library in libraries:
            torch.ops.load_library(library)
    except OSError:
        return False
    return bool(libraries)


@cache  # Declared once, and kept: the declarations go when their Library object does.
def _declare_schemas() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for schema in UNGUARDED_SCHEMAS:
        library.define(schema)
    return library
