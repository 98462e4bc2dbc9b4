"""Reads damaged files in a process of limited memory and time: `worker FOLDER FIRST COUNT KIND ...`.

A line goes out before and after each file, so that whoever started this knows at which one the process ended.
"""

import json
import math
import resource
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from mpi4dl.datasets import DatasetError
from mpi4dl.options.config import ConfigError
from tests.checkpoints.test_forged import CHANGES, changed, text_of, ways
from tests.datasets.damage import damaged
from tools.nets.damaged.kinds import Kind, kinds

MORE_BYTES = 3 << 29  # of address space, beside what the process has when it begins
MOST_GROWTH = 300 << 20  # of memory that is used, by reading one small file
MOST_SECONDS = 20  # of CPU, for one file
LONGEST_SECONDS = 90  # until a file is one at which reading waits forever
WARM = 2  # intact files that are read before memory is counted

NUMBERS = [0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
TEXTS = [
    "NaN",
    "1e308",
    "-1",
    "1e999",
    "-inf",
    "0x10",
    "1_000",
    "1,5",
    "\u0663",
    '"',
    "'",
    "[",
    "]",
    "{",
    "}",
    "<",
    ">",
]
TEXTS += [
    "&#0;",
    "]]>",
    "\x1b[31m",
    "\u202e",
    "\ufeff",
    "\r",
    "\n\n",
    "\t",
    ";",
    ",",
    "\\",
    "/../",
    "9" * 400,
    "TRUE",
    "=",
]
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7", "cp037")


def mutated(content: bytes, kind: Kind, random: np.random.Generator) -> bytes:
    """The content of a file, damaged in one to three ways."""
    for _ in range(int(random.integers(1, 4))):
        if content:
            content = _mutated(content, kind, random)
    return content


def _mutated(content: bytes, kind: Kind, random: np.random.Generator) -> bytes:
    spoilt = bytearray(content)
    place = int(random.integers(len(spoilt)))
    near = place if random.integers(2) else min(place, int(random.integers(min(len(spoilt), 3000))))
    way = int(random.integers(14 if kind.text else 8))
    if way < 3:
        return damaged(content, random)
    if way < 5:  # a size, a count or a place in a header; in either order of bytes
        size = int(random.choice([2, 4, 8]))
        value = int(random.choice(len(NUMBERS)))
        order = "little" if random.integers(4) else "big"
        near -= near % 2
        spoilt[near : near + size] = (NUMBERS[value] % (1 << 8 * size)).to_bytes(size, order)
    elif way == 5:  # a block twice, or in another place
        length = int(2 ** random.uniform(0, 12))
        block = spoilt[near : near + length]
        spoilt[place:place] = block
    elif way == 6:
        length = int(2 ** random.uniform(1, 6)) // 2 * 2
        spoilt[near : near + length] = spoilt[near : near + length][::-1]
    elif way == 7:
        spoilt = spoilt[place:] + spoilt[:place]
    elif way < 10:
        return _json_changed(content, random)
    elif way == 10:
        return _encoded(content, random)
    elif way == 11:  # a line twice, or gone
        lines = content.split(b"\n")
        number = int(random.integers(len(lines)))
        lines[number : number + 1] = [lines[number]] * int(random.choice([0, 2, 3]))
        return b"\n".join(lines)
    elif way == 12:
        spoilt[place : place + int(random.integers(3))] = TEXTS[random.integers(len(TEXTS))].encode()
    else:  # another number
        digits = [n for n, byte in enumerate(spoilt) if 48 <= byte < 58]
        if digits:
            first = digits[random.integers(len(digits))]
            spoilt[first : first + 1] = TEXTS[random.integers(10)].encode()
    return bytes(spoilt)


def _json_changed(content: bytes, random: np.random.Generator) -> bytes:
    """Another value, or none, at a place of the JSON; what is none stays."""
    try:
        plain = json.loads(content)
        places = [*ways(plain)]
        change = CHANGES[random.integers(len(CHANGES))]
        return text_of(changed(plain, places[random.integers(len(places))], change))
    except (ValueError, RecursionError):
        return content


def _encoded(content: bytes, random: np.random.Generator) -> bytes:
    try:
        return content.decode().encode(str(random.choice(ENCODINGS)))
    except UnicodeError:
        return content


def complaint(kind: Kind, path: Path) -> str | None:
    """What is wrong with how a file is read; None if it is read, or refused by one line with its name."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before = _of_status("VmHWM")
    try:
        kind.read(path)
    except (DatasetError, ConfigError, ValueError, OSError) as error:
        said = str(error)
        expected = (DatasetError, ConfigError, OSError)
        if not isinstance(error, expected) and type(error) is not ValueError and type(error).__name__ != "Damaged":
            return f"{type(error).__name__}: {said[:300]}"
        if len(said.splitlines()) != 1 or not said.isprintable() or len(said) > 4000:
            return f"a message of {len(said)} characters that is no printable line: {said[:300]!r}"
        if path.name not in said and path.stem not in said and str(path.parent) not in said:
            return f"a message that names no file: {said[:300]}"
        if "SIGXCPU" in said:
            return f"a hang in a child process: {said}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    growth = _of_status("VmHWM") - before
    return f"{growth >> 20} MiB of memory" if growth > MOST_GROWTH else None


def _of_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main(folder: Path, first: int, count: int, names: list[str]) -> None:
    found = kinds()
    for number, name in enumerate(names):
        kind = found[name]
        root = folder / name.replace(" ", "_").replace("'", "")
        root.mkdir(exist_ok=True)
        path = root / kind.name
        kind.write(path)
        content = path.read_bytes()
        for _ in range(WARM):
            kind.read(path)
        if number == 0:
            limit = _of_status("VmSize") + MORE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # PyTorch's own use of it
        for odd, write in (kind.odd or {}).items() if first == 0 else ():
            write(path)
            _read(kind, name, odd, path)
        for seed in range(first, first + count):
            random = np.random.default_rng((seed, *name.encode()))
            path.write_bytes(mutated(content, kind, random))
            _read(kind, name, seed, path)
        kind.write(path)
        kind.read(path)  # what a damaged file left behind harms no other one


def _read(kind: Kind, name: str, which: Any, path: Path) -> None:
    tell(kind=name, which=which)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + MOST_SECONDS, hard))
    signal.alarm(LONGEST_SECONDS)
    problem = complaint(kind, path)
    if problem is not None:
        tell(kind=name, which=which, problem=problem)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
