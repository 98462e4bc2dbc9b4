"""Child processes that read what may end a process: one that dies costs one image, and not the job.

Some C libraries end the whole process at some damaged files. So each thread that reads with one of them has a child
process, `child_program.py`, do it.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from mpi4dl.datasets.base import BadImage, DatasetError

LEAVING_SECONDS = 5.0  # for a child in the middle of a tile that nobody wants any more

_PROGRAM = Path(__file__).with_name("child_program.py")
_of_thread = threading.local()


class _Child:
    """A process that answers one question after the other, by one library."""

    def __init__(self, library: str) -> None:
        self.library = library
        # -P: what lies beside the script is no package of its. A session of its own: signals are for the parent.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.end = weakref.finalize(self, _end, self.process)  # which ends it with the thread, or the interpreter
        assert self.process.stdout is not None
        missing = json.loads(self.process.stdout.readline() or '"it ended as it began"')
        if missing:
            raise DatasetError(f"{library} cannot be used here: {missing}")

    def ask(self, path: Path, wanted: Any) -> tuple[dict[str, Any], bytearray]:
        """What the program says, and the bytes behind it; "error" is in the answer if there are none.

        Raises EOFError, OSError or ValueError if the process died over it.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([str(path.absolute()), wanted]).encode() + b"\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        content = bytearray(answer["bytes"])
        view = memoryview(content)
        while len(view):
            count = stdout.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise EOFError
            view = view[count:]
        return answer, content


def ask(library: str, path: Path, wanted: Any = None) -> tuple[dict[str, Any], bytearray]:
    """What this thread's child says of a file, and the bytes that go with it; see `child_program.py`.

    Raises:
        BadImage: the file cannot be opened or decoded, or the process died over it.
    """
    children: dict[str, _Child] = _of_thread.__dict__.setdefault("children", {})
    if library not in children:
        children[library] = _Child(library)
    child = children[library]
    try:
        answer, content = child.ask(path, wanted)
    except (OSError, ValueError, EOFError) as error:
        del children[library]
        code = child.end()
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        raise BadImage(path, f"cannot be decoded: {library} ended its process {how}, it is damaged") from error
    return answer, content


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Let a child go, which ends when nobody can ask it any more; its exit code."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        return process.wait(LEAVING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
