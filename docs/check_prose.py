"""Checks the prose of README.md, docs/ and the package: `python docs/check_prose.py`, a part of `make lint`.

It fails on a sentence of more than 40 words, on a page whose sentences have more than 18 words on average, and on a
sentence that starts with a relative clause. It also fails on words of this project that the field does not use, also in
identifiers, docstrings, messages and the help of options in the package.
`--counts` prints the lines, sentences and means of all pages.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS, MOST_ON_AVERAGE = 40, 18.0
GENERATED = {"docs/reference/options.md"}  # the words are those of the declarations
CODE = "Code"  # stands for `code`, which counts as one word

BANNED = {  # words of this project, and what the field says
    r"visit(?:s|ed|ing)?": "tile, pass",
    r"atoms?": "unit, split point",
    r"foreseen|foresight|foresees?|outlook|anatomy": "estimated, prefetch",
    r"(?:is|are|was|were) (?:said|told)|as is told|what comes|by (?:its )?words": "who does it",
    r"(?:stays?|stayed) as drawn": "keep their initial values",
    r"Held|Clockwork|Ledger|Messenger|Manner|Farewell|Sentry|portrait|spelt|sparing": "the word of the glossary",
    r"parcels?|landings?|handovers?": "stage communication",
    r"the wire|contestants?|who(?:so)?ever|so many of": "the noun",
    r"go(?:es)? on (?:with|under|in|on|from)": "continue, resume",
    r"lies? over ranks|laid over ranks": "is distributed over ranks",
}
BANNED_NAMES = {  # the same for words of identifiers: of functions, classes, arguments, variables and attributes
    "atom": "unit", "dock": "staging", "farewell": "exit_notification", "foreseen": "estimate", "foresight": "prefetch",
    "ledger": "dry_run", "messenger": "point_to_point", "outlook": "estimate", "recipe": "stage_program",
    "residence": "placement", "sentry": "watchdog", "unkept": "unsaved", "lacking": "missing",
}  # fmt: skip
START = re.compile(r"What\b(?!.*\?$)|Who\b(?!.*\?$)|Whose\b(?!.*\?$)")
BLOCKS_END = re.compile(r"^\s*(?:[-*+]|\d+\.) |^\s*$|^#|^\s*\||^\s*!!! |^=== ")


def without_code(text: str) -> str:
    """The text without front matter, comments, fenced and indented blocks of code, and targets of links."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```|~~~).*?^\1\2 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?:^|(?<=\n\n))(?:(?: {4}|\t)(?!\s*(?:[-*+]|\d+\.) ).*\n?)+", "\n", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)(?:\{[^}]*\})?", "", text)
    text = re.sub(r"(`+).+?\1", CODE, text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)(?:\{[^}]*\})?", r"\1", text)
    return re.sub(r"<[^>\n]+>", "", text)


def blocks(text: str) -> Iterator[tuple[bool, str]]:
    """Paragraphs, items of lists and, with True, cells of tables; headings are left out."""
    lines: list[str] = []
    for line in [*without_code(text).splitlines(), ""]:
        if BLOCKS_END.match(line):
            yield False, " ".join(lines)
            lines = []
        if re.match(r"\s*\|", line):
            yield from ((True, cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")))
        elif not line.startswith(("#", "=== ")):
            lines.append(re.sub(r"^\s*(?:[-*+]|\d+\.|!!!\s+\w+) ", "", line).strip())


def sentences(text: str) -> Iterator[tuple[bool, str]]:
    """All sentences; True for those in cells of tables, which no average counts."""
    for in_table, block in blocks(text):
        for sentence in re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*(?:[A-Z0-9]|mpi4dl))", block):
            if re.search(r"[A-Za-z]", sentence):
                yield in_table, sentence.strip()


def num_words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def average(text: str) -> float:
    """The mean number of words of a sentence outside of tables."""
    lengths = [num_words(sentence) for in_table, sentence in sentences(text) if not in_table]
    return sum(lengths) / max(len(lengths), 1)


def problems(name: str, text: str) -> Iterator[str]:
    """A line for each thing that is wrong with a file."""
    for in_table, sentence in sentences(text):
        if num_words(sentence) > MOST_WORDS:
            yield f"{name}: {num_words(sentence)} words, at most {MOST_WORDS}: {sentence}"
        if name not in GENERATED and START.match(sentence) and not in_table:
            yield f"{name}: starts with a relative clause: {sentence}"
        for pattern, better in () if name in GENERATED else BANNED.items():
            if found := re.search(rf"\b(?:{pattern})\b", sentence):
                yield f"{name}: {found[0]!r}, write {better}: {sentence}"
    if (mean := average(text)) > MOST_ON_AVERAGE:
        yield f"{name}: {mean:.1f} words a sentence on average, at most {MOST_ON_AVERAGE:.0f}"


def strings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """The line and the text of all strings of some code that have several words; True for docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(node.body[0].value) for node in nodes if isinstance(node, kinds) and _has_docstring(node)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value, id(node) in docstrings


def identifiers(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """The line and the name of all that some code defines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def problems_of_code(file: str, source: str) -> Iterator[str]:
    """A line for each thing that is wrong with the names, docstrings, messages and help texts of a file."""
    nodes = [*ast.walk(ast.parse(source))]
    for line, name in identifiers(nodes):
        for word in re.findall(r"[A-Z]?[a-z]+", name):
            if better := BANNED_NAMES.get(word.lower().removesuffix("s")):
                yield f"{file}:{line}: {name!r}, write {better}"
    for line, text, is_docstring in strings(nodes):
        for _, sentence in sentences(inspect.cleandoc(text)) if is_docstring else [(False, text)]:
            for pattern, better in BANNED.items():
                if found := re.search(rf"\b(?:{pattern})\b", sentence):
                    yield f"{file}:{line}: {found[0]!r}, write {better}: {sentence}"


def pages() -> dict[str, str]:
    """The text of README.md and of all pages of docs/, by name."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def counts() -> Iterator[str]:
    """A line for each file, and one for all that the check looks at."""
    checked = "\n\n".join(pages().values())
    for name, text in [*pages().items(), ("all that is checked", checked)]:
        lengths = [num_words(sentence) for in_table, sentence in sentences(text) if not in_table]
        sizes = f"{len(text.splitlines()):5} lines {len(lengths):5} sentences"
        yield f"{name:40} {sizes}, mean {average(text):5.1f}, longest {max(lengths, default=0):3}"


def main() -> int:
    """Print all problems, or with `--counts` a line for each file."""
    if "--counts" in sys.argv:
        print("\n".join(counts()))
        return 0
    found = [each for name, text in pages().items() for each in problems(name, text)]
    for path in sorted((ROOT / "mpi4dl").rglob("*.py")):
        found += problems_of_code(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    print("\n".join(found), end="\n" * bool(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
