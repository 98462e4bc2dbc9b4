"""Lets one rank of a training fail, in each way, in each phase, and writes what becomes of the job.

    python -m tools.nets.fault_matrix   writes docs/results/failures.json, and the table of docs/reference/failures.md

Each case is a job of two ranks on small images. Its limit (`--hang-timeout`) is an hour, so nothing but the failure
itself ends it.
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.pool.zygote import ROOT
from tests.training.test_train_hunt import PHASES, WAYS, Ending, leave

PAGE = ROOT / "docs" / "reference" / "failures.md"
RESULTS = ROOT / "docs" / "results" / "failures.json"
TABLE = re.compile(r"(^\| A rank .*\n\|[ |-]*\n)(?:\|.*\n)*", re.MULTILINE)
LONGEST = 150  # characters of a message


class Case(NamedTuple):
    phase: str
    way: str
    rank: int


def message(ending: Ending) -> str:
    """The last line that the job wrote to people, without what differs from run to run."""
    lines = [line.strip() for line in ending.stderr.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(("mpi4dl", "[rank"))]
    last = (ours or lines or ["nothing"])[-1]
    own = [line for line in lines if re.match(r"(\[rank \d of \d\] )?\w*(Error|Exit|Exception)\b", line)]
    return " ".join((own or [last])[-1].split())[:LONGEST].replace("|", "\\|")


def rows(endings: Sequence[tuple[Case, Ending]]) -> str:
    lines = []
    for way in WAYS:
        here = [ending for case, ending in endings if case.way == way]
        codes = ", ".join(map(str, sorted({ending.code for ending in here})))
        seconds = sorted(ending.seconds for ending in here)
        lines.append(f"| {way} | {codes} | {seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.nets.fault_matrix", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, default=2, help="jobs at once")
    parser.add_argument("--phases", type=lambda text: text.split(","), default=[*PHASES], help=", ".join(PHASES))
    arguments = parser.parse_args()
    cases = [Case(*each) for each in itertools.product(arguments.phases, WAYS, (0, 1))]
    endings: list[tuple[Case, Ending]] = []
    hung: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as threads:
        made = [threads.submit(leave, *case, Path(folder) / str(number)) for number, case in enumerate(cases)]
        for case, each in zip(cases, made, strict=True):
            try:
                endings.append((case, each.result()))
                print(f"{len(endings)} of {len(cases)}: {case}: code {endings[-1][1].code}", flush=True)
            except TimeoutError as error:
                hung.append(f"{case}: {error}")
                print(hung[-1], flush=True)
    found = [
        {**case._asdict(), "code": ending.code, "seconds": round(ending.seconds, 2), "message": message(ending)}
        for case, ending in endings
    ]
    RESULTS.write_text(json.dumps({"cases": found, "hung": hung}, indent=1) + "\n")
    PAGE.write_text(TABLE.sub(lambda table: f"{table[1]}{rows(endings)}\n", PAGE.read_text()))
    sys.exit(bool(hung))


if __name__ == "__main__":
    main()
