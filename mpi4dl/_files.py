"""Files and folders that others use as well: opened without waiting, replaced as a whole, locked, named by errors."""

import errno
import fcntl
import glob
import logging
import math
import os
import shutil
import stat
import time
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Any, BinaryIO

LOCK = ".lock"
BLOCK_BYTES = 1 << 20  # that are read at once
ZIP_MAGIC = b"PK\x03\x04"
LOCK_SECONDS = 10.0  # for the ranks of a job that was killed to be gone
POLL_SECONDS = 0.05
LEFT_SECONDS = 86_400.0  # after which nobody writes a temporary file any more
LONGEST_NAME = 200  # bytes, so that a longer ending than that of a temporary file fits file systems' 255
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without locks answer


def checksum(path: Path) -> str:
    """The size of a file and the CRC of all its bytes. Raises OSError."""
    size, found = 0, 0
    with open_regular(path) as file:
        while block := file.read(BLOCK_BYTES):
            size, found = size + len(block), zlib.crc32(block, found)
    return f"{size}-{found:08x}"


def open_regular(path: Path, small_bytes: int = 0) -> BinaryIO:
    """A file opened for reading; one of up to `small_bytes` is in memory.

    Raises OSError, also for a pipe or a device, at which a reader could wait forever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise OSError(None, "it is no regular file, but a pipe, a device or a folder", str(path))
    if not small_bytes or state.st_size > small_bytes:
        return os.fdopen(descriptor, "rb")
    try:
        content = b""
        while len(content) < state.st_size and (part := os.read(descriptor, state.st_size - len(content))):
            content += part
    finally:
        os.close(descriptor)
    return BytesIO(content)


def read_regular(path: Path) -> bytes:
    """All of a file. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def leads_to(path: Path, folders: Sequence[Path]) -> bool:
    """Whether there is something below one of these folders, where links lead. For paths in files from elsewhere, which
    may lead anywhere: what they name outside is followed only if the user names it too.
    """
    try:
        real = path.expanduser().resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # such as a name too long for a file, with a zero in it, or a loop
        return False
    return any(real.is_relative_to(folder.resolve()) for folder in folders)


def read_at_most(file: BinaryIO | BufferedIOBase, most: int) -> bytes:
    """What is left of a file, or the first `most` bytes and one more, in memory for what there is alone."""
    blocks, left = [], most + 1
    while left and (block := file.read(min(left, BLOCK_BYTES))):
        blocks.append(block)
        left -= len(block)
    return b"".join(blocks)


def is_stored_zip(path: Path) -> bool:
    """Whether a file is a zip archive, as torch.save writes it: nothing in there is compressed.

    A small archive of compressed files may unpack to more than memory holds. Raises ValueError for such a one, and for
    a damaged one; and OSError.
    """
    with open_regular(path) as file:
        if file.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
            return False
        try:
            with zipfile.ZipFile(file) as archive:
                packed = [each for each in archive.infolist() if each.compress_type != zipfile.ZIP_STORED]
        except (zipfile.BadZipFile, NotImplementedError, ValueError, RuntimeError) as error:
            raise ValueError(f"is damaged or cut off: {error}") from error
    if packed:
        few, many = (sum(sizes) for sizes in zip(*((p.compress_size, p.file_size) for p in packed), strict=True))
        raise ValueError(
            f"is compressed, {few / 2**20:,.1f} MiB that unpack to {many / 2**20:,.1f} MiB, and torch.save compresses "
            "nothing: if you trust it, load it in PyTorch and save it again"
        )
    return True


def control_groups(
    controller: str,
    names: Sequence[str],
    groups: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> Iterator[list[str]]:
    """The words of files of these names in each control group of this process, of version 1 or 2, that has some."""
    for line in _lines(groups):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for top in {root / controllers, root / (controllers and controller)}:
            # Within a container the path may be that of the host, of which only the container's own top is visible.
            inner = top / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if words := " ".join(line for name in names for line in _lines(folder / name)).split():
                    yield words
                if folder == top:
                    break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def unwritable(flag: str, path: str) -> str | None:
    """Why a new file of this name, given by a flag, cannot be made; None if it can. To ask before long work."""
    try:
        with open(path, "x"):
            pass
        os.unlink(path)
    except FileExistsError:
        return f"{flag} {path}: the file exists, and is not overwritten: choose another name, or remove it"
    except OSError as error:
        return f"{flag} {path}: {error.strerror}"
    return None


def hidden_name(path: Path) -> str:
    """The name of a hidden file for a while, to which an ending may be added: of names near the limit a checksum."""
    long = len(os.fsencode(path.name)) > LONGEST_NAME
    return f".{zlib.crc32(os.fsencode(path.name)):08x}" if long else f".{path.name}"


class Replacement:
    """A new file, written at `temporary`, that takes the name `path` once it is whole.

    As a context it gives `temporary`, and keeps it at the end, or drops it after an error. `shared`: several processes
    may replace the file at once, and the last one wins; what killed ones left is removed after a day.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self.path = path
        hidden = hidden_name(path)
        self.temporary = path.with_name(f"{hidden}.{f'{uuid.uuid4().hex}.' if shared else ''}new")
        for left in path.parent.glob(f"{glob.escape(hidden)}.*.new") if shared else ():
            with suppress(FileNotFoundError):  # another process was faster
                if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                    left.unlink()

    def keep(self) -> None:
        """Put what was written on disk, then replace the file: after a crash there is the old one or the new one."""
        with naming(self.path), self.temporary.open("rb") as file:
            os.fsync(file.fileno())
        self.temporary.replace(self.path)

    def drop(self) -> None:
        self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.keep()
        finally:
            self.drop()


def make_folder(path: Path) -> None:
    """Make a folder, and those that it is in, where they are not there. Raises OSError, which names a file there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        there = next(each for each in (path, *path.parents) if each.is_symlink() or each.exists())
        what = "is a file" if there.exists() else "is a link to nothing"
        raise FileExistsError(f"{there} {what}, but {path} must be a folder: name another one") from None


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Replace a file as a whole, as `Replacement` does."""
    with naming(path), Replacement(path) as temporary:
        temporary.write_bytes(data)


def map_new(file: BinaryIO | BufferedIOBase, dtype: Any, shape: tuple[int, ...]) -> Any:
    """An array, all 0, in a new file from its end on, mapped for writing. Raises OSError.

    All of it is reserved first: on a full disk, writing to a hole of a mapped file ends the process by a signal.
    """
    import numpy as np

    begin, num_bytes = file.tell(), math.prod(shape) * np.dtype(dtype).itemsize
    file.flush()
    os.posix_fallocate(file.fileno(), begin, max(1, num_bytes))
    return np.memmap(file, dtype, "r+", begin, shape)


def size_of(path: Path) -> int:
    """How many bytes a file has, or all files of a folder. Raises OSError."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if not each.is_dir())


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in there, if it is there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of writing to an open file, such as that the disk is full, the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def lock(folder: Path, option: str = "run_folder") -> int | None:
    """Lock a folder, which is there and was named by an option; `os.close` of what is returned lets it go.

    None, with a warning, if the file system has no locks: then nothing keeps another job out.

    Raises:
        ValueError: another process has locked it, and does not let go within LOCK_SECONDS.
        OSError: the folder cannot be written to, or not be locked for a reason of the system's own.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise ValueError(
                    f"another job is writing to {folder}: wait for its end, or name another `{option}`"
                ) from None
            time.sleep(POLL_SECONDS)
        except OSError as error:
            os.close(file)
            if error.errno not in NO_LOCKS:
                raise OSError(error.errno, error.strerror, str(folder / LOCK)) from error
            message = "%s is on a file system without locks (%s): see to it that no other job writes there"
            logging.getLogger("mpi4dl").warning(message, folder, error.strerror)
            return None


@contextmanager
def alone_in(folder: Path, option: str = "out") -> Iterator[None]:
    """Within it no other job locks the folder, which is made. Raises as `lock` and `make_folder` do."""
    make_folder(folder)
    held = lock(folder, option)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)
