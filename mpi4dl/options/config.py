"""Every option of a training run, in sections; adding an option is one line here.

    mpi4dl train --config run.toml --batch-size 8

reads `run.toml`, whose tables are the sections below, and lets flags override it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mpi4dl._commands import typed
from mpi4dl.options.declare import ConfigError, facts, instead, option, parse_options, same_as, shared_options, to_toml
from mpi4dl.options.kinds import (
    ANGLE,
    AUTO,
    BOOLEAN,
    BYTES,
    CALLS,
    COUNT,
    COUNT_OR_SHARE,
    COUNT_OR_ZERO,
    COUNTS,
    DEVIATIONS,
    EPOCHS,
    GRIDS,
    IMAGE_SIZE,
    KEYWORDS,
    MEANS,
    NAME,
    NAMES,
    NOT_NEGATIVE,
    NUMBERS,
    PART,
    PART_OR_PAIR,
    PARTS,
    PATTERNS,
    POSITIVE,
    PROPER_FRACTION,
    RANGE,
    SEED,
    SHARE,
    SIDES,
    TEXT,
    WEIGHTS,
    ZERO_STAGE,
    choice,
    either,
    optional,
    or_auto,
    part_name,
    some_of,
)

__all__ = ["Config", "ConfigError", "Data", "Learning", "Model", "Optimizer", "Parallel", "Run", "Training", "Tuning"]
__all__ += ["facts", "parse", "shared_options", "to_toml"]

TASK_NAMES = ("classify", "multilabel", "regress", "segment", "survival", "language", "masked")
USAGE = "[--config FILE] [--FLAG VALUE ...]"
DESCRIPTION = "Train an unmodified PyTorch model on images or text, over the ranks of an MPI job."


@dataclass(frozen=True)
class Model:
    """The model, and the patches that it sees."""

    model: Any = option(
        "resnet18",
        "a model of mpi4dl or torchvision by name, timm/NAME, smp/CLASS, or your own: my_code.py:build or "
        "package.module:Class",
        PART,
        brief="a model of mpi4dl, torchvision, timm/ or smp/, or yours",
        known_as=same_as("arch architecture a backbone model-name model-type net")
        | instead("use {option} for the model, and --weights for its weights", "model-name-or-path"),
    )
    num_classes: int | None = option(
        None,
        "number of classes; none: that of the data",
        optional(COUNT),
        known_as=same_as("nb-classes n-classes num-labels"),
    )
    model_options: Mapping[str, Any] = option(
        {},
        "keyword arguments of the model, such as depth=29,pool=max",
        KEYWORDS,
        known_as=same_as("model-kwargs model-args model-config"),
    )
    patches: int | None = option(
        None,
        "cut images into patches of N x N pixels; the model encodes each patch, and an aggregator combines them; "
        "none: whole images",
        optional(COUNT),
    )
    aggregator: str = option(
        "gated-attention",
        "how the features of all patches of an image are combined",
        choice("mean", "max", "gated-attention", "transformer"),
    )
    feature_norm: str = option(
        "none",
        "standardize the features of all patches of a batch before the aggregator: batch, as batch norm does, or none",
        choice("none", "batch"),
    )
    min_tissue: float = option(0.0, "drop patches with a smaller share of coloured pixels; 0: keep all", SHARE)
    patches_at_once: int = option(16, "number of patches that each rank processes at once", COUNT)


@dataclass(frozen=True)
class Data:
    """Images, volumes or text: their folder, size and augmentation."""

    images: str = option(
        "synthetic",
        "a folder of images or volumes: with one subfolder per class, with labels.csv, or with images and masks; an "
        ".npz file; or synthetic",
        NAME,
        brief="a folder, an .npz file, or synthetic",
        known_as=same_as("data-dir data-path datapath data-root dataset-dir train-dir dataset-path image-dir root"),
    )
    dataset: Any = option(
        None,
        "your own dataset instead of --images, such as my_code.py:Slides; it gives the size of an image and reads "
        "boxes of it",
        optional(PART_OR_PAIR),
        known_as=instead("use --images FOLDER, or {option} for a dataset in Python", "dataset-name"),
    )
    dataset_options: Mapping[str, Any] = option({}, "keyword arguments of the dataset, such as root=slides", KEYWORDS)
    image_size: tuple[int, ...] = option(
        AUTO,
        "height and width of every image in pixels, or the three sides of volumes; auto: 224x224, or the size in "
        "which the largest of all slides fits",
        or_auto(IMAGE_SIZE),
        brief="height x width in pixels, or three sides of volumes",
        known_as=same_as("img-size imgsz input-size resolution crop-size train-crop-size"),
    )
    batch_size: int = option(
        4,
        "images in each batch, over all ranks together",
        COUNT,
        brief="images per step, over all ranks",
        known_as=same_as("b batch global-batch-size train-batch-size")
        | instead(
            "use {option} N, which counts the images of all ranks together",
            "batch-size-per-gpu per-gpu-batch-size per-device-train-batch-size batch-size-per-device "
            "per-device-batch-size",
        ),
    )
    num_samples: int = option(256, "number of synthetic images", COUNT, known_as=same_as("dataset-size"))
    val_fraction: float = option(
        0.1,
        "share of the images for validation",
        PROPER_FRACTION,
        known_as=same_as("val-split validation-split test-size"),
    )
    fit: str = option(
        "auto",
        "how images get the image size: resized, cropped, or padded with white; own: each keeps its size; auto: own "
        "for slides without masks, crop images of more than 8192 x 8192 px, resize all others",
        choice("auto", "resize", "crop", "pad", "own"),
    )
    flip: str = option(
        AUTO,
        "mirror training images at random: from left to right (horizontal), or along each axis (all, or --flip alone); "
        "auto: horizontal for pictures, where labels are classes",
        choice(AUTO, "none", "horizontal", "all", formerly={True: "all", False: "none"}, switch=("all", "none")),
        known_as=instead("use {option} horizontal or --no-flip", "hflip")
        | instead("use {option}, which mirrors along each axis", "vflip"),
    )
    rotate: str = option(
        "none",
        "turn training images at random: by 0 or 180 degrees (half), or by 0, 90, 180 or 270 degrees (quarter); "
        "images must be square or have their own size, or each patch of --patches turns in its place",
        choice("none", "half", "quarter", switch=("quarter", "none")),
        known_as=same_as("rot90 random-rot90"),
    )
    rotate_degrees: float = option(
        0.0,
        "turn training images, or each patch of --patches in its place, by a random angle of at most so many degrees "
        "in both directions",
        ANGLE,
        known_as=same_as("degrees rotation-degrees random-rotation rotate-limit"),
    )
    scale: tuple[float, float] = option(
        (1.0, 1.0),
        "enlarge training images, or what each patch shows, by a random factor from LOW to HIGH, such as 0.9,1.1",
        RANGE,
        known_as=same_as("random-scale scale-limit zoom-range"),
    )
    random_crop: bool = option(
        False,
        "crop training images at a random place",
        BOOLEAN,
        known_as=instead("use {option}", "random-resized-crop"),
    )
    jitter: float = option(
        0.0,
        "range of random brightness, contrast and saturation of training images; 0: none",
        SHARE,
        known_as=same_as("color-jitter"),
    )
    stain_jitter: float = option(
        0.0,
        "range of random changes of stains in training images: factors of the concentrations of hematoxylin, eosin and "
        "DAB, and what is added to them; 0.05 is little, 0.2 much; 0: none",
        SHARE,
        known_as=same_as("hed-jitter stain-augmentation"),
    )
    mixup: float = option(
        0.0,
        "mixup: train on weighted means of two images and their labels, with weights from Beta(X, X); 0: none",
        NOT_NEGATIVE,
        known_as=same_as("mixup-alpha"),
    )
    transforms: Any = option(
        None,
        "your transform of pixels before normalization, each pixel by itself, such as my_code.py:darker(pixels)",
        optional(PART),
    )
    augment: tuple[str, ...] = option(
        (),
        "transforms of training images by name, of torchvision.transforms.v2 or as albumentations.NAME, such as "
        "RandomPosterize(bits=4),RandomGrayscale; those that need whole images or patches are refused where ranks or "
        "streaming cut these",
        CALLS,
        known_as=same_as("augmentations"),
    )
    sampling: str = option(
        "shuffled",
        "training images of an epoch: each once, or each class equally often",
        choice("shuffled", "balanced"),
    )
    mean: tuple[float, ...] | str = option(
        (0.5,), "mean that is subtracted from every pixel (0 to 1), for all channels or each, or imagenet", MEANS
    )
    std: tuple[float, ...] | str | None = option(
        None,
        "divisor of every pixel after that; none: that of a --mean by name, else 0.25",
        optional(DEVIATIONS),
    )
    label_columns: tuple[str, ...] | None = option(None, "columns of labels.csv to learn; none: all", optional(NAMES))
    ignore_index: int | None = option(
        255,
        "value of ignored pixels in masks; none: no pixel is ignored, and white is class 1 of 2",
        optional(COUNT_OR_ZERO),
    )
    text: str | None = option(
        None,
        "train on text instead of images: files and folders of UTF-8, separated by commas, or stdlib, the source of "
        "Python's standard library",
        optional(NAME),
        known_as=same_as("train-file text-file"),
    )
    task: str = option(
        "auto",
        "what to learn: one class or several labels of an image, numbers, a mask, survival; for text the next token "
        "or masked tokens; auto: by the labels, language for text",
        choice("auto", *TASK_NAMES),
        brief="classify, segment, ...; auto: by the labels",
        known_as=same_as("problem-type"),
    )
    context: int = option(
        256,
        "number of tokens of a sample of text",
        COUNT,
        known_as=same_as("seq-length seq-len block-size max-seq-length sequence-length"),
    )
    tokenizer: str = option(
        "bytes",
        "tokens of text: bytes, or byte pairs, such as bpe:8192",
        NAME,
        known_as=same_as("tokenizer-name"),
    )
    document_mask: bool = option(
        False, "restrict attention to the document of each token, where a sample has several", BOOLEAN
    )
    prompt: str | None = option(
        None, "text that the trained model continues and prints, such as 'def '; none: nothing", optional(NAME)
    )
    prompt_tokens: int = option(200, "number of tokens of this continuation", COUNT)
    token_folder: str = option("runs/tokens", "folder of token files, for all runs with the same text", NAME)
    num_workers: int = option(
        2,
        "number of threads on each rank that read images ahead",
        COUNT_OR_ZERO,
        per_rank=True,
        known_as=same_as("workers j dataloader-num-workers"),
    )
    on_bad_image: str = option("error", "what to do with an unreadable image", choice("error", "skip"))


@dataclass(frozen=True)
class Slides:
    """Whole-slide images: their table, resolution, tissue, and folds by patient."""

    slides: str | None = option(
        None,
        "slides instead of --images: a table with a line for each slide, such as slides.csv, or a folder of slides",
        optional(NAME),
        brief="a table of slides, or a folder of them",
        known_as=same_as("wsi-dir csv-path wsi-source"),
    )
    slides_folder: str | None = option(
        None, "the folder of the slides, and of folders in it; none: that of the table", optional(NAME)
    )
    features: str | None = option(
        None,
        "a folder of features of the patches of slides, as mpi4dl embed, TRIDENT or CLAM write them: train the "
        "aggregator on these; --slides is the table of labels then",
        optional(NAME),
        known_as=same_as("feats-dir features-dir patch-features-dir"),
    )
    mpp: float | None = option(
        None,
        "read slides at so many microns per pixel, such as 0.5; none: by --magnification, or level 0",
        optional(POSITIVE),
    )
    magnification: float | None = option(
        None,
        "read slides at this magnification, such as 20 for 0.5 microns per pixel",
        optional(POSITIVE),
        known_as=same_as("mag"),
    )
    level: int | None = option(
        None, "read slides at this level of their pyramid", optional(COUNT_OR_ZERO), known_as=same_as("patch-level")
    )
    assume_mpp: float | None = option(
        None, "microns per pixel of level 0 of slides that do not say it", optional(POSITIVE)
    )
    max_side: int | None = option(
        None,
        "the longest side in pixels that a whole slide may have at its resolution, or training does not begin; none: "
        "any",
        optional(COUNT),
    )
    background: str = option(
        "auto",
        "what whole slides show where there is no tissue: white, which streaming skips, or what was scanned (keep); "
        "auto: white by --fit own",
        choice("auto", "white", "keep"),
    )
    tissue: float | str = option(
        "otsu",
        "how the tissue of a slide is found: pixels with more than this saturation (0 to 1), or than Otsu's threshold",
        either(SHARE, "otsu"),
    )
    leave_out: tuple[str, ...] = option(
        (),
        "what is not taken for tissue: pen marks (pen), regions out of focus (blur), or pen,blur; default: nothing",
        some_of("pen", "blur"),
        known_as=instead("use {option} pen", "remove-penmarks") | instead("use {option} pen,blur", "remove-artifacts"),
    )
    stain_norm: str = option(
        "none",
        "make the colours of all slides those of a reference, by their stains (macenko), or by mean and spread of "
        "their colours (reinhard)",
        choice("none", "macenko", "reinhard"),
        known_as=same_as("stain-normalization color-norm"),
    )
    stain_reference: str | None = option(
        None,
        "the reference of --stain-norm: a slide or a picture, or the numbers that a run printed of one; none: built in",
        optional(NAME),
        known_as=same_as("stain-target"),
    )
    most_patches: int | None = option(
        None,
        "number of patches of a slide that are drawn at random in each epoch of training; none: all",
        optional(COUNT),
        known_as=same_as("bag-size max-patches"),
    )
    folds: int | None = option(
        None,
        "number of folds by patient for cross-validation; none: one split",
        optional(COUNT),
        known_as=same_as("k-fold num-folds"),
    )
    fold: int = option(
        0, "the fold that validates, from 0 on; its run is in the folder fold_N of --run-folder", COUNT_OR_ZERO
    )
    all_folds: bool = option(
        False,
        "train all --folds one after the other, and print their metrics together; --resume auto continues them",
        BOOLEAN,
    )
    split_file: str | None = option(
        None,
        "a table with your own split: slide_id and split, slide_id and fold, or CLAM's columns train, val and test; "
        "with --folds also a folder of splits_0.csv, splits_1.csv, ...; none: by the table, or by --val-fraction",
        optional(NAME),
        known_as=same_as("split-dir splits-dir"),
    )
    slide_column: str | None = option(None, "the column of slides; none: by the usual names", optional(NAME))
    patient_column: str | None = option(None, "the column of patients; none: by the usual names", optional(NAME))
    annotation_column: str | None = option(
        None, "the column of annotations for --task segment; none: by the usual names", optional(NAME)
    )
    unannotated: str = option(
        "background",
        "what pixels without annotation are: the class background, or left out of loss and metrics",
        choice("background", "ignore"),
    )
    annotation_origin: str = option(
        "level-0",
        "where coordinates of annotations begin: at the full level 0, or at the bounds that the scanner scanned, as in "
        "QuPath",
        choice("level-0", "bounds"),
    )
    crops_each: int = option(
        1,
        "with --task segment and --fit crop: number of windows of --image-size that are drawn of a slide in each "
        "epoch, within tissue",
        COUNT,
        known_as=same_as("windows-each"),
    )
    crops_on_classes: float = option(
        0.0, "share of these windows whose centre is drawn on an annotated class, each class equally often", SHARE
    )


@dataclass(frozen=True)
class Parallel:
    """How ranks share the work: tiles, stages, replicas, tensors, experts."""

    tiles: tuple[tuple[int, ...], ...] = option(
        ((1, 1),),
        "grid of tiles of every image, one tile per rank: for all stages, or for each",
        GRIDS,
        brief="grid of tiles of each image",
        known_as=instead("use {option} with a grid of as many tiles, such as 2x2", "num-spatial-parts spatial-parts")
        | instead("use {option}: 2x2 is square, 1x4 vertical, 4x1 horizontal", "slice-method")
        | instead("use {option} with a grid such as 2x2: tiles are counted, not measured", "tile-size"),
    )
    stages: int = option(
        1,
        "number of pipeline stages of the model",
        COUNT,
        brief="number of pipeline stages",
        known_as=same_as("pp pp-size pipeline-parallel-size pipeline-model-parallel-size split-size num-stages"),
    )
    batch_ways: tuple[int, ...] = option(
        (1,), "number of ranks that split the batch of a stage: for all stages, or for each", COUNTS
    )
    data: int = option(
        1,
        "number of data replicas that share the batch",
        COUNT,
        brief="number of data replicas, which share the batch",
        known_as=same_as("dp dp-size data-parallel-size num-replicas")
        | instead("use {option} N for replicas, --zero to shard their state, --tiles for large images", "strategy")
        | instead("leave it out: batch norm takes its statistics over all ranks", "sync-bn sync-batchnorm"),
    )
    microbatches: int = option(
        1,
        "number of microbatches of a batch, in each wave",
        COUNT,
        known_as=same_as("num-microbatches parts gradient-accumulation-chunks")
        | instead("use {option} N, which counts the microbatches of a batch", "micro-batch-size"),
    )
    schedule: str = option(
        "1f1b",
        "order of microbatches in the stages",
        choice("layer", "gpipe", "1f1b", "interleaved", "zero-bubble"),
    )
    bidirectional: int = option(
        0, "GEMS: number of pairs of waves through the model and a mirrored copy; 0: no copy", COUNT_OR_ZERO
    )
    chunks: int = option(1, "number of stages of each rank with the interleaved schedule", COUNT)
    tensor: int = option(
        1,
        "tensor parallelism: number of ranks that share the parameters and features of each layer",
        COUNT,
        known_as=same_as("tp tp-size tensor-parallel-size tensor-model-parallel-size"),
    )
    sequence: bool = option(
        False,
        "sequence parallelism: the ranks of --tensor share tokens between the layers that they cut",
        BOOLEAN,
        known_as=instead("use {option}", "sequence-parallel"),
    )
    tensor_styles: str | None = option(
        None,
        'a TOML file with the cuts of parameters, such as "blocks.*.up" = "column"; none: the table or plan of the '
        "model",
        optional(NAME),
    )
    experts: int = option(
        1,
        "number of ranks that share experts; they split the batch as those of --data do",
        COUNT,
        known_as=same_as("ep ep-size expert-parallel-size expert-model-parallel-size"),
    )
    moe: str = option(
        "tensor",
        "what the ranks of --tensor hold of experts: a part of each, or whole ones",
        choice("tensor", "expert"),
    )
    zero: int = option(
        0,
        "ZeRO: ranks share the optimizer's state (1), the gradients, too (2), the parameters, too (3)",
        ZERO_STAGE,
        brief="ZeRO: share optimizer state (1), gradients (2), all (3)",
        known_as=same_as("zero-stage")
        | instead("use {option} 3", "fsdp")
        | instead("use {option} 1, 2 or 3", "deepspeed sharding"),
    )
    offload: str = option(
        "none",
        "where to keep master weights and optimizer state: on the device (none), the host, or disk",
        choice("none", "cpu", "disk"),
        known_as=instead("use {option} cpu", "cpu-offload offload-optimizer"),
    )
    offload_folder: str | None = option(
        None,
        "folder on a fast local disk for --offload disk and --stream-keep disk; none: that of temporary files",
        optional(NAME),
        per_rank=True,
    )
    allreduce: str = option(
        "auto",
        "algorithm that sums gradients over ranks; auto: by the number of ranks",
        choice("auto", "library", "direct", "ring", "two-level", formerly={"measured": "auto"}),
    )
    balance: str | tuple[int, ...] = option(
        "auto",
        "how to cut the model into stages: by times, measured once (auto) or on all ranks (measured), by FLOPs or "
        "memory, or by the number of units of each stage",
        either(COUNTS, "auto", "flops", "memory", "measured"),
    )
    halo: str = option(
        "layer",
        "exchange halos for each layer, or once for all layers of a block",
        choice("layer", "block", formerly={"auto": "layer"}),
    )
    stream: tuple[int, ...] | str | None = option(
        None,
        "process each rank's part of an image in this grid of tiles, one after the other, to save memory; none: all "
        "at once; auto: as few tiles as fit into --memory-limit",
        optional(either(SIDES, "auto")),
        brief="grid of tiles that each rank processes in turn",
    )
    memory_limit: int | None = option(
        None,
        "limit of every rank's peak memory for --stream auto, such as 6GiB",
        optional(BYTES),
        known_as=same_as("max-memory"),
    )
    stream_until: str | None = option(
        None, "the last streamed module; none: as far as margins are small beside tiles", optional(NAME)
    )
    stream_norm: str = option(
        "exact",
        "batch norm while streaming: exact: by the statistics of the whole batch, with further passes over all tiles; "
        "running or frozen: by the running statistics, which are updated or not",
        choice("exact", "running", "frozen"),
    )
    stream_segments: int | str | None = option(
        None,
        "number of segments of the streamed part, or norms: each norm is a segment of its own; their outputs are kept, "
        "so less is computed again; none: one, or with --stream auto the number with the least work",
        optional(either(COUNT, "norms")),
    )
    stream_keep: str | None = option(
        None,
        "where to keep the outputs of segments until the backward pass: on the device, the host, or disk, in "
        "--offload-folder; none: on the device, or with --stream auto where it takes the least time",
        optional(choice("device", "host", "disk")),
    )
    no_rule: str = option(
        "error",
        "what to do with an operator without a rule for tiles; gather: compute it whole on every rank",
        choice("error", "gather"),
    )
    threads: int | None = option(
        None,
        "number of threads of each rank; none: OMP_NUM_THREADS, or its share of the cores",
        optional(COUNT),
        per_rank=True,
    )
    device: str = option(
        "auto",
        "the device; auto: a GPU if there is one",
        choice("auto", "cpu", "cuda"),
        known_as=same_as("accelerator")
        | instead(
            "start one rank for each GPU or group of cores, as in mpirun -n {value}",
            "gpus devices num-gpus n-gpus nproc-per-node num-processes world-size np n num-ranks",
        )
        | instead(
            "name the hosts to mpirun, or let the cluster's scheduler choose them",
            "num-nodes nnodes hosts hostfile num-machines",
        )
        | instead(
            "leave it out: mpirun tells each rank its place",
            "local-rank rank node-rank master-addr master-port rdzv-endpoint rdzv-backend dist-url "
            "dist-backend backend",
        )
        | instead("use {option} cuda", "gpu cuda use-cuda")
        | instead("use {option} cpu", "cpu use-cpu no-cuda"),
    )
    gpu_wire: str = option(
        "auto",
        "how GPU tensors travel: by MPI directly, by MPI with copies on the host (staged), or by NCCL where the order "
        "is fixed",
        choice("auto", "direct", "staged", "nccl"),
    )
    keep_freed_memory: bool = option(
        True,
        "keep the memory of freed tensors for the next step: faster on CPUs, but a process grows to 1.7 times its need",
        BOOLEAN,
    )
    memory_check: str = option(
        "error",
        "what to do with a run that needs more memory than its nodes have; error: refuse a run that cannot fit, warn "
        "if it may not",
        choice("error", "warn", "none"),
    )
    hang_timeout: float = option(
        3600.0,
        "seconds without progress after which the job ends; less, once its work has needed less; 0: never",
        NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, the learning rate and its schedule."""

    optimizer: Any = option(
        AUTO,
        "a class of torch.optim, or your own such as my_code.py:Lion; auto: AdamW",
        PART,
        brief="a class of torch.optim, or your own",
        known_as=same_as("opt optim optimizer-name"),
    )
    lr: float = option(
        AUTO,
        "the learning rate; auto: by the task, 0.01 for SGD, or the default of another optimizer",
        or_auto(NOT_NEGATIVE),
        brief="the learning rate",
        known_as=same_as("learning-rate base-lr lr0 initial-lr"),
    )
    optimizer_options: Mapping[str, Any] = option(
        AUTO,
        "keyword arguments of the optimizer, such as momentum=0.9; auto: for AdamW the weight decay for the task",
        or_auto(KEYWORDS),
        brief="such as weight_decay=0.05",
        known_as=same_as("opt-args optimizer-args optim-args")
        | instead("use {option} momentum={value} with --optimizer SGD", "momentum sgd-momentum")
        | instead("use {option} weight_decay={value}", "weight-decay wd")
        | instead("use {option} betas=(0.9,0.999)", "betas opt-betas adam-beta1 adam-beta2")
        | instead("use {option} eps={value}", "eps opt-eps adam-epsilon")
        | instead("use {option} momentum=0.9,nesterov=true with --optimizer SGD", "nesterov"),
    )
    scheduler: str = option("", "a class of torch.optim.lr_scheduler; empty: a constant learning rate", TEXT)
    scheduler_options: Mapping[str, Any] = option(
        {}, "keyword arguments of the scheduler, such as milestones=[30,60]", KEYWORDS
    )
    lr_schedule: str = option(
        AUTO,
        "how the learning rate falls to 0 over the steps: not (constant), linearly, or as half a cosine; auto: cosine, "
        "unless there is a --scheduler",
        choice(AUTO, "constant", "linear", "cosine"),
        known_as=same_as("lr-scheduler-type sched lr-policy")
        | instead("use {option} linear or cosine, or --scheduler with a class of PyTorch", "lr-scheduler")
        | instead("use --scheduler CosineAnnealingLR --scheduler-options T_max=EPOCHS,eta_min={value}", "min-lr"),
    )
    warmup: int | float = option(
        AUTO,
        "number or share of the first steps, in which the learning rate rises from a hundredth; auto: 0.05, or 0 for a "
        "constant rate",
        or_auto(COUNT_OR_SHARE),
        known_as=same_as("warmup-steps num-warmup-steps warmup-ratio")
        | instead("use {option} N, which counts steps, not epochs", "warmup-epochs lr-warmup-epochs"),
    )
    clip_norm: float | None = option(
        None,
        "clip the norm of the gradient; none: no limit",
        optional(POSITIVE),
        known_as=same_as("clip-grad clip-grad-norm max-grad-norm gradient-clip-val grad-clip gradient-clipping"),
    )
    clip_value: float | None = option(None, "clip each element of the gradient; none: no limit", optional(POSITIVE))


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning: initial weights, frozen parameters, rates by name, EMA."""

    weights: str | None = option(
        None,
        "initial weights: a file of PyTorch or safetensors, a run, torchvision's such as ResNet50_Weights.DEFAULT, or "
        "pretrained, those of the model's package, both from its cache; none: random",
        optional(NAME),
        brief="initial weights: a file, a run, or pretrained",
        known_as=same_as("pretrained-weights initial-checkpoint init-checkpoint load-from init-from finetune")
        | instead("use {option} pretrained", "pretrained"),
    )
    strict: bool = option(False, "refuse weights if any name or shape differs from the model's", BOOLEAN)
    freeze: tuple[str, ...] = option(
        (),
        "parameters to freeze, such as layer1.*,bn*",
        PATTERNS,
        known_as=same_as("freeze-layers")
        | instead("use {option} with patterns of names, such as layer1.*,bn*", "freeze-backbone"),
    )
    unfreeze: tuple[tuple[int, str], ...] = option(
        (), "frozen parameters to train from an epoch on, such as 3:layer4.*,5:layer3.*", EPOCHS
    )
    eval_mode: tuple[str, ...] = option(
        (), "modules that stay in evaluation mode during training, such as bn*,*.bn*", PATTERNS
    )
    lr_of: Mapping[str, float] = option(
        {}, "learning rates of parameters by name; the first match counts: head.*=0.01,layer4.*=0.001", NUMBERS
    )
    weight_decay_of: Mapping[str, float] = option(
        {}, "weight decays of parameters by name, such as *.bias=0,*bn*=0", NUMBERS
    )
    ema: float | None = option(
        None,
        "decay of an average of the weights, such as 0.999, for validation and ema.safetensors; none: no average",
        optional(PROPER_FRACTION),
        known_as=same_as("model-ema-decay ema-decay") | instead("use {option} 0.999", "model-ema"),
    )


# What options that are AUTO now were before tasks had defaults: runs and checkpoints of that time go on with these.
FORMERLY: Mapping[str, Any] = {
    "flip": "all",
    "optimizer": "SGD",
    "lr": 0.01,
    "optimizer_options": {},
    "lr_schedule": "constant",
    "warmup": 0,
    "epochs": 1,
}

USUAL_SIZE = (224, 224)  # of images, where nobody says another one

# Below flags and files, and above the defaults of tasks.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "finetune": {
        "weights": "pretrained",
        "mean": "imagenet",
        "lr": 1e-4,
        "optimizer_options": {"weight_decay": 0.05},
        "clip_norm": 1.0,
        "epochs": 20,
        "jitter": 0.2,
    },
    "mil": {
        "weights": "pretrained",
        "mean": "imagenet",
        "patches": 224,
        "aggregator": "gated-attention",
        "batch_size": 1,
        "flip": "all",
        "stream_norm": "frozen",
        "lr": 1e-4,
        "optimizer_options": {"weight_decay": 1e-5},
        "epochs": 50,
        "patience": 10,
    },
    "segment": {
        "task": "segment",
        "loss": "cross_entropy+dice",
        "lr": 1e-3,
        "optimizer_options": {"weight_decay": 0.01},
        "clip_norm": 1.0,
        "epochs": 50,
        "jitter": 0.2,
    },
    "gigapixel": {
        "weights": "pretrained",
        "mean": "imagenet",
        "batch_size": 1,
        "accumulate": 8,
        "fit": "crop",
        "flip": "all",
        "stream": "auto",
        "stream_norm": "frozen",
        "lr": 1e-4,
        "optimizer_options": {"weight_decay": 0.01},
        "epochs": 50,
    },
    "pretrain": {
        "lr": 5e-4,
        "optimizer_options": {"weight_decay": 0.05},
        "clip_norm": 1.0,
        "epochs": 100,
    },
}


@dataclass(frozen=True)
class Training:
    """Epochs and steps, the loss, precision, and validation."""

    preset: str = option(
        "none",
        "defaults for a kind of training; --print-config shows them",
        choice("none", *PRESETS),
        brief="defaults for finetune, mil, segment, gigapixel or pretrain",
        known_as=same_as("recipe"),
    )

    epochs: int = option(
        AUTO,
        "number of passes over all images; auto: by the task",
        or_auto(COUNT),
        brief="number of passes over all images",
        known_as=same_as("num-epochs max-epochs num-train-epochs n-epochs"),
    )
    accumulate: int = option(
        1,
        "number of batches of one step",
        COUNT,
        known_as=same_as("grad-accum-steps gradient-accumulation-steps accumulate-grad-batches accum-iter update-freq"),
    )
    max_steps: int | None = option(
        None,
        "stop after this number of steps; none: after the epochs",
        optional(COUNT),
        known_as=same_as("max-iter max-iters num-steps train-iters iterations total-steps max-train-steps"),
    )
    loss: Any = option(
        None,
        "the loss: cross_entropy, bce, dice, focal, mse, l1, huber, cox, or a sum such as dice+focal; or your own "
        "such as my_code.py:loss(outputs, targets); none: by the task",
        optional(PART),
        brief="cross_entropy, dice, ... or your own",
        known_as=same_as("criterion loss-fn loss-function"),
    )
    loss_options: Mapping[str, Any] = option(
        {}, "options of the loss, such as gamma=1.5, delta=0.5, ties=breslow, or arguments of your own", KEYWORDS
    )
    precision: str = option(
        "fp32",
        "the type to compute in",
        choice("fp32", "bf16", "fp16"),
        brief="fp32, bf16 or fp16",
        known_as=same_as("dtype mixed-precision amp-dtype")
        | instead("use {option} bf16 or {option} fp16", "amp")
        | instead("use {option} fp16", "fp16 half")
        | instead("use {option} bf16", "bf16"),
    )
    low_precision_weights: bool = option(
        False, "keep the weights in bf16 or fp16, too, with fp32 master weights in the optimizer", BOOLEAN
    )
    recompute: bool = option(
        False,
        "recompute activations in the backward pass, to save memory",
        BOOLEAN,
        brief="recompute activations, to save memory",
        known_as=instead(
            "use {option}",
            "gradient-checkpointing grad-checkpointing activation-checkpointing activation-checkpoint "
            "checkpoint-activations recompute-activations",
        ),
    )
    check_replicas: bool = option(False, "check after every epoch that replicas hold the same bits", BOOLEAN)
    seed: int = option(
        0, "the seed of weights, order and augmentation", SEED, known_as=same_as("random-seed manual-seed")
    )
    eval_every: int | None = option(
        1,
        "number of epochs between validations; none: no validation",
        optional(COUNT),
        known_as=same_as("check-val-every-n-epoch val-interval eval-freq")
        | instead(
            "run the command evaluate, or name images for validation with {option}",
            "do-eval test-only evaluate validate",
        )
        | instead("use {option} N, which counts epochs", "eval-steps"),
    )


@dataclass(frozen=True)
class Learning:
    """Metrics, weights of classes, the best weights, and early stopping."""

    metrics: tuple[Any, ...] = option(
        ("auto",),
        "metrics of validation besides the loss, such as auc,confusion, or your own: my_code.py:Metric; auto: by the "
        "task, and --monitor; none: no metrics",
        PARTS,
        known_as=same_as("metric eval-metric eval-metrics"),
    )
    class_weights: str | tuple[float, ...] | None = option(
        None,
        "weight of each class in the loss: a number for each, or balanced, inverse to its number of samples",
        optional(WEIGHTS),
        known_as=same_as("class-weight pos-weight"),
    )
    label_smoothing: float = option(
        0.0,
        "share of each label that is spread over all classes, in losses of probabilities",
        SHARE,
        known_as=same_as("smoothing label-smoothing-factor"),
    )
    monitor: str | None = option(
        None,
        "the metric that selects best.safetensors: val_loss, or a metric such as val_auc; none: with --patience by "
        "the task",
        optional(NAME),
        known_as=same_as("metric-for-best-model checkpoint-metric"),
    )
    monitor_mode: str = option(
        "auto",
        "whether lower (min) or higher (max) values of --monitor are better; auto: by the metric, or "
        "`higher_is_better` of your own",
        choice("auto", "min", "max"),
        known_as=instead("use {option} max", "greater-is-better"),
    )
    patience: int | None = option(
        None,
        "stop after this number of validations without improvement; none: never",
        optional(COUNT),
        known_as=same_as("early-stopping-patience")
        | instead("use {option} N, which counts validations that were no better", "early-stopping"),
    )


@dataclass(frozen=True)
class Run:
    """The folder of a run, checkpoints, reports and callbacks."""

    run_folder: str | None = option(
        None,
        "folder of the run; none: runs/MODEL-DATE-TIME",
        optional(NAME),
        per_rank=True,
        brief="folder of the run",
        known_as=same_as("output-dir output out-dir save-dir log-dir logdir default-root-dir work-dir exp-dir"),
    )
    save_every: str | int = option(
        "epoch",
        "when to save a checkpoint: after every epoch, after this number of steps, or never",
        either(COUNT, "epoch", "none"),
        known_as=same_as("save-steps checkpoint-interval every-n-train-steps")
        | instead("use {option} epoch, a number of steps, or none", "save-strategy save-freq"),
    )
    keep: int = option(
        2,
        "number of newest checkpoints to keep",
        COUNT,
        known_as=same_as("save-total-limit checkpoint-hist save-top-k"),
    )
    resume: str = option(
        "none",
        "resume: the run in --run-folder, if there is one (auto), or a run or checkpoint at this path",
        NAME,
        brief="auto, or the run or checkpoint to resume",
        known_as=same_as("resume-from resume-from-checkpoint ckpt-path")
        | instead("use {option} auto", "auto-resume")
        | instead("use {option} {value} to resume a run, or --weights {value} to begin with its weights", "checkpoint"),
    )
    callbacks: tuple[Any, ...] = option(
        (),
        "your objects with methods that the run calls, such as my_code.py:Notify",
        PARTS,
        per_rank=True,
        known_as=instead(
            "use {option} my_code.py:Logger with a callback that logs there",
            "wandb use-wandb log-wandb logger report-to",
        ),
    )
    log_interval: int = option(
        10,
        "number of steps between two reports",
        COUNT,
        known_as=same_as("log-every-n-steps print-freq logging-steps log-freq"),
    )
    tensorboard: bool = option(True, "write TensorBoard event files into the run folder", BOOLEAN, per_rank=True)
    dry_run: bool = option(
        False,
        "build everything, print the plan, and stop before the first step",
        BOOLEAN,
        brief="build everything, print the plan, and stop",
    )
    print_config: bool = option(False, "print all options as a TOML file, and stop", BOOLEAN, flag_only=True)


@dataclass(frozen=True)
class Config:
    """All options of a training run. Those of `FORMERLY` may be AUTO until `options.tasks.with_task` knows the task."""

    removed: ClassVar[tuple[str, ...]] = ("moe_pieces",)  # options that old configurations have, and nothing reads

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    slides: Slides = field(default_factory=Slides)
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
        if self.data.image_size == AUTO and self.slides.slides is None and self.slides.features is None:
            object.__setattr__(self, "data", replace(self.data, image_size=USUAL_SIZE))
        size, tiles = self.data.image_size, self.parallel.tiles
        if self.data.text is not None:
            object.__setattr__(self, "data", replace(self.data, image_size=(self.data.context,)))
            if set(tiles) == {(1, 1)}:
                object.__setattr__(self, "parallel", replace(self.parallel, tiles=((1,),) * len(tiles)))
        elif size == AUTO:
            return
        elif len(size) == 1:
            object.__setattr__(self, "data", replace(self.data, image_size=size * len(tiles[0])))
        elif len(size) == 3:
            deep = tuple((1, *grid) if len(grid) == 2 else grid for grid in tiles)
            object.__setattr__(self, "parallel", replace(self.parallel, tiles=deep))

    @staticmethod
    def below(values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the preset that `values` name gives options that they lack. Its rate and decay are for AdamW alone."""
        preset = PRESETS.get(values.get("preset", ""), {})
        if values.get("optimizer", AUTO) in (AUTO, "AdamW"):
            return preset
        return {name: value for name, value in preset.items() if name not in ("lr", "optimizer_options")}

    @property
    def samples_per_step(self) -> int:
        """How many samples all ranks together take for a step."""
        return self.data.batch_size * self.training.accumulate

    @property
    def model_name(self) -> str:
        """How messages and files of a run name the model."""
        return part_name(self.model.model)

    @property
    def streams_images(self) -> bool:
        """Whether ranks read tiles or patches of images one after the other, so that no rank has a whole image."""
        return self.parallel.stream is not None or self.model.patches is not None

    @property
    def source_noun(self) -> str:
        """What messages call a file with pixels: slide or image."""
        return "image" if self.slides.slides is None and self.slides.features is None else "slide"

    @property
    def sample_noun(self) -> str:
        """What messages call a sample: slide, a window of one, or image."""
        return "window" if self.source_noun == "slide" and self.data.fit == "crop" else self.source_noun


def parse(argv: Sequence[str]) -> Config:
    """The configuration that a command line asks for, without the program's name.

    Raises ConfigError with one message for the user; only `--help` exits.
    """
    return parse_options(Config, argv, f"mpirun -n RANKS {typed('train')} {USAGE}", DESCRIPTION)


def hang_timeout(argv: Sequence[str]) -> float:
    """How long a job that is started so may wait; the default, if it is to be refused."""
    try:
        return parse(argv).parallel.hang_timeout
    except ConfigError:
        return Config().parallel.hang_timeout
