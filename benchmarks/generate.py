"""Generation for requests that come at random: one after another, in static batches, in a continuous batch.

    python -m benchmarks.generate --rates 1,2,4,8 --ranks 1,2,4
    python -m benchmarks.generate --precision fp32,bf16,int8,int4 --run runs/mine

    one after another   each request alone                               others wait
    static batches      up to --batch begin together, and all end        others wait for all of them
    continuous          up to --batch, who join and leave at any token

Arrivals are a Poisson process of a fixed seed, at each of --rates a second; "at once" is all of them at the beginning.
Lengths are log-normal (medians: prompts of 24 tokens, answers of 32), the same at every rate. Ranks are those of
--tensor, with one thread each. The model is that of examples/gpt.toml, of 10.8 million parameters, with random weights,
or that of --run. Pauses in which there is nobody to serve are skipped, not waited for.

--clock cpu is for a machine that is busy with other things: seconds are those that rank 0 has a core and computes, as
if each rank had one to itself, and messages came at once. CPU seconds of all ranks are beside it, waits included.

With --precision there is another table: loss, memory and speed of one model, by the precision of its weights.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.arrivals import ALONE, CONTINUOUS, STATIC, WAYS
from benchmarks.report import between, error_bars, publish, pyplot, spread, table
from benchmarks.turns import Contestant, numbers, take_turns

PRECISIONS = ("fp32", "bf16", "int8", "int4")
COLOURS = {ALONE: "tab:gray", STATIC: "tab:orange", CONTINUOUS: "tab:blue"}
WAITS = ("first", "between", "whole")
MIB = 1 << 20


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rates", default="1,2,4,8", help="requests a second")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, which share the parameters of each layer")
    parser.add_argument("--requests", type=int, default=32, help="of each turn")
    parser.add_argument("--batch", type=int, default=8, help="how many run at once at most")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, prompts and lengths")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="what seconds are; see above")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--precision", default="", help="compare these instead, such as fp32,bf16,int8,int4, on 1 rank")
    parser.add_argument("--run", help="the folder of a run of mpi4dl train on text, whose model is to serve")
    parser.add_argument("--out", type=Path, default=Path("results/generate"), help="where to write .json and .png")
    parser.add_argument("--worker", choices=PRECISIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("requests", "batch", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, but must be at least 1")
    try:
        rates, ranks = [float(rate) for rate in options.rates.split(",")], numbers(options.ranks)
    except ValueError:
        parser.error(f"--rates {options.rates}, --ranks {options.ranks}: write them as 1,2,4")
    if min(ranks) < 1 or not all(0 < rate < math.inf for rate in rates):
        parser.error(f"--rates {options.rates}, --ranks {options.ranks}: rates are above 0, a job has 1 rank at least")
    unknown = [each for each in options.precision.split(",") if each and each not in PRECISIONS]
    if unknown:
        parser.error(f"--precision {options.precision}: {unknown[0]} is none of {', '.join(PRECISIONS)}")
    options.rates = rates
    return options


def contestants(options: argparse.Namespace, flags: list[str]) -> list[Contestant]:
    """A job for each number of ranks, which serves by all ways, or for each precision; each is told all flags."""
    common = ["-m", "benchmarks.generate", *flags, "--worker"]
    if options.precision:
        return [Contestant(precision, 1, [*common, precision]) for precision in options.precision.split(",")]
    return [Contestant("tensor", ranks, [*common, "fp32"]) for ranks in numbers(options.ranks)]


def percentile(values: list[float], share: float) -> float:
    """The least value that so many are not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summarise(found: list[Contestant]) -> list[dict[str, Any]]:
    """For each number of ranks, rate and way: medians over turns, and percentiles over the waits of all turns.

    `times` is how many times the tokens a second of one after another it has, turn by turn.
    """
    rows = []
    for each in found:
        for place, kind in enumerate(each.answers[0]["results"]):
            turns = [answer["results"] for answer in each.answers]
            own = [results[place] for results in turns]
            speeds = [one["tokens"] / one["seconds"] for one in own]
            alone = [next(o for o in results if (o["way"], o["rate"]) == (ALONE, kind["rate"])) for results in turns]
            times = [speed * one["seconds"] / one["tokens"] for speed, one in zip(speeds, alone, strict=True)]
            row: dict[str, Any] = {"name": each.name, "ranks": each.ranks, "rate": kind["rate"], "way": kind["way"]}
            row |= spread("tokens_per_second", speeds) | spread("times", times)
            row |= spread("cpu_milliseconds", [1e3 * one["cpu"] / one["tokens"] for one in own])
            row |= spread("tokens_per_wall_second", [one["tokens"] / one["wall"] for one in own])
            for wait in WAITS:
                values = [1e3 * value for one in own for value in one[wait]]
                row |= {f"{wait}_p50": percentile(values, 0.5), f"{wait}_p99": percentile(values, 0.99)}
            beside = {key: value for key, value in each.answers[-1].items() if key != "results"}
            rows.append(row | {"alike": min(one["alike"] for one in own)} | beside)
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    head = ["", "ranks", "rate", "tokens/s", "(min-max)", "times", "first p50", "p99", "between p50", "p99"]
    cells = [
        [
            row["way"],
            str(row["ranks"]),
            "at once" if row["rate"] is None else f"{row['rate']:g}",
            f"{row['tokens_per_second']:.0f}",
            between(row, "tokens_per_second"),
            f"{row['times']:.2f}",
            *(f"{row[f'{wait}_{which}']:.{digits}f}" for wait, which, digits in COLUMNS),
            f"{row['cpu_milliseconds']:.1f}",
            f"{row['alike']:.3f}",
        ]
        for row in rows
    ]
    return table([[*head, "whole p50", "p99", "CPU ms a token", "alike"], *cells])


COLUMNS = [(wait, which, int(wait == "between")) for wait in WAITS for which in ("p50", "p99")]


def table_of_precisions(rows: list[dict[str, Any]]) -> str:
    """Speeds one after another and together, beside what the weights lose and take."""
    head = ["", "MiB", "nats a token", "bits a byte", "tokens/s alone", "(min-max)", "together", "(min-max)", "times"]
    cells = []
    for alone, together in pairs_of(rows):
        cells.append(
            [
                alone["name"],
                f"{alone['bytes'] / MIB:.1f}",
                *(f"{alone[key]:.4f}" if key in alone else "-" for key in ("nats", "bits_per_byte")),
                f"{alone['tokens_per_second']:.0f}",
                between(alone, "tokens_per_second"),
                f"{together['tokens_per_second']:.0f}",
                between(together, "tokens_per_second"),
                f"{together['times']:.2f}",
            ]
        )
    return table([head, *cells])


def pairs_of(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each precision one after another, and together."""
    ways = [[row for row in rows if row["way"] == way] for way in (ALONE, CONTINUOUS)]
    return list(zip(*ways, strict=True))


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """A line of plots for each number of ranks: tokens a second, and how long one waits, against the rate."""
    ranks = sorted({row["ranks"] for row in rows})
    figure, lines = pyplot().subplots(len(ranks), 3, figsize=(11, 0.6 + 2.9 * len(ranks)), squeeze=False)
    for count, (speed, first, gaps) in zip(ranks, lines, strict=True):
        for way in WAYS:
            own = [row for row in rows if (row["ranks"], row["way"]) == (count, way) and row["rate"] is not None]
            rates, colour = [row["rate"] for row in own], COLOURS[way]
            bars = error_bars(own, "tokens_per_second")
            speeds = [row["tokens_per_second"] for row in own]
            speed.errorbar(rates, speeds, yerr=bars, fmt="o-", capsize=3, color=colour, label=way)
            (most,) = (row for row in rows if (row["ranks"], row["way"], row["rate"]) == (count, way, None))
            speed.axhline(most["tokens_per_second"], color=colour, lw=1, ls=":")
            for plot, wait, unit in ((first, "first", 1e3), (gaps, "between", 1)):
                plot.plot(rates, [row[f"{wait}_p50"] / unit for row in own], "o-", color=colour, label=f"{way}, p50")
                plot.plot(rates, [row[f"{wait}_p99"] / unit for row in own], "^--", color=colour, label="p99")
        ends = "1 rank" if count == 1 else f"{count} ranks"
        speed.set_ylabel(f"{ends}: tokens a second")
        first.set_ylabel("seconds to the first token")
        first.set_yscale("log")
        gaps.set_ylabel("ms between tokens")
        for plot in (speed, gaps):
            plot.set_ylim(bottom=0)
        for plot in (speed, first, gaps):
            plot.set_xlabel("requests a second")
    lines[0][0].legend(frameon=False, fontsize=8)
    lines[0][1].legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=11)
    return figure


def draw_precisions(rows: list[dict[str, Any]], title: str) -> Any:
    """Memory, loss and speed of each precision."""
    figure, (memory, loss, speed) = pyplot().subplots(1, 3, figsize=(11, 3.4))
    found = pairs_of(rows)
    names = [alone["name"] for alone, _ in found]
    memory.bar(names, [alone["bytes"] / MIB for alone, _ in found], color="tab:gray")
    memory.set_ylabel("MiB of weights")
    losses = [alone.get("bits_per_byte") for alone, _ in found]
    if None not in losses:
        loss.plot(names, losses, "o", color="tab:red")
        for name, value in zip(names, losses, strict=True):
            loss.annotate(f"{value:.4f}", (name, value), (0, 7), textcoords="offset points", ha="center", fontsize=8)
        loss.margins(0.2)
        loss.ticklabel_format(axis="y", useOffset=False)
    loss.set_ylabel("validation loss, bits a byte")
    for place, way in enumerate((ALONE, CONTINUOUS)):
        own = [pair[place] for pair in found]
        bars, places = error_bars(own, "tokens_per_second"), [number + 0.4 * place - 0.2 for number in range(len(own))]
        speeds = [row["tokens_per_second"] for row in own]
        speed.bar(places, speeds, 0.4, yerr=bars, capsize=3, color=COLOURS[way], label=way)
    speed.set_xticks(range(len(names)), names)
    speed.set_ylabel("tokens a second")
    speed.margins(y=0.35)  # room for the legend
    speed.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker is not None:
        from benchmarks.generate_worker import worker

        worker(options)
        return
    found = contestants(options, sys.argv[1:])
    take_turns(found, options.rounds)
    rows = summarise(found)
    seconds = "seconds of rank 0's work" if options.clock == "cpu" else "seconds"
    what = f"{options.requests} requests a turn, {options.batch} at once at most, {seconds}"
    if options.precision:
        print(f"{what}\n{table_of_precisions(rows)}")
        publish(options, {"contestants": rows}, draw_precisions(rows, what))
    else:
        print(f"{what}; waits in ms\n{as_table(rows)}")
        publish(options, {"contestants": rows}, draw(rows, f"{what}; dotted: all requests there at once"))


if __name__ == "__main__":
    main()
