"""Context parallelism, as many tokens on each rank: memory and seconds of attention as ranks and tokens grow together.

    python -m benchmarks run context --tokens 4096 --ranks 1,2,4

    ring      keys and values go round the ranks          memory of a rank stays as it is
    gather    a rank has all keys and values              memory of a rank grows with the ranks

On one rank it is plain PyTorch. A turn, and memory, are those of the benchmark `attention`. A rank's share of the work
grows with the ranks: its queries ask the tokens of all.
"""

from typing import Any

from benchmarks import attention
from benchmarks.common import options as declared
from benchmarks.common.charts import Lines, lines
from benchmarks.common.options import Options
from benchmarks.common.report import NAME, RANKS, publish
from benchmarks.common.results import Column, spread, table
from benchmarks.common.turns import Contestant, take_turns

WAYS = ("ring", "gather")
PAGE = 4 / 1024  # MiB: less than a page of memory cannot be seen
OPTIONS = (
    declared.count("--tokens", 4096, "tokens of each rank"),
    declared.ranks("1,2,4"),
    declared.HEADS,
    declared.FEATURES,
    declared.CAUSAL,
    declared.rounds(3),
    declared.DEVICE,
)
QUICK = {"tokens": 5, "ranks": "1,2", "heads": 2, "features": 4, "rounds": 1}
COLUMNS = (
    NAME,
    RANKS,
    Column("MiB of a rank", "mebibytes", 1),
    Column("over fewest ranks", "over_fewest", 2, ends=True),
    Column("seconds", "seconds", 2, ends=True),
)
work = attention.work


def contestants(options: Options) -> list[Contestant]:
    """For each number of ranks each way; on one rank both are plain PyTorch."""
    return [
        options.contestant(way, ranks, (way if ranks > 1 else "plain", options.tokens * ranks))
        for ranks in options.ranks
        for way in WAYS
    ]


def run(options: Options) -> None:
    found = contestants(options)
    take_turns(found, options.rounds)
    rows = summarise(found)
    heads = f"{options.heads} heads of {options.features}"
    title = f"attention, {options.tokens} tokens a rank, {heads}, forward and backward"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def summarise(found: list[Contestant]) -> list[dict[str, Any]]:
    """Medians of each, and memory over that of the same way on the fewest ranks, turn by turn."""
    rows = []
    for each in found:
        first = min((other for other in found if other.name == each.name), key=lambda other: other.ranks)
        pairs = zip(each.of("mebibytes"), first.of("mebibytes"), strict=True)
        over = spread("over_fewest", [max(PAGE, a) / max(PAGE, b) for a, b in pairs])
        rows.append({"name": each.name, "ranks": each.ranks, **each.spreads("mebibytes", "seconds"), **over})
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Memory of a rank, and seconds, against the number of ranks: a line for each way."""
    kinds = (("mebibytes", "MiB of a rank"), ("seconds", "seconds"))
    return lines([Lines(rows, "ranks", key, lambda r: r["name"], "ranks", label) for key, label in kinds], title)
