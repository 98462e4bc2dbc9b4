"""A long day in an hour: trainings that are disturbed and go on, trainings without end, a server under load.

    python -m tools.nets.soak --minutes 60
    python -m tools.nets.soak --minutes 10 --parts training --seed 3

Most of the time is for disturbed trainings, one after the other. All that is wrong is printed as it is found, and the
folders of such trainings are kept.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.nodes import NoNodes, two_nodes
from tools.nets.soak import repeating, serving
from tools.nets.soak.training import Soak

SHARES = {"training": 0.6, "repeating": 0.2, "serving": 0.2}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.nets.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[*SHARES], help=", ".join(SHARES))
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    folder = Path(tempfile.mkdtemp(prefix="soak"))
    print(f"seed {seed}, {folder}", flush=True)
    total = sum(SHARES[part] for part in arguments.parts)
    seconds = {part: 60 * arguments.minutes * SHARES[part] / total for part in arguments.parts}
    wrong: list[str] = []

    def tell(found: list[str]) -> None:
        wrong.extend(found)
        for each in found:
            print(f"wrong: {each}", flush=True)

    if "repeating" in seconds:
        count, found = repeating.soak(seconds["repeating"])
        print(f"{count} trainings in the same processes", flush=True)
        tell(found)
    if "serving" in seconds:
        (folder / "serving").mkdir()
        counts, found = serving.soak(folder / "serving", seconds["serving"], seed)
        print(f"requests: {', '.join(f'{count} {kind}' for kind, count in counts.items())}", flush=True)
        tell(found)
    if "training" in seconds:
        with contextlib.ExitStack() as stack:
            try:
                cluster = stack.enter_context(two_nodes(folder))
            except NoNodes as none:
                cluster = None
                print(f"without two nodes: {none}", flush=True)
            soak, end = Soak(folder, seed, cluster), time.monotonic() + seconds["training"]
            while time.monotonic() < end:
                tell(soak.round())
                print(f"{soak.number} trainings, {sum(soak.counts.values())} disturbances", flush=True)
        for name, count in sorted(soak.counts.items()):
            print(f"{count} times: {name}")
    print(f"{len(wrong)} times something was wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
