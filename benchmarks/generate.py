"""Generation for requests that arrive at random: one after another, in static batches, in a continuous batch.

    python -m benchmarks run generate --rates 1,2,4,8 --ranks 1,2,4
    python -m benchmarks run generate --precision fp32,bf16,int8,int4 --run runs/mine

    one after another   each request alone                               others wait
    static batches      up to --batch begin together, and all end        others wait for all of them
    continuous          up to --batch, who join and leave at any token

Arrivals are a Poisson process of a fixed seed, at each of --rates a second; "at once" is all of them at the beginning.
Lengths are log-normal (medians: prompts of 24 tokens, answers of 32), the same at every rate. Ranks are those of
--tensor, with one thread each. The model is that of examples/gpt.toml, of 10.8 million parameters, with random weights,
or that of --run. Pauses without requests are skipped, not waited for.

--clock cpu is for a machine that is busy with other things: seconds are those that rank 0 has a core and computes, as
if each rank had one to itself, and messages came at once. CPU seconds of all ranks are beside it, waits included.

With --precision there is another table: loss, memory and speed of one model, by the precision of its weights.
"""

import math
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.common import options as declared
from benchmarks.common.arrivals import ALONE, CONTINUOUS, WAYS, Clock, Door, Request, drawn, waits
from benchmarks.common.charts import OTHERS, Bars, Lines, bars, lines
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import NAME, publish
from benchmarks.common.results import Column, mebibytes, spread, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns
from mpi4dl._wording import counted
from mpi4dl.options.kinds import POSITIVE, choice

if TYPE_CHECKING:
    import numpy.typing as npt

    from mpi4dl.text.loading import Precision, Trained

PRECISIONS = ("fp32", "bf16", "int8", "int4")
WAITS = ("first", "between", "whole")
VOCABULARY, CONTEXT, PAGE_SIZE = 2048, 256, 16
WARM_REQUESTS = 4
SAMPLES_AT_ONCE = 8
OPTIONS = (
    Option("--rates", listed(POSITIVE), "1,2,4,8", "requests a second"),
    declared.ranks("1,2,4"),
    declared.count("--requests", 32, "of each turn"),
    declared.count("--batch", 8, "how many run at once at most"),
    Option("--seed", int, 0, "of arrivals, prompts and lengths"),
    Option("--clock", str, "wall", "what seconds are; see above", {"choices": ("wall", "cpu")}),
    declared.rounds(3),
    Option("--precision", listed(choice(*PRECISIONS)), None, "compare these instead, such as fp32,int4, on 1 rank"),
    Option("--run", Path, None, "the folder of a run of mpi4dl train on text, whose model serves"),
)
QUICK = {"ranks": "1,2", "rates": "50", "requests": 3, "rounds": 1}
COLUMNS = (
    Column("", "way"),
    Column("ranks", "ranks"),
    Column("rate", "arrivals"),
    Column("tokens/s", "tokens_per_second", 0, ends=True),
    Column("times", "times", 2),
    *(
        Column(f"{wait} {which}", f"{wait}_{which}", int(wait == "between"))
        for wait in WAITS
        for which in ("p50", "p99")
    ),
    Column("CPU ms a token", "cpu_milliseconds", 1),
    Column("alike", "alike", 3),
)
OF_PRECISIONS = (
    NAME,
    Column("", "way"),
    mebibytes("MiB", "bytes", 1),
    Column("nats a token", "nats", 4),
    Column("bits a byte", "bits_per_byte", 4),
    Column("tokens/s", "tokens_per_second", 0, ends=True),
    Column("times", "times", 2),
)


def numbers(vocabulary: int) -> Any:
    """A tokenizer of tokens as their numbers; none of them ends a text, so that all ways make as many."""
    from mpi4dl.datasets.text.tokenizer import ByteTokenizer

    class Numbers(ByteTokenizer):
        end = -1

        def __init__(self) -> None:
            self.vocabulary = vocabulary

        def decode(self, tokens: "npt.ArrayLike") -> str:
            return "".join(f"{token} " for token in cast("list[int]", tokens))

    return Numbers()


class Shop:
    """A model that serves requests on the ranks of this job, and measures itself. Collective."""

    def __init__(self, options: Options, precision: "Precision") -> None:
        import torch

        from benchmarks.common.meter import ClockedWaits
        from benchmarks.common.ranks import begin
        from mpi4dl.models.gpt import GPT
        from mpi4dl.parallel.pipeline.local_stages import LocalStages
        from mpi4dl.parallel.plan import Plan
        from mpi4dl.text.loading import find_trained, hold_text_model, lower_weights
        from mpi4dl.text.options import Ranks

        self.options, self.comm = options, begin(keep=None)
        self.waits = self.comm.node.waits = ClockedWaits(self.comm.node.waits)
        ranks = Ranks(tensor=self.comm.size, precision=precision, device="cpu")
        self.trained: Trained | None = None
        if options.run is None:
            torch.manual_seed(0)
            plan = Plan(((1,),), tensor=self.comm.size)
            self.held = LocalStages.whole(GPT(VOCABULARY, CONTEXT), plan, self.comm).requires_grad_(False)
            lower_weights(self.held, precision)
            self.vocabulary, self.context = VOCABULARY, CONTEXT
        else:
            self.trained = find_trained(self.comm, options.run)
            self.held, _ = hold_text_model(self.comm, self.trained, ranks)
            self.vocabulary, self.context = self.trained.tokenizer.vocabulary, self.trained.context

    def work_seconds(self) -> float:
        """CPU seconds of this rank outside of waits for others."""
        return time.process_time() - self.waits.cpu_seconds

    def serve(self, way: str, requests: list[Request]) -> tuple[dict[str, Any], Door]:
        """The cost of serving these requests, and the tokens of each; both mean nothing on other ranks than 0."""
        from mpi4dl.geometry import ceil_div
        from mpi4dl.text.batcher import Batcher

        most = 1 if way == ALONE else self.options.batch
        batcher = Batcher(
            self.held,
            self.comm,
            numbers(self.vocabulary),
            self.context,
            max_batch=most,
            page_size=PAGE_SIZE,
            num_pages=most * ceil_div(self.context, PAGE_SIZE),
        )
        self.comm.barrier()
        clock = Clock(time.perf_counter if self.options.clock == "wall" else self.work_seconds)
        door = Door(batcher, way, requests, most, clock)
        began, spent = time.perf_counter(), time.process_time()
        if self.comm.rank == 0:
            door.let_in()
            batcher.run()
        else:
            batcher.follow()
        spent = time.process_time() - spent
        cpu = sum(self.comm.all_gather_object(spent))
        wall = time.perf_counter() - began
        batcher.close()
        if self.comm.rank:
            return {}, door
        tokens = sum(map(len, door.times))
        found = {"way": way, "seconds": clock.now(), "wall": wall, "cpu": cpu, "tokens": tokens}
        return found | waits(requests, door.times)._asdict(), door


def alike(one: Door, other: Door) -> float:
    """The share of tokens that are the same, and as probable to the bit."""
    pairs = list(zip(chain.from_iterable(one.heard), chain.from_iterable(other.heard), strict=True))
    return sum(a == b for a, b in pairs) / len(pairs)


def work(options: Options) -> None:
    """A model over its ranks, which serves the requests of each turn by all ways. The first turn is to warm up."""
    shop = Shop(options, options.worker)
    warm = False
    beside = of_precision(shop) if options.precision else {}

    def turn() -> dict[str, Any]:
        nonlocal warm
        rates = [None] if options.precision or not warm else [None, *options.rates]
        count, results = options.requests if warm else WARM_REQUESTS, []
        first: Door | None = None
        for rate in rates:
            requests = drawn(count, rate, shop.vocabulary, shop.context, options.seed)
            for way in (ALONE, CONTINUOUS) if options.precision else WAYS:
                found, door = shop.serve(way, requests)
                first = first or door
                if found:
                    results.append(found | {"rate": rate, "alike": alike(first, door)})
        warm = True
        return {"results": results, **beside}

    answer_turns(turn, shop.comm)


def of_precision(shop: Shop) -> dict[str, Any]:
    """Bytes of the weights, and the validation loss of the run, in nats a token and in bits a byte."""

    found: dict[str, Any] = {"bytes": sum(parameter.nbytes for parameter in shop.held.parameters())}
    return found if shop.trained is None else found | validation(shop, shop.trained)


def validation(shop: Shop, trained: "Trained") -> dict[str, Any]:
    """The loss of the model's logits of whole samples."""
    import torch
    from torch.nn import functional as F

    from mpi4dl.options.sources import TextSource
    from mpi4dl.training.texts import open_texts

    assert isinstance(trained.run.source, TextSource)
    texts = open_texts(shop.comm, trained.run.source)
    data = texts.validation
    (model,) = shop.held.modules_of.values()
    losses = []
    for start in range(0, len(data), SAMPLES_AT_ONCE):
        samples = [data.read(number) for number in range(start, min(len(data), start + SAMPLES_AT_ONCE))]
        tokens = torch.stack([torch.from_numpy(sample.tokens.astype("int64")) for sample in samples])
        targets = torch.stack([torch.from_numpy(sample.targets.astype("int64")) for sample in samples])
        with torch.no_grad():
            logits = model(tokens).double().flatten(0, 1)
        losses.append(F.cross_entropy(logits, targets.flatten(), reduction="none"))
    nats = float(torch.cat(losses).mean())
    return {"nats": nats, "bits_per_byte": texts.bits_per_byte(nats)}


def contestants(options: Options) -> list[Contestant]:
    """A job for each number of ranks, which serves by all ways, or for each precision."""
    if options.precision:
        return [options.contestant(precision, 1, precision) for precision in options.precision]
    return [options.contestant("tensor", ranks, "fp32") for ranks in options.ranks]


def run(options: Options) -> None:
    found = contestants(options)
    take_turns(found, options.rounds)
    rows = summarise(found)
    seconds = "seconds of rank 0's work" if options.clock == "cpu" else "seconds"
    title = f"{counted(options.requests, 'request')} a turn, {options.batch} at once at most, {seconds}, waits in ms"
    if options.precision:
        publish(options, title, table(rows, OF_PRECISIONS), draw_precisions(rows, title), rows)
    else:
        publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def percentile(values: list[float], share: float) -> float:
    """The least value that this share of all does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summarise(found: list[Contestant]) -> list[dict[str, Any]]:
    """For each number of ranks, rate and way: medians over turns, and percentiles over the waits of all turns.

    `times` is how many times the tokens a second of one after another it has, turn by turn.
    """
    rows = []
    for each in found:
        for place, kind in enumerate(each.answers[0]["results"]):
            turns = each.of("results")
            own = [results[place] for results in turns]
            speeds = [one["tokens"] / one["seconds"] for one in own]
            alone = [next(o for o in results if (o["way"], o["rate"]) == (ALONE, kind["rate"])) for results in turns]
            times = [speed * one["seconds"] / one["tokens"] for speed, one in zip(speeds, alone, strict=True)]
            row: dict[str, Any] = {"name": each.name, "ranks": each.ranks, "rate": kind["rate"], "way": kind["way"]}
            row["arrivals"] = "at once" if kind["rate"] is None else f"{kind['rate']:g} a second"
            row |= spread("tokens_per_second", speeds) | spread("times", times)
            row |= spread("cpu_milliseconds", [1e3 * one["cpu"] / one["tokens"] for one in own])
            row |= spread("tokens_per_wall_second", [one["tokens"] / one["wall"] for one in own])
            for wait in WAITS:
                values = [1e3 * value for one in own for value in one[wait]]
                row |= {f"{wait}_p50": percentile(values, 0.5), f"{wait}_p99": percentile(values, 0.99)}
            beside = {key: value for key, value in each.answers[-1].items() if key != "results"}
            rows.append(row | {"alike": min(one["alike"] for one in own)} | beside)
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """For each number of ranks: tokens a second, and the waits, against the rate."""
    panels = []
    for ranks in sorted({row["ranks"] for row in rows}):
        its = [row for row in rows if row["ranks"] == ranks and row["rate"] is not None]
        who = counted(ranks, "rank")
        panels.append(Lines(its, "rate", "tokens_per_second", lambda r: r["way"], "requests/s", "tokens/s", who))
        for wait, label, scale in (("first", "s to the first token", 1e-3), ("between", "ms between tokens", 1.0)):
            points = [
                {"rate": row["rate"], "who": f"{row['way']}, {which}", "wait": row[f"{wait}_{which}"]}
                for row in its
                for which in ("p50", "p99")
            ]
            panels.append(Lines(points, "rate", "wait", lambda p: p["who"], "requests/s", label, who, scale, "y"))
    return lines(panels, title, columns=3)


def draw_precisions(rows: list[dict[str, Any]], title: str) -> Any:
    """Memory, loss and speed of each precision."""
    panels = [
        Bars("bytes", "MiB of weights", 1 / 2**20, 1),
        Bars("tokens_per_second", "tokens/s", digits=0),
    ]
    if "bits_per_byte" in rows[0]:
        panels.insert(1, Bars("bits_per_byte", "validation loss, bits a byte", digits=4))
    names = [f"{row['name']}, {row['way']}" for row in rows]
    return bars(rows, panels, title, [OTHERS] * len(rows), names)
