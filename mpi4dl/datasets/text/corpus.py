"""Lists the documents of a corpus, each a file of UTF-8 text, and reads them piece by piece."""

import codecs
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpi4dl._files import open_regular
from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.listed import files_below

STDLIB = "stdlib"
TEXT_SUFFIXES = tuple(
    ".txt .text .md .rst .tex .html .xml .json .csv .toml .yaml "
    ".py .pyi .c .h .cc .cpp .hpp .cu .f90 .java .js .ts .go .rs .jl .sh".split()
)
NOT_OF_STDLIB = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"))
PIECE_BYTES = 1 << 20


class Document(NamedTuple):
    """A file of the corpus; its name is its path from the folder on that was asked for, with slashes."""

    name: str
    path: Path


def find_documents(*sources: str | Path) -> tuple[Document, ...]:
    """The documents of these sources, in the order of the sources, each file once.

    A source is a file of any name, or a folder, of which every visible file at any depth counts that ends in one of
    `TEXT_SUFFIXES`, sorted by name. Links to folders are not followed. "stdlib" is the Python standard library: its own
    sources, without tests.

    Raises:
        DatasetError: a source does not exist, or is a folder without text.
    """
    found: dict[Path, Document] = {}
    for source in sources:
        for document in _documents(source):
            found.setdefault(document.path.resolve(), document)
    if not found:
        raise DatasetError("no source of text is named: give files, folders or 'stdlib'")
    return tuple(found.values())


def _documents(source: str | Path) -> list[Document]:
    if source == STDLIB:
        return _inside(Path(sysconfig.get_path("stdlib")), (".py",), NOT_OF_STDLIB)
    path = Path(source).expanduser()
    if path.is_dir():
        documents = _inside(path, TEXT_SUFFIXES, frozenset())
        if not documents:
            raise DatasetError(f"{path}: has no text; files count as text if they end in {' '.join(TEXT_SUFFIXES)}")
        return documents
    if not path.exists():
        raise DatasetError(f"{path}: no such file or folder; expected UTF-8 text, or {STDLIB!r}")
    return [Document(path.name, path)]


def _inside(root: Path, suffixes: tuple[str, ...], without: frozenset[str]) -> list[Document]:
    files = (path for path, _ in files_below(root, suffixes, without) if path.is_file())
    return sorted(Document(path.relative_to(root).as_posix(), path) for path in files)


def digest(document: Document) -> str:
    """A hash of the document's bytes, in hexadecimal digits. Raises DatasetError if the file cannot be read."""
    try:
        found = hashlib.blake2b()
        with open_regular(document.path) as file:
            while chunk := file.read(PIECE_BYTES):
                found.update(chunk)
        return found.hexdigest()
    except OSError as error:
        raise _unreadable(document, error) from error


def pieces(document: Document) -> Iterator[str]:
    """The text of a document in pieces of about a megabyte, cut after a line wherever there is one.

    Together they are the file's bytes exactly: new lines are not translated, and a byte order mark is kept. The same
    file is always cut at the same places, of which tokens that span lines depend.

    Raises:
        DatasetError: the file cannot be read, or is not UTF-8.
    """
    decoder, text, done = codecs.getincrementaldecoder("utf-8")(), "", 0
    try:
        with open_regular(document.path) as file:
            while True:
                chunk = file.read(PIECE_BYTES)
                begun = done - len(decoder.getstate()[0])  # where in the file lies what is decoded next
                text += decoder.decode(chunk, final=not chunk)
                if not chunk:
                    break
                done += len(chunk)
                end = text.rfind("\n") + 1 or len(text)
                if text:
                    yield text[:end]
                text = text[end:]
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{document.path}: is not UTF-8 text: byte {begun + error.start} cannot be decoded ({error.reason}); "
            "convert the file, or leave it out"
        ) from error
    except OSError as error:
        raise _unreadable(document, error) from error
    if text:
        yield text


def _unreadable(document: Document, error: OSError) -> DatasetError:
    return DatasetError(f"{document.path}: cannot be read: {error.strerror or error}")
