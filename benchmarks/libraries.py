"""One process of ours beside the libraries that users would take: the same text, training steps and pixels.

    python -m benchmarks run libraries --tasks generate,patches,read

    generate    greedy text of GPT-2 and Llama, random weights      transformers' generate
    patches     a step on a slide's patches of 64 px, 16 at once,   a loop with torch.utils.checkpoint
                under gated attention
    read        boxes of tiled TIFF and of SVS, small pictures      tifffile, OpenSlide, Pillow

Each contestant is a process of one thread, and they take turns. CPU seconds are those of the process and of its
children that have ended; for us OpenSlide opens SVS in a child, and tiles are read in the process. Memory is the peak,
loading included, above that of the imports, with the pages of files.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import options as declared
from benchmarks.common.charts import OTHERS, Bars, bars
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import NAME, publish
from benchmarks.common.results import MIB, Column, table
from benchmarks.common.turns import answer_turns, take_turns
from mpi4dl.options.kinds import choice

OURS = "mpi4dl"
PROMPT, NEW = 100, 200  # tokens
SIDE, TILE, AT_ONCE = 6144, 256, 16
MODELS = {"gpt2": (768, 12), "gpt2-small": (384, 6), "llama": (512, 8)}  # width and layers
CASES: dict[str, tuple[str, dict[str, tuple[str, int]]]] = {
    "generate": (
        "transformers",
        {f"{model}, {streams} at once": (model, streams) for model in MODELS for streams in (1, 8)},
    ),
    "patches": ("checkpointed loop", {"ViT of 6 x 192": ("vit", 0), "ResNet-18, group norm": ("resnet", 0)}),
    "read": (
        "the library alone",
        {
            **{
                f"{kind}, {side} px": (kind, side) for kind in ("jpeg", "deflate", "raw", "svs") for side in (224, 1024)
            },
            **{f"{kind}, 64 px": (kind, 64) for kind in ("png", "jpg")},
        },
    ),
}
OPTIONS = (
    Option("--tasks", listed(choice(*CASES)), ",".join(CASES), f"of {', '.join(CASES)}"),
    declared.count("--side", 1024, "of the image of patches, in pixels"),
    declared.rounds(5),
)
QUICK = {"tasks": "patches", "side": 128, "rounds": 1}
COLUMNS = (
    NAME,
    Column("CPU s", "cpu_seconds", 2),
    Column("over the other", "cpu_ratio", 2, ends=True),
    Column("wall", "wall_ratio", 2, ends=True),
    Column("MiB", "mebibytes"),
    Column("over the other", "memory_ratio", 2),
)


def work(options: Options) -> None:
    """One contestant of one case."""
    import torch

    from mpi4dl._memory import load_libraries, peak_memory_bytes, reset_peak
    from mpi4dl._torchvision import prepare_torchvision

    task, side, (kind, number), folder = options.worker
    number = options.side if task == "patches" else number
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prepare_torchvision()
    load_libraries("cpu")
    if task == "generate":
        import transformers  # noqa: F401

        import mpi4dl.text.loading  # noqa: F401
    reset_peak()
    base = peak_memory_bytes("cpu")
    turn = {"generate": generating, "patches": training, "read": reading}[task](
        side == OURS, kind, number, Path(folder)
    )

    def measured() -> dict[str, Any]:
        cpu, began = time.process_time(), time.perf_counter()
        turn()
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        return {"cpu_seconds": cpu, "seconds": seconds, "mebibytes": max(1, peak_memory_bytes("cpu") - base) // MIB}

    answer_turns(measured)


def write_model(folder: Path, width: int, layers: int) -> None:
    """A model of transformers with random weights, and the smallest tokenizer of ours."""
    import torch

    from mpi4dl._torchvision import prepare_torchvision
    from mpi4dl.datasets.text.tokenizer import BPETokenizer

    prepare_torchvision()
    import transformers

    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    model: Any
    if folder.name == "llama":
        sizes: dict[str, Any] = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "intermediate_size": 1376,
            "vocab_size": 4000,
        }
        heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **ends))
    else:
        sizes = {"n_embd": width, "n_layer": layers, "n_head": layers, "vocab_size": 50257 if width > 500 else 2000}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_positions=512, **ends))
    model.generation_config.eos_token_id = None  # all texts have as many tokens
    model.save_pretrained(folder)
    BPETokenizer.train(["if a: return 1\n"] * 9, 270).save(folder / "tokenizer.json")


def generating(ours: bool, model: str, streams: int, folder: Path) -> Callable[[], Any]:
    import torch

    prompts = torch.randint(1, 1900, (streams, PROMPT))
    if not ours:
        import transformers

        plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / model).eval()
        how: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return lambda: plain.generate(prompts, attention_mask=torch.ones_like(prompts), **how)
    from mpi4dl.comm import world
    from mpi4dl.text.loading import find_trained, open_batcher
    from mpi4dl.text.options import Batching, Ranks, Sampling

    batcher = open_batcher(world(), find_trained(world(), folder / model), Ranks(), Batching())

    def turn() -> None:
        events: list[Any] = []
        for prompt in prompts.tolist():
            batcher.submit(prompt, Sampling(max_tokens=NEW, temperature=0), events.append)
        while len(events) < NEW * streams:
            assert batcher._admit()
            batcher._make_step()

    return turn


def training(ours: bool, kind: str, side: int, folder: Path) -> Callable[[], Any]:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    from benchmarks.common.ranks import use_pytorchs_kernels
    from mpi4dl._memory import keep_freed_memory
    from mpi4dl._torchvision import import_torchvision
    from mpi4dl.comm import world
    from mpi4dl.engine import Engine
    from mpi4dl.models.patches import AGGREGATORS, PatchModel, cut, headless
    from mpi4dl.parallel.pipeline.local_stages import LocalStages
    from mpi4dl.parallel.plan import Plan
    from mpi4dl.parallel.streaming.patches import PatchOptions, stream_patches

    keep_freed_memory()
    models = import_torchvision().models
    encoder = (
        models.VisionTransformer(64, 8, 6, 6, 192, 768, num_classes=7)
        if kind == "vit"
        else models.resnet18(num_classes=7, norm_layer=lambda channels: nn.GroupNorm(8, channels))
    )
    model = PatchModel(encoder, AGGREGATORS["gated-attention"](headless(encoder, 7), 2), 64)
    images, labels = torch.rand(1, 3, side, side), torch.tensor([1])
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    if ours:
        options = PatchOptions(AT_ONCE)
        stream_patches(model, options)
        engine = Engine(LocalStages.whole(model, Plan(), world(), options), Plan(), sgd, F.cross_entropy, comm=world())
        return lambda: engine.step([images], labels, (side, side))

    use_pytorchs_kernels()

    def turn() -> None:
        sgd.zero_grad()
        some = cut(images, 64).split(AT_ONCE)
        features = torch.cat([checkpoint(model.encoder, each, use_reentrant=False) for each in some])
        F.cross_entropy(model.aggregate(features, [len(features)]), labels).backward()
        sgd.step()

    return turn


def write_images(folder: Path) -> None:
    """A picture of waves and noise, as each kind of file; and its parts as small ones."""
    import numpy as np
    import tifffile
    from PIL import Image

    y, x = np.mgrid[0:SIDE, 0:SIDE]
    noise = np.random.default_rng(0).normal(0, 12, (SIDE, SIDE, 3))
    pixels = ((np.sin(x / 37) + np.cos(y / 51))[..., None] * 60 + 128 + noise).clip(0, 255).astype(np.uint8)
    tiled: dict[str, Any] = {"tile": (TILE, TILE), "photometric": "rgb"}
    for kind, compression in (("jpeg", "jpeg"), ("deflate", "zlib"), ("raw", None)):
        tifffile.imwrite(folder / f"{kind}.tif", pixels, compression=compression, **tiled)
    words = f"Aperio Image Library\r\n{SIDE}x{SIDE} [0,0 {SIDE}x{SIDE}] (256x256) JPEG/RGB|AppMag = 20|MPP = 0.5"
    tifffile.imwrite(folder / "svs.svs", pixels, compression="jpeg", description=words, metadata=None, **tiled)
    for number in range(100):
        for kind in ("png", "jpg"):
            part = pixels[number * 8 :][:64, :64]
            Image.fromarray(part).save(folder / f"{number}.{kind}")


def reading(ours: bool, kind: str, side: int, folder: Path) -> Callable[[], Any]:
    import numpy as np
    from PIL import Image

    from mpi4dl.datasets.files import open_image
    from mpi4dl.datasets.slides.slide import open_slide
    from mpi4dl.geometry import Interval

    if side == 64:
        paths = [folder / f"{number}.{kind}" for number in range(100)]
        whole = Interval(0, 64)
        if ours:
            return lambda: [open_image(path).read(whole, whole) for path in paths]
        return lambda: [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    draw = random.Random(3)
    boxes = [(draw.randrange(SIDE - side), draw.randrange(SIDE - side)) for _ in range(61_440 // side)]
    (path,) = folder.glob(f"{kind}.*")
    if ours:
        slide = open_slide(path)
        return lambda: [slide.read(Interval(r, r + side), Interval(c, c + side)) for r, c in boxes]
    if kind == "svs":
        import openslide

        opened = openslide.OpenSlide(str(path))
        return lambda: [np.asarray(opened.read_region((c, r), 0, (side, side)))[..., :3] for r, c in boxes]
    import tifffile

    page = tifffile.TiffFile(path).pages[0]
    return lambda: [_of_tifffile(page, *box, side) for box in boxes]


def _of_tifffile(page: Any, row: int, col: int, side: int) -> Any:
    """A box of a tiled page, put together from its tiles."""
    import numpy as np

    handle, across = page.parent.filehandle, -(-page.imagewidth // TILE)
    tables = {} if page.jpegtables is None else {"jpegtables": page.jpegtables}
    found = np.empty((side, side, 3), np.uint8)
    for top in range(row // TILE * TILE, row + side, TILE):
        for left in range(col // TILE * TILE, col + side, TILE):
            number = top // TILE * across + left // TILE
            handle.seek(page.dataoffsets[number])
            data = handle.read(page.databytecounts[number])
            tile = page.decode(data, number, **tables)[0][0]
            rows, cols = (
                slice(max(row, top), min(row + side, top + TILE)),
                slice(max(col, left), min(col + side, left + TILE)),
            )
            part = tile[rows.start - top : rows.stop - top, cols.start - left : cols.stop - left]
            found[rows.start - row : rows.stop - row, cols.start - col : cols.stop - col] = part
    return found


def run(options: Options) -> None:
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for task in options.tasks:
            other, cases = CASES[task]
            if task == "read":
                write_images(Path(folder))
            for model, sizes in MODELS.items() if task == "generate" else ():
                write_model(Path(folder) / model, *sizes)
            for name, case in cases.items():
                sides = [options.contestant(side, 1, (task, side, case, folder)) for side in (OURS, other)]
                take_turns(sides, options.rounds)
                ratios = {"cpu_ratio": "cpu_seconds", "wall_ratio": "seconds", "memory_ratio": "mebibytes"}
                values = sides[0].spreads("cpu_seconds", "seconds", "mebibytes")
                rows.append({"name": name, "task": task, "other": other, **values, **sides[0].over(sides[1], **ratios)})
    title = "mpi4dl over the library that users would take, one process of one thread"
    panels = [Bars("cpu_ratio", "CPU seconds", baseline=1.0), Bars("memory_ratio", "memory", baseline=1.0)]
    figure = bars(rows, panels, title, [OTHERS] * len(rows), [f"{row['name']}; {row['other']}" for row in rows])
    publish(options, title, table(rows, COLUMNS), figure, rows)
