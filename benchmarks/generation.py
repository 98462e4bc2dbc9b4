"""Generation: tokens per second of requests one after another, and of several at once, whose tokens are compared.

    python -m benchmarks.generation --concurrent 1,8
    mpirun -n 2 python -m benchmarks.generation --concurrent 1,8 --tensor 2

The model is that of examples/gpt.toml, of 10.8 million parameters, with random weights. Requests have prompts of 8 to
64 tokens; as soon as one ends the next one joins. Turns alternate, and the median of each is what counts: per second,
and per second that rank 0 had a core, where other programs use the machine too. What is compared are tokens and, to the
bit, their log-probabilities.
"""

import argparse
import json
import random
import statistics
import sys
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator
    from mpi4dl.parallel.pipeline.held import Held

VOCABULARY, CONTEXT, SHORTEST, LONGEST = 2048, 256, 8, 64


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--concurrent", default="1,8", help="how many requests run at once, in each contestant")
    parser.add_argument("--requests", type=int, default=16, help="of each turn")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each request")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "int8", "int4"))
    for name in ("stages", "tensor", "data"):
        parser.add_argument(f"--{name}", type=int, default=1)
    return parser.parse_args(argv)


def turn(
    comm: "Communicator", held: "Held", options: argparse.Namespace, concurrent: int
) -> tuple[float, float, list[list[tuple[int | None, float | None]]]]:
    """Tokens per second, and per second that this rank had a core; and what each request got."""
    from mpi4dl.datasets.text import ByteTokenizer
    from mpi4dl.generation.batcher import Batcher
    from mpi4dl.generation.requests import Event, Sampling

    class Numbers(ByteTokenizer):
        vocabulary, end = VOCABULARY, VOCABULARY - 1

        def decode(self, tokens: Any) -> str:
            return "".join(f"{token} " for token in tokens)

    batcher = Batcher(held, comm, Numbers(), CONTEXT, max_batch=concurrent)
    draw = random.Random(0)
    prompts = [[draw.randrange(VOCABULARY - 1) for _ in range(draw.randint(SHORTEST, LONGEST))] for _ in range(99)]
    got: list[list[Event]] = [[] for _ in range(options.requests)]
    began, began_cpu = time.perf_counter(), time.process_time()
    if comm.rank == 0:
        for prompt, heard in zip(prompts, got, strict=False):
            batcher.submit(prompt, Sampling(max_tokens=options.tokens, temperature=0), heard.append)
        batcher.stop(drain=True)
        batcher.run()
    else:
        batcher.follow()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    batcher.close()
    count = sum(map(len, got))
    return count / seconds, count / cpu_seconds, [[(event.token, event.logprob) for event in heard] for heard in got]


def over_first(name: str, speeds: dict[int, list[float]], number: int) -> dict[str, Any]:
    """The median and the range of a contestant, and how many times that of the first one it is."""
    median, first = (statistics.median(speeds[each]) for each in (number, next(iter(speeds))))
    found = [round(speed, 1) for speed in (median, min(speeds[number]), max(speeds[number]))]
    return {name: found[0], f"{name}_range": found[1:], f"{name}_times": round(median / first, 2)}


def main(argv: list[str]) -> None:
    options = parse(argv)
    import torch

    from mpi4dl.comm import world
    from mpi4dl.generation.precision import lower_weights
    from mpi4dl.models.gpt import GPT
    from mpi4dl.parallel.pipeline.held import Held, split
    from mpi4dl.parallel.plan import Plan

    comm = world()
    torch.set_num_threads(options.threads)
    plan = Plan.of(stages=options.stages, tiles=((1,),), tensor=options.tensor, data=options.data)
    torch.manual_seed(0)
    if plan.num_stages == 1:
        held = Held.whole(GPT(VOCABULARY, CONTEXT), plan, comm)
    else:
        held = split(lambda: GPT(VOCABULARY, CONTEXT), plan, comm, image=(1, CONTEXT))
    lower_weights(held.requires_grad_(False), options.precision)
    numbers = [int(number) for number in options.concurrent.split(",")]
    speeds: dict[int, list[float]] = {number: [] for number in numbers}
    of_core: dict[int, list[float]] = {number: [] for number in numbers}
    heard: dict[int, Any] = {}
    for _ in range(options.rounds):
        for number in numbers:
            speed, on_core, heard[number] = turn(comm, held, options, number)
            speeds[number].append(speed)
            of_core[number].append(on_core)
    if comm.rank:
        return
    for number in numbers:
        pairs = zip(chain.from_iterable(heard[numbers[0]]), chain.from_iterable(heard[number]), strict=True)
        same = [(one[0] == other[0], one == other) for one, other in pairs]
        record = {
            "plan": str(plan),
            "precision": options.precision,
            "concurrent": number,
            **over_first("tokens_per_second", speeds, number),
            **over_first("tokens_per_core_second", of_core, number),
            "same_tokens": sum(token for token, _ in same) / len(same),
            "same_bits": sum(bits for _, bits in same) / len(same),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
