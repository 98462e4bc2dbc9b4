"""Images, volumes or text: their folder, size and augmentation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpi4dl.options.declare import instead, neutral, option, same_as
from mpi4dl.options.kinds import (
    ANGLE,
    AUTO,
    BOOLEAN,
    CALLS,
    CHANNELS,
    COUNT,
    COUNT_OR_ZERO,
    IMAGE_SIZE,
    KEYWORDS,
    NAME,
    NAMES,
    NOT_NEGATIVE,
    NUMBER,
    PART,
    PART_OR_PAIR,
    POSITIVE,
    PROPER_FRACTION,
    RANGE,
    SHARE,
    choice,
    optional,
    or_auto,
    per_channel,
)

TASK_NAMES = ("classify", "multilabel", "regress", "image", "segment", "survival", "language", "masked")

MEASURED = "measured"  # a mean, and a deviation: those of the training images


@dataclass(frozen=True)
class Data:
    """Images, volumes or text: their folder, size and augmentation."""

    images: str = option(
        "synthetic",
        "a folder of images or volumes: with one subfolder per class, with labels.csv, or with images and masks, or "
        "inputs and targets; an .npz file; or synthetic",
        NAME,
        brief="a folder, an .npz file, or synthetic",
        known_as=same_as("data-dir data-path datapath data-root dataset-dir train-dir dataset-path image-dir root")
        | same_as("data-root-dir csv labels labels-csv label-csv label-file labels-file")
        | instead("use {option} with a folder, or {option} synthetic", "app"),
    )
    dataset: Any = option(
        None,
        "your own dataset instead of --images, such as my_code.py:Slides; it gives the size of an image and reads "
        "boxes of it",
        optional(PART_OR_PAIR),
        known_as=instead("use --images FOLDER, or {option} for a dataset in Python", "dataset-name"),
    )
    dataset_options: Mapping[str, Any] = option(
        {}, "keyword arguments of the dataset, such as root=slides", KEYWORDS, needs=("dataset",)
    )
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
        known_as=same_as("val-split validation-split test-size val-ratio")
        | instead("use {option} 0.2, folders train and val, or a column split of the table", "val valid val-dir split"),
    )
    channels: Any = option(
        "auto",
        "channels of pictures: rgb, in colours of 8 bits; all, as files store them; or some, such as 4,3,2, counted "
        "from 1; auto: all of TIFF files of several bands and for --task image, else rgb",
        CHANNELS,
        known_as=same_as("bands"),
    )
    fit: str = option(
        "auto",
        "how images get the image size: resized, cropped, or padded with white; own: each keeps its size; auto: own "
        "for slides without masks, crop images of more than 8192 x 8192 px, resize all others",
        choice("auto", "resize", "crop", "pad", "own"),
        not_with=("text",),
    )
    flip: str = option(
        AUTO,
        "mirror training images at random: from left to right (horizontal), or along each axis (all, or --flip alone); "
        "auto: horizontal for pictures, where labels are classes",
        choice(AUTO, "none", "horizontal", "all", switch=("all", "none")),
        known_as=instead("use {option} horizontal or --no-flip", "hflip")
        | instead("use {option}, which mirrors along each axis", "vflip"),
        not_with=("text",),
    )
    rotate: str = option(
        "none",
        "turn training images at random: by 0 or 180 degrees (half), or by 0, 90, 180 or 270 degrees (quarter); "
        "images must be square or have their own size, or each patch turns in its place (--patch-size)",
        choice("none", "half", "quarter", switch=("quarter", "none")),
        known_as=same_as("rot90 random-rot90"),
        not_with=("text",),
    )
    rotate_degrees: float = option(
        0.0,
        "turn training images, or each patch in its place, by a random angle of at most so many "
        "degrees in both directions",
        ANGLE,
        known_as=same_as("degrees rotation-degrees random-rotation rotate-limit"),
        not_with=("text",),
    )
    scale: tuple[float, float] = option(
        (1.0, 1.0),
        "enlarge training images, or what each patch shows, by a random factor from LOW to HIGH, such as 0.9,1.1",
        RANGE,
        known_as=same_as("random-scale scale-limit zoom-range"),
        not_with=("text",),
    )
    random_crop: bool = option(
        False,
        "crop training images at a random place",
        BOOLEAN,
        known_as=instead("use {option}", "random-resized-crop"),
        not_with=("text",),
    )
    jitter: float = option(
        0.0,
        "range of random brightness, contrast and saturation of training images; 0: none",
        SHARE,
        known_as=same_as("color-jitter"),
        not_with=("text",),
    )
    stain_jitter: float = option(
        0.0,
        "range of random changes of stains in training images: factors of the concentrations of hematoxylin, eosin and "
        "DAB, and what is added to them; 0.05 is little, 0.2 much; 0: none",
        SHARE,
        known_as=same_as("hed-jitter stain-augmentation"),
        not_with=("text",),
    )
    mixup: float = option(
        0.0,
        "mixup: train on weighted means of two images and their labels, with weights from Beta(X, X); 0: none",
        NOT_NEGATIVE,
        known_as=same_as("mixup-alpha"),
        not_with=("text",),
    )
    transforms: Any = option(
        None,
        "your transform of pixels before normalization, each pixel by itself, such as my_code.py:darker(pixels)",
        optional(PART),
        not_with=("text",),
    )
    augment: tuple[str, ...] = option(
        (),
        "transforms of training images by name, of torchvision.transforms.v2 or as albumentations.NAME, such as "
        "RandomPosterize(bits=4),RandomGrayscale; those that need whole images or patches are refused where ranks or "
        "streaming cut these",
        CALLS,
        known_as=same_as("augmentations"),
        not_with=("text",),
    )
    sampling: str = option(
        "shuffled",
        "training images of an epoch: each once, or each class equally often",
        choice("shuffled", "balanced"),
        not_with=("text",),
    )
    mean: tuple[float, ...] | str = option(
        (0.5,),
        "mean that is subtracted from every pixel (0 to 1), for all channels or each, imagenet, or measured: that of "
        "each channel of the training images",
        per_channel(NUMBER, "imagenet", "half", MEASURED),
        not_with=("text",),
    )
    std: tuple[float, ...] | str | None = option(
        None,
        "divisor of every pixel after that; none: that of a --mean by name, else 0.25",
        optional(per_channel(POSITIVE, "imagenet", "half", MEASURED)),
        not_with=("text",),
    )
    label_columns: tuple[str, ...] | None = option(
        None, "columns of the table that are labels; none: by the usual names, or all", optional(NAMES)
    )
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
        "what to learn: one class or several labels of an image, numbers, a mask, an image, survival; for text the "
        "next token or masked tokens; auto: by the labels, language for text",
        choice("auto", *TASK_NAMES),
        brief="classify, segment, ...; auto: by the labels",
        known_as=same_as("problem-type"),
    )
    context: int = option(
        256,
        "number of tokens of a sample of text",
        COUNT,
        known_as=same_as("seq-length seq-len block-size max-seq-length sequence-length"),
        needs=("text",),
    )
    tokenizer: str = option(
        "bytes",
        "tokens of text: bytes, or byte pairs, such as bpe:8192",
        NAME,
        known_as=same_as("tokenizer-name"),
        needs=("text",),
    )
    document_mask: bool = option(
        False, "restrict attention to the document of each token, where a sample has several", BOOLEAN, needs=("text",)
    )
    num_workers: int = neutral(
        2,
        "number of threads on each rank that read images ahead",
        COUNT_OR_ZERO,
        per_rank=True,
        known_as=same_as("workers j dataloader-num-workers"),
    )
    on_bad_image: str = option("error", "what to do with an unreadable image", choice("error", "skip"))

    @property
    def corpus(self) -> tuple[str, ...]:
        """What `text` names; nothing of images."""
        return () if self.text is None else tuple(name.strip() for name in self.text.split(","))
