"""The floors of docs/architecture.md, held over the source: who imports whom, who imports MPI, how files look."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mpi4dl"

FLOORS = {
    "__main__": 13,
    "train": 12,
    "generate": 12,
    "plan": 12,
    "doctor": 12,
    "export": 12,
    "serve": 12,
    "evaluate": 12,
    "predict": 12,
    "report": 12,
    "slides": 12,
    "embed": 12,
    "view": 12,
    "reports": 11,
    "text": 11,
    "inference": 11,
    "viewer": 11,
    "training": 10,
    "runs": 9,
    "results": 8,
    "estimate": 8,
    "options": 7,
    "engine": 6,
    "checkpoints": 5,
    "tasks": 5,
    "parallel": 4,
    "_memory": 3,
    "torch_backend": 4,
    "comm": 2,
    "geometry": 1,
    "models": 1,
    "datasets": 1,
    "_torchvision": 1,
    "_commands": 0,
    "_compiler": 0,
    "_files": 0,
    "_signatures": 1,
    "_http": 0,
    "_numbers": 0,
    "_randomness": 0,
    "_wording": 0,
    "_palette": 0,
    "_patterns": 0,
    "_progress": 1,
}
# What a room on floor 1 may import at all: not all of floor 0.
FLOOR_1_MAY_IMPORT = {
    "geometry": set(),
    "models": {"_torchvision", "_wording"},
    "datasets": {"geometry", "_files", "_randomness", "_wording"},
    "_torchvision": {"_wording"},
}


# Within mpi4dl.parallel, from below: each may import those before it.
OF_PARALLEL = (
    "disk tables inputs nests replicas cpu_kernels spatial experts tensor plan pipeline blocks costs streaming cut "
    "own_loop".split()
)


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    parsed.cache_clear()
    imported_for_types.cache_clear()


def room_of(module: str) -> str:
    """The part of the package that a module belongs to; empty for `mpi4dl` itself."""
    return [*module.split("."), ""][1]


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Every module that the source names in an import, wherever it stands; `package` is what a leading dot means."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if base == "mpi4dl" and alias.name in FLOORS)


@cache
def imported_for_types(source: str) -> set[str]:
    """What is imported under `if TYPE_CHECKING:` alone, which takes no time."""
    return {
        name
        for node in parsed(source).body
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
        if top == "mpi4py" and room not in ("comm", "torch_backend"):
            found.append(f"{module} imports {name}, which only mpi4dl.comm and torch_backend may")
        if top != "mpi4dl":
            continue
        if other and other not in FLOORS:
            found.append(f"{module} imports {name}, which has no floor")
        elif not room and other and name not in imported_for_types(source):
            found.append(f"{module} imports {name}, but importing the package must stay instant")
        elif room and not may_import(room, other):
            found.append(f"{module} (floor {FLOORS[room]}) imports {name} (floor {FLOORS[other]})")
        elif room == other == "parallel" and name not in imported_for_types(source):
            mine, theirs = ([*path.split("."), "", ""][2] for path in (module, name))
            if mine and theirs and OF_PARALLEL.index(theirs) > OF_PARALLEL.index(mine):
                found.append(f"{module} imports {name}, but parallel.{theirs} is above parallel.{mine}")
    return found


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def first_line_says_what_the_file_is_for(source: str) -> bool:
    """True for an empty file too, which says by its name alone that a folder is a package."""
    return not source or re.match(r'"""(?!""")\s*\S', source) is not None


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
        for node in ast.walk(parsed(source)):
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
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module_of(path))
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    files = python_files("mpi4dl", "tests", "tools", "benchmarks", "examples")
    assert PACKAGE / "geometry" / "boxes.py" in files
    assert [str(path) for path in files if not first_line_says_what_the_file_is_for(path.read_text())] == []


def test_the_files_that_contributors_are_sent_to_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = {path for path in re.findall(r"`([\w/.]+\.(?:py|cfg))`", text) if path != "my_code.py"}
    assert len(named) > 20
    assert {path for path in named if not (ROOT / path).is_file() and not (PACKAGE / path).is_file()} == set()


def test_the_table_of_contributors_names_few_files_and_what_is_in_them() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line)[1:4] for line in text.splitlines() if line.startswith("| a")]
    assert len(rows) >= 12
    for what, files, how in rows:
        edited = [ROOT / name if (ROOT / name).is_file() else PACKAGE / name
                  for name in re.findall(r"`([\w/]+\.(?:py|cfg))`", files + how)]  # fmt: skip
        either = files.count("` or `")
        assert len(edited) - either <= 3, what
        sources = "\n".join(path.read_text() for path in edited)
        names = set(re.findall(r"`([A-Z][\w.]+)`", how)) - {"Task"}
        assert {name for name in names if not re.search(rf"\b{name.split('.')[-1]}\b", sources)} == set(), what


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, mpi4dl; print(sorted({'torch', 'torchvision', 'mpi4py', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("mpi4dl.comm.exchange", "from mpi4dl.parallel import spatial", "(floor 2) imports mpi4dl.parallel (floor 4)"),
        ("mpi4dl.comm.exchange", "from mpi4dl import engine", "imports mpi4dl.engine"),
        ("mpi4dl.comm.exchange", "import mpi4dl.train as t", "imports mpi4dl.train"),
        ("mpi4dl.comm.exchange", "def late():\n    import mpi4dl.engine", "imports mpi4dl.engine"),
        ("mpi4dl.comm.exchange", "from ..parallel.spatial import tensor", "imports mpi4dl.parallel.spatial"),
        ("mpi4dl.comm.exchange", "from .. import parallel", "imports mpi4dl.parallel"),
        ("mpi4dl.models.resnet", "from mpi4dl.geometry import Box", "(floor 1) imports mpi4dl.geometry (floor 1)"),
        ("mpi4dl.datasets.sources", "import mpi4dl._torchvision", "imports mpi4dl._torchvision"),
        ("mpi4dl.geometry", "import mpi4dl.models", "imports mpi4dl.models"),
        ("mpi4dl.checkpoints.checkpoints", "import mpi4dl.engine", "(floor 5) imports mpi4dl.engine (floor 6)"),
        ("mpi4dl.train", "import mpi4dl.export", "(floor 12) imports mpi4dl.export (floor 12)"),
        ("mpi4dl.engine", "import mpi4dl.unheard_of", "imports mpi4dl.unheard_of, which has no floor"),
        ("mpi4dl.unheard_of", "", "mpi4dl.unheard_of has no floor"),
        ("mpi4dl.engine", "from mpi4py import MPI", "imports mpi4py, which only mpi4dl.comm and torch_backend may"),
        (
            "mpi4dl.runs.folder",
            "if True:\n    import mpi4py.MPI",
            "imports mpi4py.MPI, which only mpi4dl.comm and torch_backend may",
        ),
        ("mpi4dl", "from mpi4dl.engine import Engine", "must stay instant"),
        (
            "mpi4dl.parallel.spatial.halo",
            "from mpi4dl.parallel.streaming import margins",
            "streaming is above parallel.sp",
        ),
    ],
)
def test_the_checker_finds_what_breaks_the_floors(module: str, source: str, complaint: str) -> None:
    (found,) = violations(module, source, is_package=module == "mpi4dl")
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mpi4dl.train", "from mpi4dl.engine import Engine\nfrom mpi4dl.options.config import parse\nimport torch"),
        ("mpi4dl.engine", "import mpi4dl.checkpoints.checkpoints\nfrom mpi4dl import geometry"),
        ("mpi4dl.runs.folder", "from mpi4dl import __version__\nfrom mpi4dl.comm import world"),
        ("mpi4dl.parallel.spatial.tensor", "from mpi4dl.parallel.replicas import reducer\nfrom . import rules"),
        ("mpi4dl.comm.communicator", "from mpi4py import MPI\nfrom mpi4dl.geometry import Box"),
        ("mpi4dl.models.registry", "from mpi4dl._torchvision import import_torchvision\nfrom .resnet import resnet"),
        ("mpi4dl.datasets.sources", "from mpi4dl.geometry import Box"),
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


# What ranks do together: methods of Communicator, and those that are named so.
COLLECTIVES = {
    *("agree", "together", "all_gather_object", "broadcast_object", "barrier", "ibarrier", "all_reduce", "iall_reduce"),
    *("all_gather", "all_to_all", "broadcast", "ibroadcast", "ireduce_scatter", "iall_gather_into", "subset"),
    *("split_by_node", "choose_gpu_wire"),
}
# Where ranks decide alike all the same, and why.
ALIKE = {
    ("mpi4dl.checkpoints.checkpoints", "_agree"): "all ranks raise this Refusal together",
    ("mpi4dl.comm.allreduce", "of"): "the caller names nodes on all ranks or on none",
    ("mpi4dl.engine.engine", "__init__"): "all have agreed on the hook, and hold the same parameters across parts",
    ("mpi4dl.engine.runner", "_run"): "the plan alone decides",
    ("mpi4dl.inference.model", "predictions"): "all ranks raise this Refusal together",
    ("mpi4dl.inference.model", "_found_late"): "the plan alone decides",
    ("mpi4dl.inference.model", "_one_by_one"): "all ranks raise this Refusal together",
    ("mpi4dl.parallel.own_loop", "_gradients"): "ranks have kept the same tensors, in graphs of the same form",
    ("mpi4dl.options.tasks", "build_task"): "an option, on which all have agreed",
    (
        "mpi4dl.parallel.costs.cost_model",
        "measured_costs",
    ): "collective over the ranks of the stage alone, by the plan",
    ("mpi4dl.parallel.pipeline.local_stages", "__init__"): "collective over the ranks of the stage alone, by the plan",
    ("mpi4dl.parallel.pipeline.local_stages", "sharing"): "the plan alone decides",
    ("mpi4dl.parallel.spatial.rules.normalization", "_reduced"): "the size of the communicator decides",
    ("mpi4dl.parallel.streaming.stream", "forward"): "all ranks raise TilesDiffer together, having told each other",
    ("mpi4dl.training.run", "all_epochs"): "all ranks raise Stopped together",
    ("mpi4dl.training.input_pipeline", "__iter__"): "what was heard is a sum over all ranks",
}


def _calls(node: ast.AST, collective: set[str]) -> Iterator[ast.Call]:
    """Calls of collectives below a node, but for those in functions that are made there."""
    if isinstance(node, ast.Lambda | ast.FunctionDef):
        return
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in collective:
            yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, collective)


def collective_functions(tree: ast.AST) -> set[str]:
    """The names of collectives, and of this module's own private functions that come to some."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    private = [f for f in functions if f.name.startswith("_") and not f.name.startswith("__")]
    known: set[str] = set()
    more = set(COLLECTIVES)
    while more - known:
        known |= more
        more = {f.name for f in private if any(True for part in f.body for _ in _calls(part, known))}
    return known


def doubtful_collectives(source: str) -> list[tuple[str, int, str]]:
    """Collectives that a rank may leave out which has found something alone: function, line and why."""
    tree = parsed(source)
    known = collective_functions(tree)
    found = []

    def look(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        parts: list[tuple[str, list[ast.AST]]] = []
        if isinstance(node, ast.BoolOp):
            parts = [("behind and/or", list(node.values[1:]))]
        elif isinstance(node, ast.IfExp):
            alone = ast.unparse(node.test) == "comm is None"  # then there are no others
            parts = [("in one branch", [node.orelse] * (not alone))]
            parts.append(("in one branch", [node.body]))
        elif isinstance(node, ast.GeneratorExp):
            parts = [("in a generator", [node.elt])]
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp) and any(g.ifs for g in node.generators):
            first = node.generators[0].iter  # which comes before any condition
            members = [*ast.iter_child_nodes(node), *(g.iter for g in node.generators[1:])]
            members += [condition for g in node.generators for condition in g.ifs]
            kept = [m for m in members if not isinstance(m, ast.comprehension) and m is not first]
            parts = [("behind the condition of a comprehension", kept)]
        elif isinstance(node, ast.ExceptHandler):
            parts = [("in an except", list(node.body))]
        elif isinstance(node, ast.If) and ".rank" in ast.unparse(node.test):
            parts = [("behind a question about the rank", [*node.body, *node.orelse])]
        for why, members in parts:
            found.extend((function, call.lineno, why) for member in members for call in _calls(member, known))
        for child in ast.iter_child_nodes(node):
            look(child, function)

    look(tree, "")
    return found


def test_no_rank_leaves_out_a_collective_for_what_it_found_alone() -> None:
    found = []
    for path in python_files("mpi4dl"):
        module = module_of(path)
        if module.startswith("mpi4dl.torch_backend"):
            continue  # calls there are those of torch.distributed, which users make
        found += [
            f"{module}:{line} ({function}): {why}"
            for function, line, why in doubtful_collectives(path.read_text())
            if (module, function) not in ALIKE
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "comm.agree(problem or comm.all_gather_object(1))",
        "def _ask(c):\n    return c.all_gather_object(1)\ndef f(c, p):\n    c.agree(p or _ask(c))",
        "x = comm.all_reduce(x) if problem else x",
        "next(p for p in comm.groups if p.comm.broadcast_object(1))\nany(c.agree() for c in groups)",
        "try:\n    f()\nexcept ValueError:\n    comm.barrier()",
        "if comm.rank == 0:\n    comm.barrier()",
        "[c.barrier() for c in groups if c]",
    ],
)
def test_the_finder_of_doubtful_collectives_can_fail(source: str) -> None:
    assert doubtful_collectives(source)
    sound = "with comm.together():\n    p = find()\ncomm.agree(p)\nf = p and (lambda: comm.agree())\n"
    assert not doubtful_collectives(f"{sound}[e for e in comm.all_gather_object(p) if e]")


# Who catches all there is and does not raise it again, and why.
KEEPERS = {
    ("mpi4dl.checkpoints.manifest", "_run"): "kept as `error`, which all ranks raise",
    ("mpi4dl.torch_backend.work", "_complete"): "kept, and raised by who waits",
    ("mpi4dl.torch_backend.work", "poke"): "kept, and raised by who waits",
    ("mpi4dl.comm.pending", "advance"): "kept, and raised by who waits",
    ("mpi4dl.comm.failure", "run"): "the way out of Python: it ends the job",
    ("mpi4dl.datasets.child_program", "main"): "a process of its own, which answers with the error",
    ("mpi4dl.datasets.loader", "_work"): "kept, and raised where the item is wanted",
    ("mpi4dl.estimate.dry_run", "looked_at"): "an estimate of rank 0, without which training goes on",
    ("mpi4dl.parallel.pipeline.checking", "check_cut"): "a user's model, whose error is told to all ranks, or no error",
    ("mpi4dl.reports.page", "thumbnail"): "a picture of a report, which no other rank waits for",
    ("mpi4dl.text.serving.server", "run"): "kept as `error`, which the main thread raises",
    ("mpi4dl.tasks.measuring", "update"): "kept, and told to all ranks at the end",
}


def swallowers(source: str) -> list[tuple[str, int]]:
    """Where every Exception is caught, or any, and not raised again: function and line."""
    found = []

    def names(kind: ast.expr | None) -> set[str]:
        return {"BaseException"} if kind is None else {n.id for n in ast.walk(kind) if isinstance(n, ast.Name)}

    def look(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        everything = {"Exception", "BaseException"}
        if isinstance(node, ast.ExceptHandler) and names(node.type) & everything:
            raises = any(isinstance(each, ast.Raise) for part in node.body for each in ast.walk(part))
            found.extend([(function, node.lineno)] * (not raises))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            found.extend((function, node.lineno) for each in node.args if names(each) & everything)
        for child in ast.iter_child_nodes(node):
            look(child, function)

    look(parsed(source), "")
    return found


def test_nobody_catches_everything_to_learn_a_fact() -> None:
    found = [
        f"{module_of(path)}:{line} ({function})"
        for path in python_files("mpi4dl")
        for function, line in swallowers(path.read_text())
        if (module_of(path), function) not in KEEPERS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    ["try:\n    f()\nexcept Exception:\n    x = False", "try:\n    f()\nexcept:\n    pass", "suppress(Exception)"],
)
def test_the_finder_of_those_who_catch_everything_can_fail(source: str) -> None:
    assert swallowers(source)
    assert not swallowers("try:\n    f()\nexcept Exception as e:\n    raise ValueError() from e")


CORE = ("parallel", "comm", "geometry", "engine", "checkpoints", "estimate", "torch_backend")
MOST_LINES, MOST_NESTED, MOST_PARAMETERS = 60, 4, 7
# Functions with more parameters, which are to become fewer. Rules have those of PyTorch's own functions.
MANY_PARAMETERS = {
    *("cut.split", "grid.__init__", "group.__init__", "local_stages.__init__", "stream.__init__", "summary.overview"),
}
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)


def nested(node: ast.AST, depth: int = 0) -> int:
    """How many blocks stand within each other in a function; a chain of elif is one."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            chained = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
            deepest = max(deepest, nested(child, depth + (isinstance(child, BLOCKS) and not chained)))
    return deepest


def too_large(source: str, module: str) -> Iterator[str]:
    """The functions of a module that are too long, too deep, or take too many arguments."""
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        name, length = f"{module}.{node.name}", (node.end_lineno or 0) - node.lineno + 1
        if length > MOST_LINES:
            yield f"{name} has {length} lines"
        if nested(node) > MOST_NESTED:
            yield f"{name} nests {nested(node)} blocks"
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([each for each in names if each not in ("self", "cls", "ctx")])
        if count > MOST_PARAMETERS and name not in MANY_PARAMETERS:
            yield f"{name} takes {count} arguments"


def test_functions_of_the_core_are_small() -> None:
    files = [path for path in python_files(*(f"mpi4dl/{room}" for room in CORE)) if path.parent.name != "rules"]
    found = [each for path in files for each in too_large(path.read_text(), path.stem)]
    assert [each for each in found if "split_backward" not in each] == []  # which has PyTorch's own arguments, too
    rules = [path for path in python_files("mpi4dl/parallel/spatial/rules")]
    assert [each for path in rules for each in too_large(path.read_text(), path.stem) if "takes" not in each] == []


def test_the_checker_of_sizes_can_fail() -> None:
    deep = "def f():\n" + "".join(f"{' ' * 4 * n}if {n}:\n" for n in range(1, 6)) + " " * 24 + "return 1\n"
    assert list(too_large(deep, "a")) == ["a.f nests 5 blocks"]
    assert list(too_large("def f(a, b, c, d, e, f, g, h):\n    pass\n", "a")) == ["a.f takes 8 arguments"]
    assert list(too_large("def f():\n" + "    pass\n" * 60, "a")) == ["a.f has 61 lines"]
    assert nested(ast.parse("if a:\n    pass\nelif b:\n    pass\nelif c:\n    pass")) == 1


# Who turns a configuration into objects; below, everybody gets these, or the section that is asked for.
MAY_NAME_CONFIG = (
    "mpi4dl.options.",
    "mpi4dl.runs.",
    "mpi4dl.training.setup",
    "mpi4dl.training.trained",
    "mpi4dl.training.folds",
)


# The options of a user's trainer, and the tables of a file.
OTHER_CONFIGS = {"mpi4dl.training.trainer", "mpi4dl.reports.reading"}


def names_config(source: str) -> list[str]:
    """Where a module imports the class of all options, takes one as an argument, or asks an object for it, in words."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "mpi4dl.options.config":
            found += [f"imports {each.name}" for each in node.names if each.name == "Config"]
        elif isinstance(node, ast.arg) and node.annotation is not None:
            names = {each.id for each in ast.walk(node.annotation) if isinstance(each, ast.Name)}
            found += [f"takes {node.arg}"] * ("Config" in names)
        elif isinstance(node, ast.Attribute) and node.attr in ("config", "_config"):
            found.append(f"reads {ast.unparse(node)}")
    return found


def test_nobody_below_the_commands_gets_a_whole_configuration() -> None:
    modules = {module_of(path): path.read_text() for path in python_files("mpi4dl")}
    naming = {module for module, source in modules.items() if names_config(source)}
    allowed = {module for module in naming if module.count(".") == 1 or module.startswith(MAY_NAME_CONFIG)}
    assert naming - allowed == OTHER_CONFIGS
    assert {"mpi4dl.train", "mpi4dl.runs.assembly", "mpi4dl.training.setup"} <= allowed


def test_the_finder_of_whole_configurations_can_fail() -> None:
    assert names_config("from mpi4dl.options.config import Config, parse") == ["imports Config"]
    assert names_config("def f(config: Config | None): pass") == ["takes config"]
    assert names_config("def f(run): return run.source.config.model") == ["reads run.source.config"]
    assert names_config("from mpi4dl.options.config import Data\ndef f(data: Data): pass") == []
