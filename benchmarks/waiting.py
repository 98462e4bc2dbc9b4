"""What waiting costs: the latency of messages, the CPU time of a long wait, and two jobs that share the cores.

    python -m benchmarks.waiting --kilobytes 4,64,1024 --wait-seconds 10

    latency       there and back between two ranks: a wait that spins, then yields, then sleeps (ours), against one that
                  only spins, through the same calls; and against Isend, Irecv and Waitall of raw mpi4py
    long wait     CPU seconds of a rank whose neighbour sends after some seconds
    side by side  steps a second of a job of two ranks that trains, alone and beside another one like it, on as many
                  cores as one of them asks for. Two jobs cannot have more than all cores: if one alone does not wait
                  for half of the time, each of two is slower than it by its share of work at least

All jobs have two ranks, and one thread each.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.bursts import burst_seconds
from benchmarks.report import between, publish, pyplot, spread, table
from benchmarks.turns import Contestant, answer_turns, median, numbers, take_turns

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

RANKS = 2
MODEL, PIXELS = "resnet18", 256


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kilobytes", default="4,64,1024", help="sizes of messages")
    parser.add_argument("--iterations", type=int, default=200, help="messages there and back in a turn")
    parser.add_argument("--wait-seconds", type=float, default=10.0, help="how long the long wait is")
    parser.add_argument("--train-seconds", type=float, default=5.0, help="how long a turn of training is")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--out", type=Path, default=Path("results/waiting"), help="where to write .json and .png")
    parser.add_argument("--worker", choices=("latency", "long", "train"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("iterations", "wait_seconds", "train_seconds", "rounds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be positive")
    try:
        sizes = numbers(options.kilobytes)
    except ValueError:
        parser.error(f"--kilobytes {options.kilobytes}: write them as 4,64,1024")
    if min(sizes) < 1:
        parser.error(f"--kilobytes {options.kilobytes}: messages have at least one kilobyte")
    return options


def latency(options: argparse.Namespace, comm: "Communicator") -> dict[str, Any]:
    """Microseconds there and back, by kilobytes and by who waits how."""
    import torch
    from mpi4py import MPI

    from mpi4dl.comm import node

    other, found = 1 - comm.rank, {}
    for kilobytes in numbers(options.kilobytes):
        out, into = torch.ones(kilobytes << 8), torch.empty(kilobytes << 8)
        buffers = [[MPI.memory.fromaddress(x.data_ptr(), x.nbytes), MPI.BYTE] for x in (out, into)]

        def ours(out: "torch.Tensor" = out, into: "torch.Tensor" = into) -> None:
            for sends in (comm.rank == 0, comm.rank == 1):
                if sends:
                    comm.send(out, other)
                else:
                    comm.recv(into, other)

        def raw(buffers: Any = buffers) -> None:
            for sends in (comm.rank == 0, comm.rank == 1):
                request = comm.mpi.Isend(buffers[0], other) if sends else comm.mpi.Irecv(buffers[1], other)
                MPI.Request.Waitall([request])

        def spinning(ours: Any = ours) -> None:
            ours()

        answer = {}
        for name, step in (("ours", ours), ("spinning", spinning), ("raw", raw)):
            patience = node.SPIN_SECONDS, node.YIELD_SECONDS
            if name == "spinning":
                node.SPIN_SECONDS = node.YIELD_SECONDS = float("inf")
            answer[name] = 1e6 * burst_seconds(comm, step, options.iterations, torch.device("cpu"))
            node.SPIN_SECONDS, node.YIELD_SECONDS = patience
        found[str(kilobytes)] = answer
    return found


def long_wait(options: argparse.Namespace, comm: "Communicator") -> dict[str, Any]:
    """CPU seconds of the rank that waits."""
    import torch

    word = torch.zeros(1)
    comm.barrier()
    began = time.process_time()
    if comm.rank == 0:
        time.sleep(options.wait_seconds)
        comm.send(word, 1)
    else:
        comm.recv(word, 0)
    spent = torch.tensor(time.process_time() - began if comm.rank == 1 else 0.0, dtype=torch.float64)
    return {"cpu_seconds": float(comm.all_reduce(spent))}


def trainer(options: argparse.Namespace, comm: "Communicator") -> Any:
    """Steps a second, for as long as `--train-seconds`."""
    import torch
    from torch.nn import functional as F

    from mpi4dl.engine import Engine
    from mpi4dl.models import registry
    from mpi4dl.parallel.plan import Plan

    torch.manual_seed(0)
    model, plan = registry.build(MODEL, num_classes=4), Plan(((1, RANKS),))
    engine = Engine(model, plan, torch.optim.SGD(model.parameters(), lr=0.01), F.cross_entropy, comm=comm)
    tile, label = torch.randn(1, 3, PIXELS, PIXELS // RANKS), torch.tensor([1])

    def turn() -> dict[str, Any]:
        waited = comm.node.wait_seconds
        began, steps = time.perf_counter(), 0
        ends = torch.zeros(())
        while not ends:
            engine.step([tile], label, (PIXELS, PIXELS))
            steps += 1
            # All ranks make as many steps.
            ends = comm.all_reduce(torch.tensor(float(time.perf_counter() - began > options.train_seconds)), "max")
        seconds = time.perf_counter() - began
        working = torch.tensor(1 - (comm.node.wait_seconds - waited) / seconds, dtype=torch.float64)
        return {"steps_per_second": steps / seconds, "working": float(comm.all_reduce(working)) / comm.size}

    return turn


def worker(options: argparse.Namespace) -> None:
    import torch

    from mpi4dl.comm import world

    comm = world()
    torch.set_num_threads(1)
    if options.worker == "train":
        answer_turns(trainer(options, comm), comm)
        return
    work = latency if options.worker == "latency" else long_wait
    answer_turns(lambda: work(options, comm), comm)


class Rounds(NamedTuple):
    """In each round: steps a second of one job alone, and of the slower of two; which share of its time one works."""

    alone: list[float]
    beside: list[float]
    working: list[float]


def side_by_side(pair: list[Contestant], num_rounds: int) -> Rounds:
    rounds = Rounds([], [], [])
    with ThreadPoolExecutor(len(pair)) as pool:
        try:
            for contestant in pair:
                contestant.start()
            for number in range(num_rounds + 1):
                single = pair[0].turn()
                both = [answer["steps_per_second"] for answer in pool.map(Contestant.turn, pair)]
                if number:  # the first is to warm up
                    rounds.alone.append(single["steps_per_second"])
                    rounds.beside.append(min(both))
                    rounds.working.append(single["working"])
        finally:
            for contestant in pair:
                contestant.stop()
    return rounds


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    arguments = ["-m", "benchmarks.waiting", *sys.argv[1:], "--worker"]
    short, long = (Contestant(name, RANKS, [*arguments, name]) for name in ("latency", "long"))
    take_turns([short], options.rounds)
    take_turns([long], 1)
    pair = [Contestant(f"job {i}", RANKS, [*arguments, "train"]) for i in range(2)]
    results = summarise(options, short, long, side_by_side(pair, options.rounds))
    for lines in as_tables(results):
        print(f"\n{lines}")
    publish(options, results, draw(results))


def summarise(options: argparse.Namespace, short: Contestant, long: Contestant, rounds: Rounds) -> dict[str, Any]:
    """A row for each size, what the long wait cost, and what is left of a job's speed beside another."""
    rows = []
    for kilobytes in numbers(options.kilobytes):
        of_size = [answer[str(kilobytes)] for answer in short.answers]
        row: dict[str, Any] = {"kilobytes": kilobytes}
        for name in ("ours", "spinning", "raw"):
            row[f"{name}_microseconds"] = median([answer[name] for answer in of_size])
        rows.append(row | spread("ratio", [answer["spinning"] / answer["ours"] for answer in of_size]))
    return {
        "latency": rows,
        "long_wait": {"seconds": options.wait_seconds, "cpu_seconds": long.answers[0]["cpu_seconds"]},
        "side_by_side": {
            "alone_steps_per_second": median(rounds.alone),
            "beside_steps_per_second": median(rounds.beside),
            "most": min(1.0, 1 / (2 * median(rounds.working))),
            **spread("ratio", [b / a for a, b in zip(rounds.alone, rounds.beside, strict=True)]),
        },
    }


def as_tables(results: dict[str, Any]) -> list[str]:
    head = ["there and back", "ours us", "only spinning us", "raw mpi4py us", "speed", "(min-max)"]
    rows = [head] + [
        [
            f"{row['kilobytes']} KiB",
            *(f"{row[f'{name}_microseconds']:.1f}" for name in ("ours", "spinning", "raw")),
            f"{row['ratio']:.2f}",
            between(row, "ratio"),
        ]
        for row in results["latency"]
    ]
    long, side = results["long_wait"], results["side_by_side"]
    return [
        table(rows),
        f"a wait of {long['seconds']:g} s costs {long['cpu_seconds']:.2f} CPU seconds",
        f"{MODEL} at {PIXELS} px: {side['alone_steps_per_second']:.2f} steps/s alone, "
        f"{side['beside_steps_per_second']:.2f} beside another job of as many ranks: {side['ratio']:.2f} "
        f"{between(side, 'ratio')}; as it works, {side['most']:.2f} is the most",
    ]


def draw(results: dict[str, Any]) -> Any:
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.6), width_ratios=(3, 1))
    rows = results["latency"]
    names = {"ours": "spins, yields, sleeps", "spinning": "only spins", "raw": "raw mpi4py"}
    for i, (name, label) in enumerate(names.items()):
        places = [place + 0.25 * (i - 1) for place in range(len(rows))]
        left.bar(places, [row[f"{name}_microseconds"] for row in rows], 0.25, label=label)
    left.set_xticks(range(len(rows)), [f"{row['kilobytes']} KiB" for row in rows])
    left.set_yscale("log")
    left.set_ylim(bottom=1)
    left.set_ylabel("microseconds there and back")
    left.legend(frameon=False)
    side = results["side_by_side"]
    right.bar(["alone", "beside\nanother"], [side["alone_steps_per_second"], side["beside_steps_per_second"]], 0.6)
    right.set_ylabel(f"{MODEL}: steps a second of a job")
    return figure


if __name__ == "__main__":
    main()
