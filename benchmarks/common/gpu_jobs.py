"""What the ranks of each job of `benchmarks.gpu` do; rank 0 prints a line of JSON for each finding."""

import gc
import importlib
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import ranks
from benchmarks.common.meter import Meter
from benchmarks.common.models import Waves
from benchmarks.common.results import MIB
from benchmarks.generate import numbers
from benchmarks.torchvision_models import worst_difference
from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.engine.recompute import recompute_blocks
from mpi4dl.parallel import spatial
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import EACH_NORM, StreamOptions
from tests.parallel.spatial.comparing import Arrangement, compare_table
from tests.support import short_runs
from tests.support.short_runs import Task

PACKAGES = ("torchvision", "mpi4py", "numpy", "triton", "transformers")
MEMORY_SHARE = 0.95  # of a card, for the ranks that share it
WARM_UP, STEPS = 2, 5
NOT_COMPARABLE = "Expected all tensors to be on the same device"  # of plain PyTorch: a case with values on the host
CALLS = ("Launch", "Memcpy", "Synchronize", "EventQuery", "Malloc", "HostAlloc")
GPT2 = {"vocabulary": 50257, "context": 1024, "num_layers": 12, "hidden": 768, "num_heads": 12}
TINY = {"vocabulary": 300, "context": 64, "num_layers": 2, "hidden": 64, "num_heads": 4}
TINY_MODELS = {
    "small_resnet": {"num_filters": 8},
    "vit": {"patch": 4, "num_layers": 2, "hidden": 48, "num_heads": 3},
}
LARGE_MODELS = {
    "amoebanetd": {"num_layers": 18, "num_filters": 208},
    "vit": {"patch": 8, "num_layers": 6, "hidden": 512, "num_heads": 8},
}


@dataclass(frozen=True)
class Card:
    """The device of this job's ranks. `tiny`: it stands for a card, and all is small."""

    comm: Communicator
    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, cpu: bool, wire: str) -> "Card":
        comm = ranks.begin(None, None)
        device = comm.node.device("cpu" if cpu else "cuda")
        if not cpu:
            comm.choose_gpu_wire(wire)
            sharers = -(-comm.node.local_size // torch.cuda.device_count())
            torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE / sharers, device)
        return cls(comm, device, cpu)

    def tell(self, **finding: Any) -> None:
        if self.comm.rank == 0:
            print(json.dumps({"ranks": self.comm.size, **finding}), flush=True)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call, and of all that it starts on the device."""
        began = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def measured(self, meter: Meter, step: Callable[[], Any], num_steps: int = STEPS) -> dict[str, float]:
        """Seconds of a step, and MiB of the rank that needs most, above what it had before its model. Collective."""
        found = meter.measure(step, num_steps)
        return {"seconds": found["seconds"] / num_steps, "mebibytes": found["peak_bytes"] / MIB}


def environment(card: Card) -> None:
    """The card, the driver, versions, and how fast host and card copy to each other."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if card.device.type == "cuda":
        properties = torch.cuda.get_device_properties(card.device)
        query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        found |= {"card": properties.name, "GiB": round(properties.total_memory / 2**30, 1), "driver": driver[:1]}
        found |= {"cudnn": torch.backends.cudnn.version(), "cudnn_tf32": torch.backends.cudnn.allow_tf32}
        found |= copy_rates(card)
    card.tell(**found)


def copy_rates(card: Card) -> dict[str, float]:
    """GB/s of a GiB, each way, from memory that is pinned or pageable."""
    there, rates = torch.empty(1 << 30, dtype=torch.uint8, device=card.device), {}
    for kind in ("pinned", "pageable"):
        here = torch.ones(1 << 30, dtype=torch.uint8, pin_memory=kind == "pinned")
        to_card, to_host = partial(there.copy_, here, non_blocking=True), partial(here.copy_, there)
        for way, call in (("to the card", to_card), ("to the host", to_host)):
            card.seconds(call)
            rates[f"{kind} {way}, GB/s"] = round((1 << 30) / card.seconds(call) / 1e9, 1)
    return rates


@contextmanager
def constants_on(device: torch.device, module: Any) -> Iterator[None]:
    """Within this context the tensors of a module of tests lie on the device."""
    before = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    try:
        vars(module).update({name: value.to(device) for name, value in before.items()})
        yield
    finally:
        vars(module).update(before)


def rules(card: Card, tables: Sequence[str], turn: int | None = None) -> None:
    """Tables of cases of the tests: values and gradients on two tiles against plain PyTorch, in float64.

    Without names it is all that the tests try on the fake device. `turn`: every second case, from this one on.
    """
    from tests.fakegpu.test_rules import TABLES

    for name in tables or TABLES:
        place, _, table = name.partition(".")
        module = importlib.import_module(f"tests.parallel.spatial.{place}")
        arrangement = Arrangement(1, card.comm.size, turn=turn)
        with constants_on(card.device, module):
            own = compare_table(card.comm, module.__name__, table, arrangement, card.device)
        every = {case: text for found in card.comm.all_gather_object(own) for case, text in found.items()}
        wrong = {case: text for case, text in every.items() if NOT_COMPARABLE not in text}
        left_out = len(every) - len(wrong)
        card.tell(table=name, num_wrong=len(wrong), left_out=left_out, wrong={c: t[-300:] for c, t in wrong.items()})


def types(card: Card) -> None:
    """Operators of the tests on a grid of one tile: types and values as of plain PyTorch, in each kind of autocast."""
    from tests.parallel.spatial import test_autocast

    grid, wrong = spatial.Grid(card.comm), {}
    with constants_on(card.device, test_autocast), card.device:
        for lowered in (None, torch.bfloat16, torch.float16):
            for name, call in test_autocast.FUNCTIONS.items():
                with torch.autocast(card.device.type, lowered, enabled=lowered is not None):
                    problem = differs(call, grid, 1e-5 if lowered is None else 0.03)
                if problem:
                    wrong[f"{name}, {lowered or 'without autocast'}"] = problem
    card.tell(operators=len(test_autocast.FUNCTIONS), num_wrong=len(wrong), wrong=wrong)


def differs(call: Callable[[Any], Any], grid: spatial.Grid, tolerance: float) -> str:
    """What a function of an image does otherwise on tiles than plain PyTorch; nothing if it does the same."""
    torch.manual_seed(1)
    image = torch.rand(2, 4, 6, 8) + 0.25
    inputs = [image.clone().requires_grad_() for _ in range(2)]
    try:
        plain, ours = call(inputs[0]), call(spatial.shard(inputs[1], grid))
        plain, ours = (value[0] if isinstance(value, tuple) else value for value in (plain, ours))
        ours = spatial.gather(ours)
        weight = torch.randn(plain.shape)
        for value in (plain, ours):
            (value.float() * weight).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    if ours.dtype != plain.dtype:
        return f"{ours.dtype}, but plain {plain.dtype}"
    pairs = {"value": (ours, plain), "gradient": (inputs[1].grad, inputs[0].grad)}
    off = [what for what, pair in pairs.items() if not torch.allclose(*map(Tensor.float, pair), tolerance, tolerance)]
    return f"other {' and '.join(off)}" if off else ""


TASKS = {
    "small_resnet": Task("small_resnet", (96, 96), model_options=(("num_filters", 8),)),
    "unet": Task("unet", (96, 96), dense=True, model_options=(("num_filters", 8), ("depth", 2))),
    "resnet50": Task("resnet50", (96, 96), optimizer="slow SGD"),
    "amoebanetd": Task(
        "amoebanetd", (64, 64), optimizer="slow SGD", model_options=(("num_layers", 3), ("num_filters", 24))
    ),
    "vit": Task(
        "vit",
        (64, 64),
        model_options=(("image_size", 64), ("patch", 8), ("num_layers", 3), ("hidden", 96), ("num_heads", 3)),
    ),
}
PLANS = {
    1: {"1x1": Plan()},
    2: {
        "1x2": Plan(((1, 2),)),
        "2x1": Plan(((2, 1),)),
        "data": Plan(data=2),
        "ZeRO 3": Plan(((1, 2),), zero=3),
        "stages": Plan(((1, 1), (1, 1))),
    },
    4: {"2x2": Plan(((2, 2),)), "2x2, ZeRO 1": Plan(((2, 2),), zero=1)},
}
ARITHMETIC = {"float64": torch.float64, "float32": torch.float32, "TF32": torch.float32}


def exact(card: Card, model: str, arithmetic: Sequence[str]) -> None:
    """A model by each plan after three steps, and plain PyTorch on the card: both against plain PyTorch on the CPU.

    The reference is in float64. Where both are as far from it, ours rounds no more than plain PyTorch does.
    """
    task = TASKS[model]
    truth = plain_steps(replace(task, device="cpu")) if card.comm.rank == 0 else {}
    for name in arithmetic:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
        own = replace(task, device=str(card.device), dtype=ARITHMETIC[name])
        beside = {}
        if card.comm.rank == 0:
            plain = plain_steps(own)
            again = plain_steps(own)
            beside["plain_error"] = worst_difference(plain, truth)[0]
            beside["plain_same_bits"] = all(torch.equal(plain[key], again[key]) for key in plain)
        for label, plan in PLANS[card.comm.size].items():
            found = steps_by(card.comm, own, plan)
            error, where = worst_difference(found, truth) if card.comm.rank == 0 else (math.inf, "")
            card.tell(model=model, plan=label, arithmetic=name, error=error, where=where, **beside)


def plain_steps(task: Task) -> dict[str, Tensor]:
    """All values and gradients after the task's steps by plain PyTorch on its device, in float64 on the host."""
    model, optimizer = short_runs.build(task)
    for number in range(task.num_steps):
        images, targets = short_runs.batch_of(task, number)
        ranks.loop(model, optimizer, (images.to(task.device), targets.to(task.device)), loss_of=task.loss)()
    return on_host(model.state_dict(), short_runs.gradients_of([model]))


def steps_by(comm: Communicator, task: Task, plan: Plan) -> dict[str, Tensor]:
    """The same by a plan; only rank 0 has them. Collective."""
    engine = short_runs.engine_of(comm, task, plan)
    for number in range(task.num_steps):
        short_runs.step(engine, task, number)
    engine.check_replicas()
    state, gradients = engine.gather_state(), engine.gather_gradients()
    return on_host(state or {}, gradients or {})


def on_host(state: dict[str, Tensor], gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
    values = {**state, **{f"gradient of {name}": g for name, g in gradients.items() if g is not None}}
    return {name: value.detach().double().cpu() for name, value in values.items()}


def step_by(card: Card, name: str, size: int, how: str, precision: str) -> Callable[[], Any]:
    """A training step of one image.

    "plain" and "recompute" are plain PyTorch, "rules" are those of tiles on a grid of one. "engine", "gather" and
    "ring" are on a tile of each rank; "stream NORMS PLACE" streams.
    """
    torch.manual_seed(0)
    if how.startswith("stream"):
        return streamed_step(card, name, size, *how.split()[1:])
    options = (TINY_MODELS if card.tiny else LARGE_MODELS).get(name, {})
    options |= {"image_size": size} if name == "vit" else {}
    model, targets = models.build(name, 10, **options).to(card.device), torch.zeros(1, dtype=torch.int64)
    if how in ("engine", "gather", "ring"):
        return engine_step(card, model, size, precision, "auto" if how == "engine" else how)
    if how == "recompute":
        recompute_blocks(model)
    grid = spatial.Grid(card.comm)
    image = torch.randn(1, 3, size, size, pin_memory=not card.tiny)

    def forward(image: Tensor) -> Tensor:
        x = image.to(card.device, non_blocking=True)
        with torch.autocast(card.device.type, torch.bfloat16, enabled=precision == "bf16"):
            outputs = spatial.gather(model(spatial.shard(x, grid))) if how == "rules" else model(x)
        return outputs.float()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    return ranks.loop(forward, optimizer, (image, targets), loss_of=lambda y, t: F.cross_entropy(y, t.to(card.device)))


def engine_step(card: Card, model: nn.Module, size: int, precision: str, attention: str) -> Callable[[], Any]:
    """The step by the engine, on tiles that lie beside each other on the ranks."""
    plan = Plan(((1, card.comm.size),)) if card.comm.size > 1 else Plan()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=card.comm, precision=precision)
    for part in engine.stages.parts.values():
        part.grid.attention = attention
    (read,) = engine.reads(1, (size, size))
    tile = torch.randn(1, 3, *(interval.length for interval in read.box.space))
    return lambda: engine.step([tile], torch.zeros(1, dtype=torch.int64), (size, size))


def steps(card: Card, model: str, how: str, sizes: Sequence[int], precisions: Sequence[str]) -> None:
    """Seconds and memory of a training step, from the smallest image on, until the card's memory is full."""
    for precision in precisions:
        for size in sizes:
            what = {"model": model, "how": how, "precision": precision, "size": size, "wire": card.comm.gpu_wire}
            meter = Meter(card.device, card.comm)
            try:
                step = step_by(card, model, size, how, precision)
                for _ in range(WARM_UP):
                    step()
                card.tell(**what, **card.measured(meter, step))
            except torch.OutOfMemoryError:
                card.tell(**what, out_of_memory=True)
                if card.comm.size > 1:  # the others wait
                    raise
                break
            step = None
            gc.collect()
            torch.cuda.empty_cache()


def profile(card: Card, model: str, how: str, size: int) -> None:
    """Launches, copies and waits of a step, and the milliseconds of its kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    step = step_by(card, model, size, how, "fp32")
    for _ in range(WARM_UP + 1):
        step()
    with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 if card.tiny else 2]) as found:
        seconds = card.seconds(step)
    events = found.key_averages()
    counts = {kind: sum(e.count for e in events if e.key.startswith("cu") and kind in e.key) for kind in CALLS}
    kernels = sum(e.self_device_time_total for e in events if str(e.device_type).endswith("CUDA")) / 1e3
    operators = sum(e.count for e in events if e.key.startswith("aten::"))
    card.tell(model=model, how=how, size=size, seconds=seconds, kernel_ms=kernels, operators=operators, **counts)


def streamed_step(card: Card, name: str, size: int, norms: str, where: str) -> Callable[[], Any]:
    """The step by the engine, of an image whose tiles go through the model one after another."""
    side, plan = (32 if card.tiny else 2048), Plan(((1, card.comm.size),))
    counts = (max(1, size // side), max(1, size // side // card.comm.size))
    options = StreamOptions(counts, None, norms, 1 if norms == "running" else EACH_NORM, Keep(where))
    images, build = Waves(torch.Size((1, 3, size, size))), partial(models.build, name, 10)
    shape = tuple(images.shape)
    held = split(build, plan, card.comm, image=shape, device=card.device, balance="flops", stream=options)
    optimizer = torch.optim.SGD(held.parameters(), lr=0.001)
    engine = Engine(held, plan, optimizer, F.cross_entropy, comm=card.comm, precision="bf16")
    return partial(engine.step, [images], torch.zeros(1, dtype=torch.int64), (size, size))


def generate(card: Card, precision: str, counts: Sequence[int]) -> None:
    """Tokens a second of texts that are written at once, and whether the first one is what it is alone, to the bit."""
    from mpi4dl.text.batcher import Batcher
    from mpi4dl.text.loading import lower_weights
    from mpi4dl.text.options import Sampling

    torch.manual_seed(0)
    shape, length = (TINY, 5) if card.tiny else (GPT2, 64)
    vocabulary, plan = shape["vocabulary"], Plan(((1,),), tensor=card.comm.size)
    model = models.build("gpt", **shape).to(card.device)
    held = LocalStages.whole(model, plan, card.comm).requires_grad_(False)
    with torch.no_grad():
        lower_weights(held, precision)
    heard: dict[int, list[Any]] = {}
    for count in counts:
        batcher = Batcher(held, card.comm, numbers(vocabulary), shape["context"], max_batch=count)
        heard[count] = []
        for i in range(count) if card.comm.rank == 0 else ():
            hear = heard[count].append if i == 0 else lambda event: None
            prompt = [(7 * i + 3 * j) % vocabulary for j in range(length)]
            batcher.submit(prompt, Sampling(max_tokens=length, temperature=0), hear)
        batcher.stop()
        seconds = card.seconds(batcher.run if card.comm.rank == 0 else batcher.follow)
        batcher.close()
        alone, mine = ([(e.token, e.logprob) for e in heard[n]] for n in (counts[0], count))
        same = {"same_tokens": [t for t, _ in mine] == [t for t, _ in alone], "same_bits": mine == alone}
        card.tell(precision=precision, texts=count, tokens_per_second=count * length / seconds, **same)


def transformers(card: Card, counts: Sequence[int]) -> None:
    """The same by Hugging Face transformers, where it is installed."""
    if find_spec("transformers") is None:
        card.tell(left_out="transformers is not installed")
        return
    from transformers import GPT2Config, GPT2LMHeadModel

    shape, length = (TINY, 5) if card.tiny else (GPT2, 64)
    names = dict(zip(shape, ("vocab_size", "n_positions", "n_layer", "n_embd", "n_head"), strict=True))
    config = GPT2Config(**{names[key]: value for key, value in shape.items()}, bos_token_id=0, eos_token_id=None)
    model = GPT2LMHeadModel(config).to(card.device).eval()
    settings = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for count in counts:
            tokens = torch.randint(300, (count, length), device=card.device)
            call = partial(model.to(dtype).generate, tokens, **settings)
            call()
            card.tell(precision=precision, texts=count, tokens_per_second=count * length / card.seconds(call))


def offload(card: Card, where: str, zero: int) -> None:
    """Steps of replicas whose optimizer's state lies elsewhere, against plain PyTorch; and seconds of a step."""
    task = replace(TASKS["small_resnet"], optimizer="smooth AdamW", device=str(card.device))
    plan, own = Plan(data=card.comm.size, zero=zero), task.with_engine(offload=where)
    truth = plain_steps(replace(task, device="cpu")) if card.comm.rank == 0 else {}
    found = steps_by(card.comm, own, plan)
    error = worst_difference(found, truth)[0] if card.comm.rank == 0 else math.inf
    model = "small_resnet" if card.tiny else "resnet50"
    timed = replace(own, model=model, model_options=() if model == "resnet50" else task.model_options)
    meter = Meter(card.device, card.comm)
    engine = short_runs.engine_of(card.comm, timed, plan)
    step = partial(short_runs.step, engine, timed, 0)
    step()
    card.tell(offload=where, zero=zero, error=error, **card.measured(meter, step))


def resume(card: Card) -> None:
    """A run that is saved after two steps and goes on from there, against one that is not: the same bits?"""
    task = replace(TASKS["small_resnet"], device=str(card.device), optimizer="AdamW")
    plan = Plan(((1, card.comm.size),))
    folder = Path(card.comm.broadcast_object(tempfile.mkdtemp() if card.comm.rank == 0 else None))
    whole = short_runs.go_on(card.comm, task, plan, folder / "whole", 4)
    short_runs.go_on(card.comm, task, plan, folder / "parts", 2)
    parts = short_runs.go_on(card.comm, task, plan, folder / "parts", 4)
    if card.comm.rank == 0:
        found = [on_host(outcome.state, outcome.gradients) for outcome in (parts, whole)]
        same = all(torch.equal(found[0][name], found[1][name]) for name in found[1])
        card.tell(same_bits=same, error=worst_difference(*found)[0])


JOBS = (
    environment,
    rules,
    types,
    exact,
    steps,
    profile,
    generate,
    transformers,
    offload,
    resume,
)


def work(cpu: bool, wire: str, name: str, settings: dict[str, Any]) -> None:
    """Do a job. Collective."""
    (job,) = (each for each in JOBS if each.__name__ == name)
    job(Card.of(cpu, wire), **settings)
