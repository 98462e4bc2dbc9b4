"""Tries random cases for some time, and shows the smallest ones that go wrong.

    python -m tools.nets.fuzz --minutes 60                           all targets, in turns
    python -m tools.nets.fuzz --minutes 5 --targets trainings --seed 7
    python .fuzz/trainings-7.py                                 a case that went wrong, by itself

Cases are drawn by hypothesis. One that goes wrong is shrunk, and written to .fuzz as a script. The seed of each round
is printed: the same seed draws the same cases.
"""

import argparse
import random
import sys
import time

from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT
from tools.nets.fuzz.running import Hunt
from tools.nets.fuzz.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.nets.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--targets", type=lambda text: text.split(","), default=[*TARGETS], help=", ".join(TARGETS))
    parser.add_argument("--seed", type=int, help="of the first round; by chance if it is not given")
    parser.add_argument("--cases", type=int, default=25, help="of a round, behind which the next target has its turn")
    arguments = parser.parse_args()
    number = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    begin, ranks = time.monotonic(), Ranks()
    hunt = Hunt(ranks, begin + 60 * arguments.minutes)
    try:
        while time.monotonic() < hunt.end:
            for name in arguments.targets:
                hunt.round(TARGETS[name], number, arguments.cases)
                counts = ", ".join(f"{count} {word}" for word, count in sorted(hunt.words[name].items()))
                print(f"{(time.monotonic() - begin) / 60:.1f} min, seed {number}, {name}: {counts}", flush=True)
            number += 1
    finally:
        ranks.stop()
    for text, count in hunt.refusals.most_common(30):
        print(f"refused {count} times: {text}")
    print(f"{sum(sum(words.values()) for words in hunt.words.values())} cases, {len(hunt.scripts)} found")
    for path in hunt.scripts:
        print(path.relative_to(ROOT))
    sys.exit(bool(hunt.scripts))


if __name__ == "__main__":
    main()
