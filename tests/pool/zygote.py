"""A process with PyTorch imported that forks ranks from itself: they start in milliseconds instead of seconds.

    pytest --stdin--> zygote                     imports what ranks import, but no MPI; has one thread, and waits
      |                  |
      |                  +-- fork, one per stub --> rank: the stub's files, environment and folder; runs the program
      |                  |                            ^
      +--> mpirun ----> stub ------- signals ---------+    and the rank's end, back to the stub, is the stub's end

When pytest ends, however it ends, its end of the zygote's stdin closes: the zygote then kills its ranks, and ends.

Workers of pytest-xdist share those of the process that started them.

There are two of them, for the ranks of even and of odd numbers, which hash strings differently. So the sets of two
ranks are in different orders, as they are in processes that were started apart.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import marshal
import os
import resource
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from tests.pool.leaving import leave_all_behind
from tests.pool.stub import MAX_FILES, receive

ROOT = Path(__file__).parent.parent.parent
STUB = Path(__file__).parent / "stub.py"
HASH_SEEDS = ("1", "2")
PYTHON = "python"
IMPORTED = "tests.pool.imports"
MAX_MESSAGE_BYTES = 1 << 20
BACKLOG = 64
SHARED = "MPI4DL_TEST_PYTHON"  # in the environment: what `python` has returned in a process around this one
AT_START = "MPI4DL_AT_START"  # in the environment: `module:function`, which a rank calls before its program
HUGE_PAGE, MADV_COLLAPSE = 1 << 21, 25
GARBAGE = 10_000  # so many new objects are looked through at a time, in place of 700
# OpenBLAS starts threads when it is loaded, and its own variable wins; so does pyarrow's allocator, which pandas loads.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
SPARE_FILE = 300  # numbers from here on are nobody's


class Program(NamedTuple):
    """What a rank is to run, as `python *arguments` was to run it."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    ignored_signals: list[int]
    cores: list[int]
    open_files: tuple[int, int]  # the limits, soft and hard
    files: dict[int, int]  # the number that each file must have: the number that it has

    def take_over(self) -> None:
        """Become, in this process, what the stub was."""
        os.setsid()
        spare = {wanted: fcntl.fcntl(number, fcntl.F_DUPFD, SPARE_FILE) for wanted, number in self.files.items()}
        for number in self.files.values():
            os.close(number)
        for wanted, number in spare.items():
            os.dup2(number, wanted)
            os.close(number)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        os.sched_setaffinity(0, self.cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.open_files)
        for number in self.ignored_signals:
            signal.signal(number, signal.SIG_IGN)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # Python's own generator does so by itself

    def run(self) -> None:
        """Run it as the interpreter would; what it raises is for the interpreter to see."""
        option, *rest = self.arguments
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        sys.orig_argv = [sys.executable, *self.arguments]
        sys.argv = [option, *(rest[1:] if option in ("-c", "-m") else rest)]
        if option == "-c":
            sys.path[0] = ""
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif option == "-m":
            sys.path[0] = self.folder
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        else:
            sys.path[0], main.__dict__["__file__"] = str(Path(option).parent), option
            exec(compile(Path(option).read_bytes(), option, "exec"), main.__dict__)


class Zygote:
    """Forks a rank for each stub that connects, hands signals down and exit codes up."""

    def __init__(self, server: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.server = server
        self.ranks: dict[int, socket.socket] = {}  # by process
        self.selector.register(sys.stdin, selectors.EVENT_READ, self.end)
        self.selector.register(self.server, selectors.EVENT_READ, self.accept)

    def serve(self) -> Program:
        """Does not return but in a rank, with what that rank is to run."""
        program = None
        while program is None:
            (key, _), *_ = self.selector.select()  # one at a time: what is done about one may be the end of another
            program = key.data()
        return program

    def accept(self) -> Program | None:
        stub, _ = self.server.accept()
        try:
            said, files, *_ = socket.recv_fds(stub, MAX_MESSAGE_BYTES, MAX_FILES)
        except ConnectionError:
            said = b""
        if not said:  # the stub was killed
            stub.close()
            return None
        *rest, numbers = marshal.loads(said)
        process = os.fork()
        if process == 0:
            self.let_go()
            stub.close()
            return Program(*rest, dict(zip(numbers, files, strict=True)))
        for number in files:
            os.close(number)
        self.ranks[process] = stub
        ended = os.pidfd_open(process)
        self.selector.register(stub, selectors.EVENT_READ, partial(self.hear, process))
        self.selector.register(ended, selectors.EVENT_READ, partial(self.bury, process, ended))
        return None

    def hear(self, process: int) -> None:
        """A signal for the rank; or the stub's end, and then the rank's."""
        said = receive(self.ranks[process])
        if not said:
            self.selector.unregister(self.ranks[process])
        os.kill(process, marshal.loads(said) if said else signal.SIGKILL)

    def bury(self, process: int, ended: int) -> None:
        _, status = os.waitpid(process, 0)
        self.selector.unregister(ended)
        os.close(ended)
        stub = self.ranks.pop(process)
        if stub in self.selector.get_map():
            self.selector.unregister(stub)
            with suppress(ConnectionError):  # killed in the meantime
                stub.send(marshal.dumps(os.waitstatus_to_exitcode(status)))
        stub.close()

    def let_go(self) -> None:
        """In a rank: close what is the zygote's."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self.selector.close()

    def end(self) -> NoReturn:
        """Pytest has gone."""
        for process in self.ranks:
            os.kill(process, signal.SIGKILL)
        os._exit(0)


def keep_bytecode() -> None:
    """Where the environment forbids bytecode beside sources, write it elsewhere, here and in all that is started.

    Each process would compile PyTorch's sources anew, which takes longer than most tests.
    """
    if sys.dont_write_bytecode:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(ROOT / ".pytest_cache" / "bytecode")
        sys.dont_write_bytecode = False


@cache
def python() -> str:
    """The program that takes the place of `python`: what it is told to run, it runs in a fork.

    It stands beside an `mpirun`, as in an environment, and it is `sys.executable` of what it runs.
    """
    if SHARED in os.environ:
        return os.environ[SHARED]
    keep_bytecode()
    folder = Path(tempfile.mkdtemp(prefix="zygotes"))
    atexit.register(end_all, folder, [start(folder, seed, IMPORTED) for seed in HASH_SEEDS])
    return stand_in(folder)


def stand_in(folder: Path) -> str:
    """Write the programs, beside the sockets of the zygotes."""
    sockets = [str(folder / seed) for seed in HASH_SEEDS]
    for path, words in (
        (folder / PYTHON, [sys.executable, "-I", "-S", str(STUB), *sockets]),
        (folder / "mpirun", [launcher()]),
    ):
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        path.chmod(0o700)
    return str(folder / PYTHON)


def launcher() -> str:
    """The mpirun of this environment, or else the one on the path."""
    own = Path(sys.executable).parent / "mpirun"
    return str(own) if own.exists() else "mpirun"


def start(folder: Path, hash_seed: str, imported: str) -> subprocess.Popen[bytes]:
    """A zygote to which stubs may connect at once; they wait until it is ready. If it ends they say what it printed."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
        (folder / f"{hash_seed}.txt").open("wb") as printed,
    ):
        server.bind(str(folder / hash_seed))
        server.listen(BACKLOG)
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(server.fileno()), str(folder / PYTHON), imported],
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD, "PYTHONHASHSEED": hash_seed},
            stdin=subprocess.PIPE,  # held by this process alone: it closes when this process ends
            stdout=printed,
            stderr=subprocess.STDOUT,
            pass_fds=[server.fileno()],
            start_new_session=True,
        )


def end_all(folder: Path, zygotes: list[subprocess.Popen[bytes]]) -> None:
    for zygote in zygotes:
        zygote.communicate()
    shutil.rmtree(folder)


def main(server: str, executable: str, imported: str) -> Program:
    """What a rank is to run; the zygote itself never returns."""
    importlib.import_module(imported)
    sys.executable = executable
    require_one_thread(imported)
    leave_all_behind()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    into_large_pages()
    return Zygote(socket.socket(fileno=int(server))).serve()


def require_one_thread(imported: str) -> None:
    """A fork would miss all other threads, and what they had locked would stay locked."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(names) > 1:
        raise SystemExit(f"{imported} starts threads, and a fork has but one: {', '.join(names)}")


def into_large_pages() -> None:
    """Move this process's own memory into huge pages, which a fork shares in a third of the time.

    Each is one entry of the tables that are copied for a fork, in place of 512. A kernel that cannot does nothing.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *path = line.split()
        if rights.startswith("rw") and inode == "0" and path in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in place.split("-"))
            start = -(-start // HUGE_PAGE) * HUGE_PAGE
            if end - start >= HUGE_PAGE:
                libc.madvise(start, (end - start) // HUGE_PAGE * HUGE_PAGE, MADV_COLLAPSE)


def call_at_start() -> None:
    module, _, function = os.environ.get(AT_START, "").partition(":")
    if function:
        getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    program = main(*sys.argv[1:])
    program.take_over()
    call_at_start()
    program.run()
