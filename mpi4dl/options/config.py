"""Every option of a training run, in sections; adding an option is one line here.

    python -m mpi4dl.train --config run.toml --batch-size 8

reads `run.toml`, whose tables are the sections below, and lets flags override it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpi4dl.options.declare import ConfigError, facts, option, parse_options, shared_options, to_toml
from mpi4dl.options.kinds import (
    BOOLEAN,
    BYTES,
    COUNT,
    COUNT_OR_ZERO,
    COUNTS,
    DEVIATIONS,
    GRIDS,
    IMAGE_SIZE,
    KEYWORDS,
    MEANS,
    NAME,
    NAMES,
    NOT_NEGATIVE,
    PART,
    PART_OR_PAIR,
    PARTS,
    POSITIVE,
    PROPER_FRACTION,
    SEED,
    SHARE,
    TEXT,
    ZERO_STAGE,
    choice,
    count_or,
    counts_or,
    optional,
    part_name,
    sides_or,
)
from mpi4dl.options.learning import TASK_NAMES, Learning
from mpi4dl.options.tuning import Tuning

__all__ = ["Config", "ConfigError", "Data", "Learning", "Model", "Optimizer", "Parallel", "Run", "Training", "Tuning"]
__all__ += ["facts", "parse", "shared_options", "to_toml"]

USAGE = "mpirun -n RANKS python -m mpi4dl.train [--config FILE] [--FLAG VALUE ...]"
DESCRIPTION = "Train an unmodified PyTorch model on images or text that are spread over the ranks of an MPI job."


@dataclass(frozen=True)
class Model:
    model: Any = option(
        "resnet18",
        "the name of a model of mpi4dl.models or torchvision, or timm/NAME, or smp/CLASS; or an own one: "
        "my_code.py:build or package.module:Class",
        PART,
    )
    num_classes: int | None = option(None, "how many classes; none: as many as the data has", optional(COUNT))
    model_options: Mapping[str, Any] = option({}, "keyword arguments of the model, such as depth=29,pool=max", KEYWORDS)
    patches: int | None = option(
        None,
        "cut images into patches of so many pixels, which the model encodes, each alone, for the aggregator; none: the "
        "model sees whole images",
        optional(COUNT),
    )
    aggregator: str = option(
        "gated-attention",
        "what is made of the features of all patches of an image",
        choice("mean", "max", "gated-attention", "transformer"),
    )
    min_tissue: float = option(
        0.0, "look only at patches of whose pixels at least this share is coloured; 0: at all of them", SHARE
    )
    patches_at_once: int = option(16, "how many patches each rank has in its memory at once", COUNT)


@dataclass(frozen=True)
class Data:
    images: str = option(
        "synthetic",
        "a folder of images or volumes: with one subfolder per class, with labels.csv, or with images and masks; an "
        ".npz file, or synthetic",
        NAME,
    )
    dataset: Any = option(
        None,
        "a dataset of your own instead of --images, such as my_code.py:Slides: it says the size of an image, and reads "
        "a box of it",
        optional(PART_OR_PAIR),
    )
    dataset_options: Mapping[str, Any] = option({}, "its keyword arguments, such as root=slides", KEYWORDS)
    image_size: tuple[int, ...] = option(
        (224, 224), "the height and width of every image, in pixels, or the three sides of volumes", IMAGE_SIZE
    )
    batch_size: int = option(4, "images per step (of --accumulate batches: in each), over all ranks together", COUNT)
    num_samples: int = option(256, "how many images there are, if they are synthetic", COUNT)
    val_fraction: float = option(0.1, "the share of the images that is kept for validation", PROPER_FRACTION)
    fit: str = option(
        "auto",
        "how images of all formats are brought to the image size; auto: slides of more than 8192 x 8192 px are cropped",
        choice("auto", "resize", "crop"),
    )
    flip: bool = option(True, "mirror training images at random", BOOLEAN)
    random_crop: bool = option(False, "crop training images at a random place", BOOLEAN)
    jitter: float = option(
        0.0, "how far brightness, contrast and saturation of training images vary; 0: not at all", SHARE
    )
    mixup: float = option(
        0.0,
        "train on weighted means of two images and of their labels, with weights from Beta(X, X); 0: not",
        NOT_NEGATIVE,
    )
    transforms: Any = option(
        None,
        "what you do to pixels before they are normalised, each from itself alone, such as my_code.py:darker(pixels)",
        optional(PART),
    )
    sampling: str = option(
        "shuffled",
        "which training images an epoch has: each once, or each class equally often",
        choice("shuffled", "balanced"),
    )
    mean: tuple[float, ...] | str = option((0.5,), "subtracted from every pixel, whose range is 0 to 1", MEANS)
    std: tuple[float, ...] | str | None = option(
        None,
        "what every pixel is divided by after that; none: that of a --mean by name, else 0.25",
        optional(DEVIATIONS),
    )
    label_columns: tuple[str, ...] | None = option(
        None, "which columns of labels.csv are learnt; none: all", optional(NAMES)
    )
    ignore_index: int | None = option(
        255,
        "which number in masks says that a pixel counts for nothing; none: no number, and white is class 1 of 2",
        optional(COUNT_OR_ZERO),
    )
    text: str | None = option(
        None,
        "train on text instead of images: files and folders of UTF-8, with commas between them, or stdlib, the source "
        "of Python's standard library",
        optional(NAME),
    )
    task: str = option(
        "auto",
        "what is learnt: a class or any labels of an image, numbers, a mask, or survival; of text the next token, or "
        "masked ones; auto: as labels are, language of text",
        choice("auto", *TASK_NAMES),
    )
    context: int = option(256, "how many tokens of text are one sample", COUNT)
    tokenizer: str = option("bytes", "how text becomes tokens: bytes, or byte pairs, such as bpe:8192", NAME)
    document_mask: bool = option(
        False, "let no token see other documents of the text than its own, where a sample has several", BOOLEAN
    )
    prompt: str | None = option(
        None, "text that the trained model goes on with, and prints, such as 'def '; none: nothing", optional(NAME)
    )
    prompt_tokens: int = option(200, "how many tokens it prints of its own", COUNT)
    token_folder: str = option("runs/tokens", "where tokens are kept, for all runs with the same text", NAME)
    num_workers: int = option(2, "how many workers on each rank read images ahead", COUNT_OR_ZERO, per_rank=True)
    on_bad_image: str = option("error", "what to do with an image that cannot be read", choice("error", "skip"))


@dataclass(frozen=True)
class Parallel:
    tiles: tuple[tuple[int, ...], ...] = option(
        ((1, 1),), "the grid of tiles that every image is cut into, one per rank: for all stages, or for each", GRIDS
    )
    stages: int = option(1, "into how many stages the model is cut, one behind the other", COUNT)
    batch_ways: tuple[int, ...] = option((1,), "in how many ways a stage splits its batch: for all, or each", COUNTS)
    data: int = option(1, "data replicas: how many groups of ranks share the batch", COUNT)
    microbatches: int = option(1, "into how many microbatches a batch is cut, in each wave", COUNT)
    schedule: str = option(
        "1f1b",
        "how microbatches go through the stages",
        choice("layer", "gpipe", "1f1b", "interleaved", "zero-bubble"),
    )
    bidirectional: int = option(
        0, "GEMS: how many pairs of waves go through the model and a mirrored copy of it; 0: no copy", COUNT_OR_ZERO
    )
    chunks: int = option(1, "how many stages a rank has, if they are interleaved", COUNT)
    tensor: int = option(1, "how many ranks share the parameters of each layer, and its features", COUNT)
    sequence: bool = option(
        False, "sequence parallel: the ranks of --tensor share tokens where each would have all of them", BOOLEAN
    )
    tensor_styles: str | None = option(
        None,
        'a TOML file of how they are cut, such as "blocks.*.up" = "column"; none: as the model\'s table or plan says',
        optional(NAME),
    )
    experts: int = option(1, "how many ranks share experts, and the batch as those of --data do", COUNT)
    moe: str = option(
        "tensor",
        "what the ranks of --tensor have of experts: a part of each, or whole ones",
        choice("tensor", "expert"),
    )
    moe_pieces: int = option(1, "in how many pieces a batch travels to experts: one while they have another", COUNT)
    zero: int = option(
        0, "ZeRO: ranks share out the optimizer's state (1), the gradients too (2), the parameters too (3)", ZERO_STAGE
    )
    offload: str = option(
        "none",
        "where masters and optimizer state are kept: on the device, the host, or disk",
        choice("none", "cpu", "disk"),
    )
    offload_folder: str | None = option(
        None, "a fast local disk for --offload disk; none: that of temporary files", optional(NAME), per_rank=True
    )
    allreduce: str = option(
        "auto",
        "how gradients are summed; measured: as is fastest here, which may change the last bits from run to run",
        choice("auto", "library", "direct", "ring", "two-level", "measured"),
    )
    balance: str | tuple[int, ...] = option(
        "auto",
        "how the model is cut: by seconds, timed here once (auto) or on all ranks (measured), by FLOPs or memory, or "
        "atoms of each stage",
        counts_or("auto", "flops", "memory", "measured"),
    )
    halo: str = option(
        "layer",
        "what each tile needs of its neighbours comes for each layer, once for all layers of a block, or as is faster "
        "by the measured link and ranks (auto), once for a run of blocks too",
        choice("layer", "block", "auto"),
    )
    stream: tuple[int, ...] | str | None = option(
        None,
        "visit so many tiles of each rank's part of an image one after the other, so that memory is that of one; none: "
        "all at once; auto: as few as fit into --memory-limit",
        optional(sides_or("auto")),
    )
    memory_limit: int | None = option(
        None, "what --stream auto keeps the peak memory of every rank within, such as 6GiB", optional(BYTES)
    )
    stream_until: str | None = option(
        None, "the last module that is streamed; none: as far as margins are small beside tiles", optional(NAME)
    )
    stream_norm: str = option(
        "exact",
        "batch norm while streaming: by the statistics of the whole batch, which repeats visits, or the running ones",
        choice("exact", "running", "frozen"),
    )
    stream_segments: int | None = option(
        None,
        "in how many parts that is streamed, between which outputs are kept, so that less is computed again; none: "
        "one, or with --stream auto as many as make least work",
        optional(COUNT),
    )
    no_rule: str = option(
        "error",
        "what to do with an operator that has no exact rule for tiles; gather: compute it whole on every rank",
        choice("error", "gather"),
    )
    threads: int | None = option(
        None,
        "with how many threads each rank computes; none: as OMP_NUM_THREADS says, or its share of the cores",
        optional(COUNT),
        per_rank=True,
    )
    device: str = option("auto", "where to compute; auto: on a GPU if there is one", choice("auto", "cpu", "cuda"))
    gpu_wire: str = option(
        "auto",
        "how GPU tensors travel: by MPI directly, by MPI staged on the host, or by NCCL where the order is fixed",
        choice("auto", "direct", "staged", "nccl"),
    )
    keep_freed_memory: bool = option(
        True,
        "keep the memory of freed tensors for the next step: faster on CPUs, and a process grows to 1.7 times its need",
        BOOLEAN,
    )
    memory_check: str = option(
        "error",
        "what to do at the start with a run that needs more memory than its nodes have; error: refuse what cannot fit, "
        "and warn of what may not",
        choice("error", "warn", "none"),
    )
    hang_timeout: float = option(
        3600.0,
        "seconds without a sign of life after which the job is ended; less, once its work has needed less; 0: never",
        NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class Optimizer:
    optimizer: Any = option("SGD", "a class of torch.optim, or an own one such as my_code.py:Lion", PART)
    lr: float = option(0.01, "the learning rate", NOT_NEGATIVE)
    optimizer_options: Mapping[str, Any] = option({}, "its keyword arguments, such as momentum=0.9", KEYWORDS)
    scheduler: str = option("", "a class of torch.optim.lr_scheduler; empty: a constant learning rate", TEXT)
    scheduler_options: Mapping[str, Any] = option({}, "its keyword arguments, such as milestones=[30,60]", KEYWORDS)
    lr_schedule: str = option(
        "constant",
        "how the learning rate falls from step to step, to 0 at the end: constant, linear, or as half a cosine",
        choice("constant", "linear", "cosine"),
    )
    warmup: int = option(0, "in how many steps the learning rate rises before that, from a hundredth", COUNT_OR_ZERO)
    clip_norm: float | None = option(None, "the largest norm of the gradient; none: any", optional(POSITIVE))
    clip_value: float | None = option(None, "the largest element of the gradient; none: any", optional(POSITIVE))


@dataclass(frozen=True)
class Training:
    epochs: int = option(1, "how many times every image is seen", COUNT)
    accumulate: int = option(1, "how many batches make one step together", COUNT)
    max_steps: int | None = option(None, "stop after so many steps; none: after the epochs", optional(COUNT))
    loss: Any = option(
        None,
        "what is minimised: cross_entropy, bce, dice, focal, mse, l1, huber, cox, or several with + between them; or "
        "an own one such as my_code.py:loss(outputs, targets); none: what suits the task",
        optional(PART),
    )
    loss_options: Mapping[str, Any] = option(
        {}, "the options of the loss, such as gamma=1.5, delta=0.5, ties=breslow, or what makes an own one", KEYWORDS
    )
    precision: str = option("fp32", "the type to compute in", choice("fp32", "bf16", "fp16"))
    low_precision_weights: bool = option(
        False, "keep the weights in bf16 or fp16 too, with fp32 masters where the optimizer is", BOOLEAN
    )
    recompute: bool = option(False, "recompute activations in the backward pass, to save memory", BOOLEAN)
    check_replicas: bool = option(
        False, "check after every epoch that ranks with the same weights have the same bits of them", BOOLEAN
    )
    seed: int = option(0, "the seed of weights, order and augmentation", SEED)
    eval_every: int | None = option(1, "validate after every so many epochs; none: never", optional(COUNT))


@dataclass(frozen=True)
class Run:
    run_folder: str | None = option(
        None, "where the run is recorded; none: runs/MODEL-DATE-TIME", optional(NAME), per_rank=True
    )
    save_every: str | int = option(
        "epoch",
        "when all is saved that a run needs to go on: after every epoch, so many steps, or never",
        count_or("epoch", "none"),
    )
    keep: int = option(2, "how many checkpoints are kept, the newest", COUNT)
    resume: str = option(
        "none", "go on: in --run-folder, if there is a run (auto), or from a run or checkpoint at this path", NAME
    )
    callbacks: tuple[Any, ...] = option(
        (), "objects of yours that are told how the run goes, such as my_code.py:Notify", PARTS, per_rank=True
    )
    log_interval: int = option(10, "steps between two reports", COUNT)
    tensorboard: bool = option(True, "write TensorBoard event files into the run folder", BOOLEAN, per_rank=True)
    dry_run: bool = option(False, "build everything, print the plan, and stop before the first step", BOOLEAN)
    print_config: bool = option(False, "print all options as a TOML file, and stop", BOOLEAN, flag_only=True)


@dataclass(frozen=True)
class Config:
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    parallel: Parallel = field(default_factory=Parallel)
    optimizer: Optimizer = field(default_factory=Optimizer)
    tuning: Tuning = field(default_factory=Tuning)
    training: Training = field(default_factory=Training)
    learning: Learning = field(default_factory=Learning)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        """A size of one number is that of all sides, of as many as tiles have; tiles of rows and columns keep all of
        the depth of volumes. Of text the size is the number of tokens.
        """
        mean = self.data.mean
        if self.data.std is None:
            object.__setattr__(self, "data", replace(self.data, std=mean if isinstance(mean, str) else (0.25,)))
        size, tiles = self.data.image_size, self.parallel.tiles
        if self.data.text is not None:
            object.__setattr__(self, "data", replace(self.data, image_size=(self.data.context,)))
            if set(tiles) == {(1, 1)}:
                object.__setattr__(self, "parallel", replace(self.parallel, tiles=((1,),) * len(tiles)))
        elif len(size) == 1:
            object.__setattr__(self, "data", replace(self.data, image_size=size * len(tiles[0])))
        elif len(size) == 3:
            deep = tuple((1, *grid) if len(grid) == 2 else grid for grid in tiles)
            object.__setattr__(self, "parallel", replace(self.parallel, tiles=deep))

    @property
    def samples_per_step(self) -> int:
        """How many samples all ranks together take for a step."""
        return self.data.batch_size * self.training.accumulate

    @property
    def model_name(self) -> str:
        """How messages and files of a run name the model."""
        return part_name(self.model.model)

    @property
    def visits(self) -> bool:
        """Whether parts of images are read and visited one after the other, so that nobody has them whole."""
        return self.parallel.stream is not None or self.model.patches is not None


def parse(argv: Sequence[str]) -> Config:
    """The configuration that a command line asks for, without the program's name.

    Raises ConfigError with one message for the user; only `--help` exits.
    """
    return parse_options(Config, argv, USAGE, DESCRIPTION)


def hang_timeout(argv: Sequence[str]) -> float:
    """How long a job that is started so may wait; the default, if it is to be refused."""
    try:
        return parse(argv).parallel.hang_timeout
    except ConfigError:
        return Config().parallel.hang_timeout
