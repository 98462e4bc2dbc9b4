"""Peak memory: a known allocation is seen, its release is not, and a reset forgets it."""

import errno
import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mpi4dl import _memory as memory
from mpi4dl._memory import MemoryMeter, peak_memory_bytes, within_limits
from mpi4dl.comm import Refusal
from tests.pool.zygote import ROOT, python

MEBIBYTE = 2**20
HELD = 64 * MEBIBYTE
NOISE = 24 * MEBIBYTE


@contextmanager
def resident_memory(num_bytes: int) -> Iterator[None]:
    """Fresh pages, written to so that they are resident, and given back at the end."""
    with mmap.mmap(-1, num_bytes) as pages:
        for page in range(0, num_bytes, mmap.PAGESIZE):
            pages[page] = 1
        yield


def test_a_meter_sees_the_peak_and_not_what_was_there_before() -> None:
    with resident_memory(HELD):
        meter = MemoryMeter("cpu")
        with resident_memory(HELD):
            pass
        assert abs(meter.peak_bytes() - HELD) < NOISE


def test_a_reset_forgets_the_peak() -> None:
    meter = MemoryMeter("cpu")
    with resident_memory(HELD):
        pass
    if not meter.reset():
        pytest.skip("this system does not let a process reset its peak")
    assert meter.peak_bytes() < NOISE


def test_the_peak_of_the_process_covers_everything() -> None:
    with resident_memory(HELD):
        assert peak_memory_bytes("cpu") > HELD
        assert peak_memory_bytes("cpu") == peak_memory_bytes(torch.device("cpu"))


def test_without_proc_the_system_call_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = peak_memory_bytes("cpu")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "absent")
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "absent" / "too")
    assert abs(peak_memory_bytes("cpu") - expected) < NOISE
    meter = MemoryMeter("cpu")
    assert not meter.reset()
    assert 0 <= meter.peak_bytes() < NOISE


def test_on_a_gpu_the_allocator_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[object] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123 if str(device) == "cuda:1" else 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    meter = MemoryMeter(torch.device("cuda:1"))
    assert meter.peak_bytes() == 123
    assert meter.reset()
    assert resets == [torch.device("cuda:1")] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_real_gpu_only_tensors_count() -> None:
    meter = MemoryMeter("cuda")
    before = meter.peak_bytes()
    block = torch.empty(HELD, dtype=torch.uint8, device="cuda")
    assert meter.peak_bytes() - before == HELD
    del block
    meter.reset()
    assert meter.peak_bytes() == before


def test_out_of_memory_is_a_refusal_with_ways_out() -> None:
    with pytest.raises(Refusal, match=r"rank 3 is out of memory: .* try `zero` 3, .*can't allocate memory"):
        within_limits(lambda: torch.empty(1 << 50).zero_(), 3)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        within_limits(lambda: torch.ones(2, 2).mm(torch.ones(3, 3)).zero_(), 0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_is_a_refusal_with_the_limit(number: int) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "slide.tif")

    with pytest.raises(Refusal, match=r"^rank 3 has too many open files \(slide.tif\): it may have \d+; raise that"):
        within_limits(fail, 3)
    with pytest.raises(FileNotFoundError):
        within_limits(lambda: open("nowhere").close(), 3)


KEEPING = """
import ctypes, sys
import torch
from mpi4dl import _memory as memory

def resident():
    return memory._status_bytes("VmRSS") >> 20

assert memory.keep_freed_memory(sys.argv[1] == "keep")
before = resident()
some = [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(16)]
assert resident() - before > 240
some.clear()
print(resident() - before > 200)
"""


@pytest.mark.parametrize(("how", "kept"), [("keep", True), ("return", False)])
def test_freed_memory_stays_or_goes_as_asked(how: str, kept: bool) -> None:
    done = subprocess.run([python(), "-c", KEEPING, how], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.stdout, done.stderr) == (f"{kept}\n", "")
