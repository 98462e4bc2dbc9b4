"""The cost of waiting: the latency of messages, the CPU time of a long wait, and two jobs that share the cores.

    python -m benchmarks run waiting --kilobytes 4,64,1024 --wait-seconds 10

    latency       there and back between two ranks: a wait that spins, then yields, then sleeps (ours), against one that
                  only spins, through the same calls; and against Isend, Irecv and Waitall of raw mpi4py
    long wait     CPU seconds of a rank whose neighbour sends after some seconds; also as with more ranks than cores
    side by side  steps a second of a job of two ranks that trains, alone and beside another one like it, on as many
                  cores as one of them asks for. Two jobs cannot have more than all cores: if one alone does not wait
                  for half of the time, each of two is slower than it by its share of work at least

All jobs have two ranks, and one thread each.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import options as declared
from benchmarks.common.charts import OTHERS, Bars, bars
from benchmarks.common.options import Option, Options
from benchmarks.common.report import publish
from benchmarks.common.results import Column, spread, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns
from mpi4dl.options.kinds import POSITIVE

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

RANKS = 2
MODEL, PIXELS = "resnet18", 256
WAYS = {"ours": "ours us", "spinning": "only spinning us", "raw": "raw mpi4py us"}
OPTIONS = (
    declared.counts("--kilobytes", "4,64,1024", "sizes of messages"),
    declared.count("--iterations", 200, "messages there and back in a turn"),
    Option("--wait-seconds", POSITIVE, 10.0, "length of the long wait"),
    Option("--train-seconds", POSITIVE, 5.0, "length of a turn of training"),
    declared.rounds(5),
)
QUICK = {"kilobytes": "1,4", "iterations": 3, "wait_seconds": 0.1, "train_seconds": 0.1, "rounds": 1}
COLUMNS = (
    Column("KiB there and back", "kilobytes"),
    *(Column(head, f"{name}_microseconds", 1) for name, head in WAYS.items()),
    Column("speed", "ratio", 2, ends=True),
)


def latency(options: Options, comm: "Communicator") -> dict[str, Any]:
    """Microseconds there and back, by kilobytes and by who waits how."""
    import torch
    from mpi4py import MPI

    from benchmarks.common.ranks import burst_seconds
    from mpi4dl.comm import node

    other, found = 1 - comm.rank, {}
    for kilobytes in options.kilobytes:
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


def long_wait(options: Options, comm: "Communicator") -> dict[str, Any]:
    """CPU seconds of the rank that waits."""
    import torch

    word, found = torch.zeros(1), {}
    for name, oversubscribed in (("cpu_seconds", False), ("oversubscribed_cpu_seconds", True)):
        comm.node.oversubscribed = oversubscribed
        comm.barrier()
        began = time.process_time()
        if comm.rank == 0:
            time.sleep(options.wait_seconds)
            comm.send(word, 1)
        else:
            comm.recv(word, 0)
        spent = torch.tensor(time.process_time() - began if comm.rank == 1 else 0.0, dtype=torch.float64)
        found[name] = float(comm.all_reduce(spent))
    return found


def trainer(options: Options, comm: "Communicator") -> Any:
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


def work(options: Options) -> None:
    from benchmarks.common.ranks import begin

    comm = begin(keep=None)
    if options.worker == "train":
        answer_turns(trainer(options, comm), comm)
    else:
        part = latency if options.worker == "latency" else long_wait
        answer_turns(lambda: part(options, comm), comm)


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


def run(options: Options) -> None:
    short, long = (options.contestant(name, RANKS, name) for name in ("latency", "long"))
    take_turns([short], options.rounds)
    take_turns([long], 1)
    pair = [options.contestant(f"job {i}", RANKS, "train") for i in range(2)]
    rows, more = summarise(options, short, long, side_by_side(pair, options.rounds))
    text = f"{table(rows, COLUMNS)}\n{in_words(more)}"
    panels = [Bars(f"{name}_microseconds", f"{head} there and back", digits=1) for name, head in WAYS.items()]
    figure = bars(rows, panels, "waiting", [OTHERS] * len(rows), [f"{row['kilobytes']} KiB" for row in rows])
    publish(options, "two ranks of one thread", text, figure, rows, **more)


def summarise(
    options: Options, short: Contestant, long: Contestant, rounds: Rounds
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """A row for each size; and the cost of the long wait, and a job's speed beside another."""
    rows = []
    for kilobytes in options.kilobytes:
        found = short.of(str(kilobytes))
        row: dict[str, Any] = {"kilobytes": kilobytes}
        for name in WAYS:
            row |= spread(f"{name}_microseconds", [answer[name] for answer in found])
        rows.append(row | spread("ratio", [answer["spinning"] / answer["ours"] for answer in found]))
    return rows, {
        "long_wait": {"seconds": options.wait_seconds, **long.answers[0]},
        "side_by_side": {
            **spread("alone_steps_per_second", rounds.alone),
            **spread("beside_steps_per_second", rounds.beside),
            "most": min(1.0, 1 / (2 * median(rounds.working))),
            **spread("ratio", [b / a for a, b in zip(rounds.alone, rounds.beside, strict=True)]),
        },
    }


def in_words(more: dict[str, dict[str, Any]]) -> str:
    long, side = more["long_wait"], more["side_by_side"]
    return (
        f"a wait of {long['seconds']:g} s costs {long['cpu_seconds']:.2f} CPU seconds, "
        f"and {long['oversubscribed_cpu_seconds']:.2f} with more ranks than cores\n"
        f"{MODEL} at {PIXELS} px: {side['alone_steps_per_second']:.2f} steps/s alone, "
        f"{side['beside_steps_per_second']:.2f} beside another job of as many ranks: {side['ratio']:.2f} "
        f"({side['ratio_min']:.2f}-{side['ratio_max']:.2f}); as it works, {side['most']:.2f} is the most"
    )
