"""Whole-slide images: their table, resolution, tissue, and folds by patient."""

from dataclasses import dataclass
from typing import Any

from mpi4dl.options.declare import instead, option, same_as
from mpi4dl.options.kinds import (
    COUNT,
    COUNT_OR_ZERO,
    COVARIATES,
    NAME,
    POSITIVE,
    SHARE,
    choice,
    either,
    optional,
    some_of,
)

ALL_FOLDS = "all"


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
        None,
        "the folder of the slides, and of folders in it; none: that of the table",
        optional(NAME),
        needs=("slides", "features"),
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
        needs=("slides", "features"),
    )
    magnification: float | None = option(
        None,
        "read slides at this magnification, such as 20 for 0.5 microns per pixel",
        optional(POSITIVE),
        known_as=same_as("mag"),
        needs=("slides", "features"),
    )
    level: int | None = option(
        None,
        "read slides at this level of their pyramid",
        optional(COUNT_OR_ZERO),
        known_as=same_as("patch-level"),
        needs=("slides", "features"),
    )
    assume_mpp: float | None = option(
        None,
        "microns per pixel of level 0 of slides that do not say it",
        optional(POSITIVE),
        needs=("slides", "features"),
    )
    background: str = option(
        "auto",
        "what whole slides show where there is no tissue: white, which streaming skips, or what was scanned (keep); "
        "auto: white by --fit own",
        choice("auto", "white", "keep"),
        needs=("slides", "features"),
    )
    tissue: float | str = option(
        "otsu",
        "how the tissue of a slide is found: pixels with more than this saturation (0 to 1), or than Otsu's threshold",
        either(SHARE, "otsu"),
        needs=("slides", "features"),
    )
    leave_out: tuple[str, ...] = option(
        (),
        "what is not taken for tissue: pen marks (pen), regions out of focus (blur), or pen,blur; default: nothing",
        some_of("pen", "blur"),
        known_as=instead("use {option} pen", "remove-penmarks") | instead("use {option} pen,blur", "remove-artifacts"),
        needs=("slides", "features"),
    )
    stain_norm: str = option(
        "none",
        "make the colours of all slides those of a reference, by their stains (macenko), or by mean and spread of "
        "their colours (reinhard)",
        choice("none", "macenko", "reinhard"),
        known_as=same_as("stain-normalization color-norm"),
        needs=("slides", "features"),
    )
    stain_reference: str | None = option(
        None,
        "the reference of --stain-norm: a slide or a picture, or the numbers that a run printed of one; none: built in",
        optional(NAME),
        needs=("stain_norm",),
        known_as=same_as("stain-target"),
    )
    most_patches: int | None = option(
        None,
        "number of patches of a slide that are drawn at random in each epoch of training; none: all",
        optional(COUNT),
        known_as=same_as("bag-size max-patches"),
        needs=("slides", "features"),
    )
    folds: int | None = option(
        None,
        "number of folds by patient for cross-validation; none: one split",
        optional(COUNT),
        known_as=same_as("k-fold num-folds"),
    )
    fold: int | str = option(
        0,
        "the fold that validates, from 0 on; its run is in the folder fold_N of --run-folder; all: train all --folds "
        "one after the other, which --resume auto continues, and print their metrics together",
        either(COUNT_OR_ZERO, ALL_FOLDS),
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
        None,
        "the column of annotations for --task segment, or of targets for --task image; none: by the usual names",
        optional(NAME),
    )
    weight_column: str | None = option(
        None,
        "the column of the weight of each sample in the loss of training, 0 or more; none: all weigh alike",
        optional(NAME),
        known_as=same_as("sample-weight sample-weights sample-weight-column"),
    )
    covariates: tuple[Any, ...] = option(
        (),
        "columns of patients, such as age,sex, that stand beside the embedding of a slide, with --patch-size or "
        "--features; site:class: its numbers are classes",
        COVARIATES,
        known_as=same_as("covariate-columns clinical-columns clinical-features clinical-vars"),
    )
    unannotated: str = option(
        "background",
        "what pixels without annotation are: the class background, or left out of loss and metrics",
        choice("background", "ignore"),
        needs=("slides", "features"),
    )
    annotation_origin: str = option(
        "level-0",
        "where coordinates of annotations begin: at the full level 0, or at the bounds that the scanner scanned, as in "
        "QuPath",
        choice("level-0", "bounds"),
        needs=("slides", "features"),
    )
    crops_each: int = option(
        1,
        "with --task segment and --fit crop: number of windows of --image-size that are drawn of a slide in each "
        "epoch, within tissue",
        COUNT,
        known_as=same_as("windows-each"),
        needs=("slides", "features"),
    )
    crops_on_classes: float = option(
        0.0,
        "share of these windows whose centre is drawn on an annotated class, each class equally often",
        SHARE,
        needs=("slides", "features"),
    )

    @property
    def named(self) -> str | None:
        """The slides, or else their features."""
        return self.slides or self.features
