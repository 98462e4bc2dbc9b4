"""A contestant of benchmarks.generate: a model over its ranks, which serves the requests of each turn by all ways.

An answer is a list: for each rate (None: all at once) and way the seconds, and what requests waited.
"""

import argparse
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from benchmarks.arrivals import ALONE, CONTINUOUS, WAYS, Clock, Door, Request, drawn, waits
from benchmarks.turns import answer_turns
from mpi4dl.comm import world
from mpi4dl.datasets.text import ByteTokenizer
from mpi4dl.models.gpt import GPT
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.sweeps.meter import ClockedWaits
from mpi4dl.text.batcher import Batcher
from mpi4dl.text.loading import Precision, Trained, bytes_of, find_trained, hold_trained, lower_weights
from mpi4dl.text.model import pages_for
from mpi4dl.text.options import Ranks
from mpi4dl.training.data import open_texts

if TYPE_CHECKING:
    import numpy.typing as npt

VOCABULARY, CONTEXT, PAGE_SIZE = 2048, 256, 16
WARM_REQUESTS = 4
SAMPLES_AT_ONCE = 8


class Numbers(ByteTokenizer):
    """Tokens as their numbers; none of them ends a text, so that all ways have as many to make."""

    end = -1

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary  # type: ignore[misc]

    def decode(self, tokens: "npt.ArrayLike") -> str:
        return "".join(f"{token} " for token in cast("list[int]", tokens))


class Shop:
    """A model that serves requests on the ranks of this job, and what that takes. Collective."""

    def __init__(self, options: argparse.Namespace, precision: Precision) -> None:
        torch.set_num_threads(1)
        self.options, self.comm = options, world()
        self.waits = self.comm.node.waits = ClockedWaits(self.comm.node.waits)
        ranks = Ranks(tensor=self.comm.size, precision=precision, device="cpu")
        self.trained: Trained | None = None
        if options.run is None:
            torch.manual_seed(0)
            self.held = LocalStages.whole(GPT(VOCABULARY, CONTEXT), ranks.plan(), self.comm).requires_grad_(False)
            lower_weights(self.held, precision)
            self.vocabulary, self.context = VOCABULARY, CONTEXT
        else:
            self.trained = find_trained(self.comm, Path(options.run))
            self.held = hold_trained(self.comm, self.trained, ranks)
            self.vocabulary, self.context = self.trained.tokenizer.vocabulary, self.trained.context

    def work_seconds(self) -> float:
        """CPU seconds of this rank outside of waits for others."""
        return time.process_time() - self.waits.cpu_seconds

    def serve(self, way: str, requests: list[Request]) -> tuple[dict[str, Any], Door]:
        """What it takes to serve these requests, and who heard what; on other ranks than 0 it means nothing."""
        most = 1 if way == ALONE else self.options.batch
        batcher = Batcher(
            self.held,
            self.comm,
            Numbers(self.vocabulary),
            self.context,
            max_batch=most,
            page_size=PAGE_SIZE,
            num_pages=most * pages_for(self.context, PAGE_SIZE),
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


def worker(options: argparse.Namespace) -> None:
    """Answer turns: the first one is to warm up, and nothing is measured in it."""
    shop = Shop(options, options.worker)
    warm = False
    beside = of_precision(shop) if options.precision else {}

    def work() -> dict[str, Any]:
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

    answer_turns(work, shop.comm)


def of_precision(shop: Shop) -> dict[str, Any]:
    """Bytes of the weights, and the loss of what the run was validated with, in nats a token and in bits a byte."""
    found: dict[str, Any] = {"bytes": sum(bytes_of(parameter) for parameter in shop.held.parameters())}
    return found if shop.trained is None else found | validation(shop, shop.trained)


@torch.no_grad()
def validation(shop: Shop, trained: Trained) -> dict[str, Any]:
    """By the model as it is, plainly: its logits of whole samples."""
    texts = open_texts(shop.comm, trained.config)
    data = texts.validation
    (model,) = shop.held.modules_of.values()
    losses = []
    for start in range(0, len(data), SAMPLES_AT_ONCE):
        samples = [data.read(number) for number in range(start, min(len(data), start + SAMPLES_AT_ONCE))]
        tokens = torch.stack([torch.from_numpy(sample.tokens.astype("int64")) for sample in samples])
        targets = torch.stack([torch.from_numpy(sample.targets.astype("int64")) for sample in samples])
        losses.append(F.cross_entropy(model(tokens).double().flatten(0, 1), targets.flatten(), reduction="none"))
    nats = float(torch.cat(losses).mean())
    return {"nats": nats, "bits_per_byte": texts.bits_per_byte(nats)}
