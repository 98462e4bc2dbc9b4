"""The floors of docs/architecture.md, held over the source: who imports whom, who imports MPI, how files look."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mpi4dl"
MAX_LINES = 700

FLOORS = {
    "train": 11,
    "generate": 11,
    "plan": 11,
    "doctor": 11,
    "export": 11,
    "serve": 11,
    "evaluate": 11,
    "predict": 11,
    "report": 11,
    "serving": 10,
    "reports": 9,
    "generation": 9,
    "inference": 9,
    "trainer": 8,
    "forecast": 7,
    "options": 6,
    "engine": 5,
    "checkpoints": 4,
    "tasks": 4,
    "parallel": 3,
    "_memory": 3,
    "comm": 2,
    "geometry": 1,
    "models": 1,
    "datasets": 1,
    "_exits": 0,
    "_files": 0,
    "_randomness": 0,
    "_torchvision": 0,
    "_wording": 0,
    "_patterns": 0,
}
# What a room on floor 1 may import at all: not all of floor 0.
FLOOR_1_MAY_IMPORT = {"geometry": set(), "models": {"_torchvision"}, "datasets": {"geometry"}}


def room_of(module: str) -> str:
    """The part of the package that a module belongs to; empty for `mpi4dl` itself."""
    return [*module.split("."), ""][1]


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Every module that the source names in an import, wherever it stands; `package` is what a leading dot means."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if base == "mpi4dl" and alias.name in FLOORS)


def imported_for_types(source: str) -> set[str]:
    """What is imported under `if TYPE_CHECKING:` alone, which takes no time."""
    return {
        name
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for name in imported_modules(ast.unparse(node), "mpi4dl")
    }


def may_import(room: str, other: str) -> bool:
    if other in (room, ""):
        return True
    if room in FLOOR_1_MAY_IMPORT:
        return other in FLOOR_1_MAY_IMPORT[room]
    return FLOORS[other] < FLOORS[room]


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What the imports of one module break, in words."""
    room = room_of(module)
    if room and room not in FLOORS:
        return [f"{module} has no floor: give {room} one in this test, as in DESIGN"]
    found = []
    for name in imported_modules(source, module if is_package else module.rpartition(".")[0]):
        top, other = name.split(".")[0], room_of(name)
        if top == "mpi4py" and room != "comm":
            found.append(f"{module} imports {name}, which only mpi4dl.comm may")
        if top != "mpi4dl":
            continue
        if other and other not in FLOORS:
            found.append(f"{module} imports {name}, which has no floor")
        elif not room and other and name not in imported_for_types(source):
            found.append(f"{module} imports {name}, but importing the package must stay instant")
        elif room and not may_import(room, other):
            found.append(f"{module} (floor {FLOORS[room]}) imports {name} (floor {FLOORS[other]})")
    return found


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def first_line_says_what_the_file_is_for(source: str) -> bool:
    """True for an empty file too, which says by its name alone that a folder is a package."""
    return not source or (source.startswith('"""') and bool(ast.get_docstring(ast.parse(source))))


def test_every_module_imports_only_from_floors_below_its_own() -> None:
    found = []
    for path in python_files("mpi4dl"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found += violations(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package)
    assert not found, "\n".join(found)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Modules that import each other, by whatever way, of these: wherever the imports stand, also those for types."""
    reached: dict[str, set[str]] = {}
    for module, source in sources.items():
        reached[module] = set()
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            base = node.module if isinstance(node, ast.ImportFrom) else None
            for name in [base, *(f"{base}.{n}" for n in names)] if base else names:
                # To import a module is to import the packages that it lies in.
                while name:
                    if name in sources and not f"{module}.".startswith(f"{name}."):
                        reached[module].add(name)
                    name = name.rpartition(".")[0]
    growing = True
    while growing:
        growing = False
        for module, found in reached.items():
            more = set().union(found, *(reached[other] for other in found))
            growing |= more != found
            reached[module] = more
    return [
        sorted(others)
        for m in sources
        if m in (others := {n for n in reached[m] if m in reached[n]} | {m} & reached[m])
    ]


def test_no_modules_import_each_other() -> None:
    assert circles({module_of(path): path.read_text() for path in python_files("mpi4dl")}) == []


def test_the_finder_of_circles_can_fail() -> None:
    sources = {
        "p": "",
        "p.a": "from p.b import x",
        "p.b": "if TYPE_CHECKING:\n    import p.c",
        "p.c": "from p import a",
    }
    assert circles(sources) == [["p.a", "p.b", "p.c"]] * 3
    assert circles({"p": "", "p.q": "from p.q.r import x", "p.q.r": "", "p.s": "from p.q import r"}) == []
    assert circles({"p.q": "from p.q.r import x", "p.q.r": "import p.s", "p.s": "import p.q.r"}) != []


def test_no_name_stands_for_two_things() -> None:
    found: dict[str, list[str]] = {}
    for path in python_files("mpi4dl"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module_of(path))
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    files = python_files("mpi4dl", "tests", "benchmarks", "examples")
    assert PACKAGE / "geometry" / "boxes.py" in files
    assert [str(path) for path in files if not first_line_says_what_the_file_is_for(path.read_text())] == []


def test_no_file_is_longer_than_one_idea() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in python_files("mpi4dl")}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, mpi4dl; print(sorted({'torch', 'torchvision', 'mpi4py', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("mpi4dl.comm.exchange", "from mpi4dl.parallel import spatial", "(floor 2) imports mpi4dl.parallel (floor 3)"),
        ("mpi4dl.comm.exchange", "from mpi4dl import engine", "imports mpi4dl.engine"),
        ("mpi4dl.comm.exchange", "import mpi4dl.train as t", "imports mpi4dl.train"),
        ("mpi4dl.comm.exchange", "def late():\n    import mpi4dl.engine", "imports mpi4dl.engine"),
        ("mpi4dl.comm.exchange", "from ..parallel.spatial import tensor", "imports mpi4dl.parallel.spatial"),
        ("mpi4dl.comm.exchange", "from .. import parallel", "imports mpi4dl.parallel"),
        ("mpi4dl.models.resnet", "from mpi4dl.geometry import Box", "(floor 1) imports mpi4dl.geometry (floor 1)"),
        ("mpi4dl.datasets.folder", "import mpi4dl._torchvision", "imports mpi4dl._torchvision"),
        ("mpi4dl.geometry", "import mpi4dl.models", "imports mpi4dl.models"),
        ("mpi4dl.checkpoints.state", "import mpi4dl.engine", "(floor 4) imports mpi4dl.engine (floor 5)"),
        ("mpi4dl.train", "import mpi4dl.export", "(floor 11) imports mpi4dl.export (floor 11)"),
        ("mpi4dl.engine", "import mpi4dl.unheard_of", "imports mpi4dl.unheard_of, which has no floor"),
        ("mpi4dl.unheard_of", "", "mpi4dl.unheard_of has no floor"),
        ("mpi4dl.engine", "from mpi4py import MPI", "imports mpi4py, which only mpi4dl.comm may"),
        ("mpi4dl.trainer.folder", "if True:\n    import mpi4py.MPI", "imports mpi4py.MPI, which only mpi4dl.comm may"),
        ("mpi4dl", "from mpi4dl.engine import Engine", "must stay instant"),
    ],
)
def test_the_checker_finds_what_breaks_the_floors(module: str, source: str, complaint: str) -> None:
    (found,) = violations(module, source, is_package=module == "mpi4dl")
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mpi4dl.train", "from mpi4dl.engine import Engine\nfrom mpi4dl.options.config import parse\nimport torch"),
        ("mpi4dl.engine", "import mpi4dl.checkpoints.state\nfrom mpi4dl import geometry"),
        ("mpi4dl.trainer.folder", "from mpi4dl import __version__\nfrom mpi4dl.comm import world"),
        ("mpi4dl.parallel.spatial.tensor", "from mpi4dl.parallel.replicas import reducer\nfrom . import rules"),
        ("mpi4dl.comm.communicator", "from mpi4py import MPI\nfrom mpi4dl.geometry import Box"),
        ("mpi4dl.models.registry", "from mpi4dl._torchvision import import_torchvision\nfrom .resnet import resnet"),
        ("mpi4dl.datasets.folder", "from mpi4dl.geometry import Box"),
    ],
)
def test_the_checker_allows_what_the_floors_allow(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_the_checker_of_first_lines_can_fail() -> None:
    assert first_line_says_what_the_file_is_for('"""Adds."""\n')
    assert first_line_says_what_the_file_is_for("")
    assert not first_line_says_what_the_file_is_for("import os\n")
    assert not first_line_says_what_the_file_is_for('\n"""Too late."""\n')
    assert not first_line_says_what_the_file_is_for('""""""\n')
