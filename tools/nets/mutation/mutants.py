"""Mutants of a module: one operator, number, condition or statement of a function differs in each of them.

    found = mutants_of("mpi4dl.geometry.boxes")
    found[7]                      Mutant(module='mpi4dl.geometry.boxes', number=7, ..., kind='comparison')
    code_of(found[7])             the code of its outermost function, to be put in place of the original's

What says something to people is left as it is: messages of errors, assertions, annotations and defaults.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
TOLD = ("print", "warn", "warning", "info", "debug")  # calls that say something


class Mutant(NamedTuple):
    """The change `number` of a module; `function` is the outermost one around it."""

    module: str
    number: int
    function: str
    line: int
    kind: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.kind}: {self.was} -> {self.now}"


class _Mutator(ast.NodeTransformer):
    """Counts all changes that can be made; makes the one that is `wanted`."""

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted
        self.found: list[tuple[str, int, str, str, str]] = []
        self._path: list[str] = []
        self._function: str | None = None

    # What is left alone, and where changes begin.

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_Raise = visit_Assert = visit_JoinedStr = _leave

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._path.append(node.name)
        node.body = self._visit_all(node.body)
        self._path.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outermost = self._function is None
        if outermost:
            self._function = ".".join([*self._path, node.name])
        node.body = self._visit_all(node.body)
        if outermost:
            self._function = None
        return node

    def _visit_all(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [self.visit(statement) for statement in body]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    # Changes, each on a node whose parts have been visited.

    def _offer(self, kind: str, node: Any, changed: Callable[[], Any]) -> Any:
        if self._function is None:
            return node
        number = len(self.found)
        was = ast.unparse(node)
        new = changed() if self.wanted in (None, number) else node
        self.found.append((self._function, node.lineno, kind, was, ast.unparse(new)))
        if self.wanted != number:
            return node
        return ast.copy_location(ast.fix_missing_locations(new), node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) > 1:
            return node
        other = COMPARISONS[type(node.ops[0])]
        return self._offer(
            "comparison", node, lambda: ast.Compare(left=node.left, ops=[other()], comparators=node.comparators)
        )

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        texts = (ast.JoinedStr, ast.List, ast.Tuple)
        if type(node.op) not in OPERATORS or any(
            _is_text(each) or isinstance(each, texts) for each in (node.left, node.right)
        ):
            return node
        other = OPERATORS[type(node.op)]
        return self._offer("operator", node, lambda: ast.BinOp(left=node.left, op=other(), right=node.right))

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        return self._offer("condition", node, lambda: ast.BoolOp(op=other(), values=node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.Invert | ast.UAdd):
            return node
        kind = "condition" if isinstance(node.op, ast.Not) else "sign"
        return self._offer(kind, node, lambda: node.operand)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool):
            return self._offer("value", node, lambda: ast.Constant(value=not node.value))
        if isinstance(node.value, int):
            return self._offer("number", node, lambda: ast.Constant(value=node.value + 1))
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in OTHER_NAMES:
            other = ast.Name(id=OTHER_NAMES[node.func.id], ctx=ast.Load())
            return self._offer("function", node, lambda: ast.Call(func=other, args=node.args, keywords=node.keywords))
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg == "strict" else self.generic_visit(node)  # of `zip`: it tells of mistakes of ours

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        node.value = self.visit(node.value)
        if type(node.op) not in OPERATORS or _is_text(node.value):
            return node
        other = OPERATORS[type(node.op)]
        return self._offer("operator", node, lambda: ast.AugAssign(target=node.target, op=other(), value=node.value))

    def visit_If(self, node: ast.If) -> Any:
        node.test = self._tested(node.test)
        node.body, node.orelse = self._visit_all(node.body), self._visit_all(node.orelse)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        node.test = self._tested(node.test)
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def _tested(self, test: ast.expr) -> Any:
        """A condition that is changed by no other kind of mutant."""
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
            test = self.visit(test)
            return self._offer("condition", test, lambda: ast.UnaryOp(op=ast.Not(), operand=test))
        return self.visit(test)

    def visit_Break(self, node: ast.Break) -> Any:
        return self._offer("jump", node, ast.Continue)

    def visit_Continue(self, node: ast.Continue) -> Any:
        return self._offer("jump", node, ast.Break)

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Constant):
            return node
        self.generic_visit(node)
        called = node.value.func if isinstance(node.value, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", None))
        if name is None or name in TOLD or name == "__init__":
            return node
        return self._offer("statement", node, ast.Pass)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def path_of(module: str) -> Path:
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin)


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    mutator = _Mutator()
    mutator.visit(ast.parse(path_of(module).read_text()))
    return [Mutant(module, number, *found) for number, found in enumerate(mutator.found)]


def code_of(mutant: Mutant, original: bool = False) -> CodeType:
    """The code of the function around a mutant, or of the original of that function."""
    path = path_of(mutant.module)
    tree = ast.parse(path.read_text())
    if not original:
        tree = _Mutator(mutant.number).visit(tree)
    compiled = compile(tree, str(path), "exec")
    return next(code for code in _functions(compiled) if code.co_qualname == mutant.function)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """The code of what is defined in a module or a class."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions(constant)
