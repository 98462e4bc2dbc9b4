"""Lets one rank of a training fail, in each way, in each phase, and writes what becomes of the job.

    python -m tools.nets.fault_matrix                    writes docs/reference/failures.json, and failures.md beside it

Each case is a job of two ranks on small images. Its limit (`--hang-timeout`) is an hour, so nothing but the failure
itself ends it.
"""

import argparse
import datetime
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.pool.zygote import ROOT
from tests.training.test_train_hunt import PHASES, WAYS, Ending, leave

PAGE = """# What happens when a rank fails

Two ranks train on 1x2 tiles. One of them fails: rank 0 or rank 1, in each of {phases} phases of a run ({named}).
{count} jobs; {hung} of them did not end by themselves. `--hang-timeout` was an hour, so nothing but the failure itself
ended a job.

| A rank | Exit code of the job | Seconds until all processes had ended | Last line of the standard error |
| --- | --- | --- | --- |
{rows}

*Table: seconds are the median and the longest. Made on {date} by
`python -m tools.nets.fault_matrix`, on {cores} cores, {workers} jobs at once. All codes and
messages: [JSON](failures.json). "0" is a rank that exits well at the end of a run, where others do not need it
any more. Of a signal MPICH's mpirun prints the name on the standard output.*

## See also

- [Fail-stop](../explanation/fail-stop.md): how the others get to know
- [Exit codes and signals](exit-codes.md)
- [Resume a run](../how-to/resume.md)
"""
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
        said = [message(ending) for ending in here]
        lines.append(
            f"| {way} | {codes} | {seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f} | "
            f"{max(sorted(set(said)), key=said.count)} |"
        )
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
    results = ROOT / "docs" / "reference" / "failures.json"
    results.write_text(json.dumps({"cases": found, "hung": hung}, indent=1) + "\n")
    page = PAGE.format(
        phases=len(arguments.phases),
        named=", ".join(arguments.phases),
        count=len(cases),
        hung=len(hung),
        rows=rows(endings),
        date=datetime.date.today().isoformat(),
        cores=len(os.sched_getaffinity(0)),
        workers=arguments.workers,
    )
    (ROOT / "docs" / "reference" / "failures.md").write_text(page)
    sys.exit(bool(hung))


if __name__ == "__main__":
    main()
