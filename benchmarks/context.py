"""Context parallelism, as many tokens on each rank: memory and seconds of attention as ranks and tokens grow together.

    python -m benchmarks.context --tokens 4096 --ranks 1,2,4

    ring      keys and values go round the ranks          memory of a rank stays as it is
    gather    a rank has all keys and values              memory of a rank grows with the ranks

On one rank it is plain PyTorch. A turn, and how memory is measured, are those of benchmarks.attention, of which each
contestant is a job. A rank's share of the work grows with the ranks: its queries ask the tokens of all.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import between, error_bars, publish, pyplot, spread, table
from benchmarks.turns import Contestant, numbers, take_turns

WAYS = ("ring", "gather")
PAGE = 4 / 1024  # MiB: what takes less than a page of memory is not seen to take any
MARKS = {"ring": "o-", "gather": "s--"}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each rank")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--features", type=int, default=64, help="of each head")
    parser.add_argument("--causal", action="store_true", help="queries ask earlier tokens only")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--out", type=Path, default=Path("results/context"), help="where to write .json and .png")
    options = parser.parse_args(argv)
    for name in ("tokens", "heads", "features", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, but must be at least 1")
    try:
        fewest = min(numbers(options.ranks))
    except ValueError:
        parser.error(f"--ranks {options.ranks}: write them as 1,2,4")
    if fewest < 1:
        parser.error(f"--ranks {options.ranks}: a job has 1 rank at least")
    return options


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """For each number of ranks each way; on one rank there is but one."""
    common = ["-m", "benchmarks.attention", "--heads", str(options.heads), "--features", str(options.features)]
    common += ["--causal"] * options.causal
    found = []
    for ranks in numbers(options.ranks):
        length = ["--length", str(options.tokens * ranks), "--worker"]
        found += [Contestant(way, ranks, [*common, *length, way if ranks > 1 else "plain"]) for way in WAYS]
    return found


def summarise(found: list[Contestant]) -> list[dict[str, Any]]:
    """Medians of each, and memory over that of the same way on the fewest ranks, turn by turn."""
    rows = []
    for each in found:
        first = min((other for other in found if other.name == each.name), key=lambda other: other.ranks)
        pairs = zip(each.answers, first.answers, strict=True)
        over = [max(PAGE, a["mebibytes"]) / max(PAGE, b["mebibytes"]) for a, b in pairs]
        row: dict[str, Any] = {"name": each.name, "ranks": each.ranks}
        for key in ("mebibytes", "seconds"):
            row |= spread(key, [answer[key] for answer in each.answers])
        rows.append(row | spread("over_fewest", over))
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    head = ["", "ranks", "MiB of a rank", "over fewest ranks", "(min-max)", "seconds", "(min-max)"]
    cells = [
        [
            r["name"],
            str(r["ranks"]),
            f"{r['mebibytes']:.1f}",
            f"{r['over_fewest']:.2f}",
            between(r, "over_fewest"),
            f"{r['seconds']:.2f}",
            between(r, "seconds"),
        ]
        for r in rows
    ]
    return table([head, *cells])


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Memory of a rank, and seconds, against the number of ranks: a line for each way."""
    figure, plots = pyplot().subplots(1, 2, figsize=(9, 3.6))
    for plot, key, label in zip(plots, ("mebibytes", "seconds"), ("MiB of a rank", "seconds"), strict=True):
        for way in WAYS:
            own = [r for r in rows if r["name"] == way]
            ranks = [r["ranks"] for r in own]
            plot.errorbar(ranks, [r[key] for r in own], yerr=error_bars(own, key), fmt=MARKS[way], capsize=3, label=way)
        plot.set_xticks(sorted({r["ranks"] for r in rows}))
        plot.set_ylim(bottom=0)
        plot.set_xlabel("ranks")
        plot.set_ylabel(label)
    plots[0].legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure


def main() -> None:
    options = parse(sys.argv[1:])
    found = contestants(options)
    take_turns(found, options.rounds)
    rows = summarise(found)
    title = (
        f"attention, {options.tokens} tokens a rank, {options.heads} heads of {options.features}, forward and backward"
    )
    print(f"{title}\n{as_table(rows)}")
    publish(options, {"contestants": rows}, draw(rows, title))


if __name__ == "__main__":
    main()
