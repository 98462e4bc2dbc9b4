"""A program in a fork gets what it would get from `python`, ends as it would, and does not outlive the tests."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool.zygote import HASH_SEEDS, ROOT, end_all, stand_in, start
from tests.pool.zygote import python as pool_python

LIGHT = "json"  # what such a zygote imports: nothing that takes time
PATIENCE = 600.0


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("zygote")
    zygotes = [start(folder, seed, LIGHT) for seed in HASH_SEEDS]
    yield stand_in(folder)
    end_all(folder, zygotes)


def run(words: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, **options)  # type: ignore[call-overload]


PLACE = """
import os, resource, sys
print(sys.argv, sys.orig_argv[1:], os.getcwd(), os.environ['WORD'], sys.stdin.read())
print(os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_program_finds_what_it_was_given(python: str, tmp_path: Path) -> None:
    def fewer() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))

    options = {"preexec_fn": fewer, "cwd": tmp_path, "env": {**os.environ, "WORD": "a word"}, "input": "said"}
    script = tmp_path / "script.py"
    script.write_text(PLACE)
    (tmp_path / "module.py").write_text(PLACE)
    for arguments in (["-c", PLACE, "-x"], [str(script)], [str(script), "-x"], ["-m", "module", "-x"]):
        forked, fresh = run([python, *arguments], **options), run([sys.executable, *arguments], **options)
        assert (forked.returncode, forked.stdout, forked.stderr) == (0, fresh.stdout, "")


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(3)",
        "import sys; sys.exit('a message')",
        "import os; os._exit(7)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit; atexit.register(print, 'the end')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('a thread'))).start()",
    ],
)
def test_a_program_ends_as_it_would(python: str, program: str) -> None:
    forked, fresh = run([python, "-c", program]), run([sys.executable, "-c", program])
    assert (forked.returncode, forked.stdout, forked.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_an_exception_reaches_the_hook_and_the_code_is_1(python: str) -> None:
    program = "import sys; sys.excepthook = lambda *error: print('hook', error[1]); raise KeyError(1)"
    assert (run([python, "-c", program]).stdout, run([python, "-c", "raise KeyError(1)"]).returncode) == ("hook 1\n", 1)


def test_ranks_of_even_and_of_odd_numbers_hash_strings_differently(python: str) -> None:
    hashes = [
        run([python, "-c", "print(hash('x'))"], env={**os.environ, "PMI_RANK": rank}).stdout for rank in ("0", "1", "2")
    ]
    assert hashes[0] == hashes[2] != hashes[1]


SLEEPS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
print(os.getpid(), flush=True)
while True: time.sleep(0.1)
"""


def test_signals_go_to_the_program_and_it_ends_with_its_stub(python: str) -> None:
    def begin() -> tuple["subprocess.Popen[str]", int]:
        stub = subprocess.Popen([python, "-c", SLEEPS], stdout=subprocess.PIPE, text=True)
        assert stub.stdout is not None
        return stub, int(stub.stdout.readline())

    stub, _ = begin()
    stub.send_signal(signal.SIGUSR1)
    assert stub.stdout is not None
    assert stub.stdout.readline() == "heard\n"
    stub.terminate()
    assert stub.wait(PATIENCE) == 4
    stub.stdout.close()
    stub, rank = begin()
    stub.kill()
    assert stub.wait(PATIENCE) == -signal.SIGKILL
    wait_for_the_end(rank)
    stub.stdout.close()  # type: ignore[union-attr]
    assert run([python, "-c", "print(1)"]).stdout == "1\n"


TROUBLE = {
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "from threading import Timer as T; t = T(600, print); t.daemon = True; t.start()": "troubled starts threads",
    "import os; os.pidfd_open = lambda process: os.open('/no/such/place', 0)": "FileNotFoundError",
    "import os; os.abort()": "killed",
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_ranks_that_cannot_be_forked_say_why(trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of two says it where the zygote ended as it forked the first."""
    (tmp_path / "troubled.py").write_text(trouble)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    zygote = start(tmp_path, HASH_SEEDS[0], "troubled")
    python, program = stand_in(tmp_path), ["-c", "print(1)"]
    if "pidfd" in trouble:
        first = run([python, *program])
        assert first.returncode == -signal.SIGKILL
        assert TROUBLE[trouble] in first.stderr
    zygote.wait(PATIENCE)
    done = run([python, *program])
    assert done.returncode == 1
    assert TROUBLE[trouble] in done.stderr
    assert "Connection refused" not in done.stderr
    assert zygote.stdin is not None
    zygote.stdin.close()


def test_ranks_start_where_the_environment_gives_openblas_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    zygote = start(tmp_path, HASH_SEEDS[0], "numpy")
    assert run([stand_in(tmp_path), "-c", "print(1)"]).stdout == "1\n"
    zygote.communicate()


def test_ranks_start_without_what_is_not_installed() -> None:
    program = "from tests.pool.imports import import_installed as f; f(['tabnanny', 'no.such', 'json']); import sys"
    done = run([pool_python(), "-c", f"{program}; print('tabnanny' in sys.modules)"], cwd=ROOT)
    assert (done.stdout, done.stderr) == ("True\n", "")


def wait_for_the_end(process: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_end_when_the_tests_are_killed(tmp_path: Path) -> None:
    program = f"""
        import subprocess, sys, time
        from pathlib import Path
        from tests.pool.zygote import stand_in, start
        folder = Path({str(tmp_path)!r})
        zygote = start(folder, "1", {LIGHT!r})
        rank = subprocess.Popen([stand_in(folder), "-c", {SLEEPS!r}], stdout=subprocess.PIPE, text=True)
        print(zygote.pid, rank.stdout.readline(), flush=True)
        time.sleep({PATIENCE})
    """
    tests = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert tests.stdout is not None
    zygote, rank = map(int, tests.stdout.readline().split())
    tests.kill()
    tests.wait(PATIENCE)
    tests.stdout.close()
    wait_for_the_end(rank)
    wait_for_the_end(zygote)


def test_what_it_starts_is_forked_too_and_other_options_are_the_interpreters(python: str) -> None:
    program = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', 'import os; print(os.getppid())'])"
    assert run([python, "-c", program]).stdout == run([python, "-c", "import os; print(os.getppid())"]).stdout
    assert run([python, "-B", "-c", "import sys; print(sys.dont_write_bytecode)"]).stdout == "True\n"
