"""Features of slides by a frozen encoder: `mpirun -n 4 mpi4dl embed --slides slides.csv --model timm/NAME --mpp 0.5`.

It writes one HDF5 file a slide. Started again, it continues with the slides that have none.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpi4dl._commands import runs
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl._wording import counted, duration
from mpi4dl.options.command import CommandLine, command
from mpi4dl.options.config import Data, Model, Parallel, Slides, Training
from mpi4dl.options.declare import ConfigError, instead, like, neutral, option, same_as
from mpi4dl.options.kinds import AUTO, BOOLEAN, COUNT, DEVIATIONS, MEANS, NAME, SHARE, choice, optional, or_auto
from mpi4dl.options.presets import of_encoder

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

USAGE = "--slides TABLE_OR_FOLDER --model MODEL [--FLAG VALUE ...]"
DESCRIPTION = "Write the features of all tissue patches of slides by a frozen encoder."


@dataclass(frozen=True)
class ToEmbed:
    """The slides, their resolution and tissue, and where features go."""

    slides: str | None = neutral(
        None,
        "a table with a line for each slide, such as slides.csv, whose labels are not read, or a folder of slides",
        optional(NAME),
        brief="a table of slides, or a folder of them",
        known_as=same_as("wsi-dir csv-path wsi-source"),
    )
    slides_folder: str | None = like(Slides, "slides_folder", changes_results=False)
    slide_column: str | None = like(Slides, "slide_column", changes_results=False)
    mpp: float | None = like(Slides, "mpp")
    magnification: float | None = like(Slides, "magnification")
    level: int | None = like(Slides, "level")
    assume_mpp: float | None = like(Slides, "assume_mpp")
    tissue: float | str = like(Slides, "tissue")
    leave_out: tuple[str, ...] = like(Slides, "leave_out")
    stain_norm: str = option(
        AUTO,
        "make the colours of all slides those of a reference: macenko or reinhard; auto: as in the training of "
        "--weights, or none",
        choice(AUTO, "none", "macenko", "reinhard"),
        known_as=same_as("stain-normalization color-norm"),
    )
    stain_reference: str | None = like(Slides, "stain_reference")
    min_tissue: float = option(
        0.0, "the share of tissue that a patch needs; 0: any", SHARE, known_as=same_as("min-tissue-proportion")
    )
    out: str = neutral(
        "features",
        "folder for the files; slides that are finished there are skipped",
        NAME,
        brief="the folder for NAME.h5 of each slide",
        known_as=same_as("output output-dir feat-dir features-dir job-dir"),
    )
    overwrite: bool = neutral(False, "embed all slides again, whatever the folder has", BOOLEAN)
    dry_run: bool = neutral(
        False, "list the slides, their numbers of patches, and the files that would be written, and stop", BOOLEAN
    )


@dataclass(frozen=True)
class Encoding:
    """The encoder, its weights, and how it sees patches."""

    model: Any = like(Model, "model")
    model_options: Mapping[str, Any] = like(Model, "model_options")
    weights: str | None = option(
        "pretrained",
        "weights of the encoder: a file of PyTorch or safetensors, a run, torchvision's such as "
        "ResNet50_Weights.DEFAULT, or pretrained, those of the model's package, both from its cache; none: random",
        optional(NAME),
        brief="a file, a run, or pretrained",
        known_as=same_as("checkpoint ckpt-path patch-encoder-ckpt-path")
        | instead("use {option} pretrained", "pretrained"),
    )
    patches: int = option(
        256, "side of the patches in pixels, at the resolution that is asked for", COUNT, called="patch_size"
    )
    patches_at_once: int = neutral(
        32, "number of patches that each rank encodes at once", COUNT, known_as=same_as("b batch-size feat-batch-size")
    )
    mean: tuple[float, ...] | str = option(
        AUTO,
        "mean that is subtracted from every pixel (0 to 1), for all channels or each, or imagenet; auto: that of the "
        "model in timm or torchvision, else 0.5",
        or_auto(MEANS),
    )
    std: tuple[float, ...] | str = option(
        AUTO, "divisor of every pixel after that; auto: that of the model, else 0.25", or_auto(DEVIATIONS)
    )
    precision: str = like(Training, "precision")


@dataclass(frozen=True)
class Execution:
    """Threads and devices of a rank."""

    num_workers: int = like(Data, "num_workers")
    threads: int | None = like(Parallel, "threads")
    device: str = like(Parallel, "device")
    hang_timeout: float = like(Parallel, "hang_timeout")


@dataclass(frozen=True)
class EmbedConfig:
    embedding: ToEmbed = field(default_factory=ToEmbed)
    encoder: Encoding = field(default_factory=Encoding)
    work: Execution = field(default_factory=Execution)

    @staticmethod
    def below(values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the encoder that `values` name gives the patches; `weights` may know another mean and deviation."""
        return {name: value for name, value in of_encoder(values).items() if name in ("patches", "mpp")}


@command(EmbedConfig, USAGE, DESCRIPTION)
def embed(comm: "Communicator", asked: CommandLine[EmbedConfig]) -> None:
    """Write the features of the slides that are asked for. Collective."""
    config, chosen = asked.config, asked.config.embedding
    with comm.together((ConfigError,)):
        if chosen.slides is None:
            raise ConfigError("`slides` is missing: a table with a line for each slide, or a folder of slides")

    from mpi4dl.inference.embedding import Embedding, open_encoder, training_options
    from mpi4dl.runs.stopping import HangTimeout

    began = time.monotonic()
    training = training_options(config, comm)
    patience = HangTimeout(config.work.hang_timeout if comm.size > 1 else 0.0)
    with patience.working("start"):
        encoder, remarks = open_encoder(comm, config, training)
    with patience.working("start"):
        embedding = Embedding(comm, config, training, encoder, patience)
    with closing(embedding):
        embedding.measure_stains()
        if comm.rank == 0:
            for line in (embedding.title(), *remarks, *embedding.remarks, *embedding.unstained):
                print(asked.spell(line), flush=True)
        embedding.find_tissue()
        if chosen.dry_run:
            for line in embedding.listed() if comm.rank == 0 else ():
                print(line)
        else:
            embedding.run()
            if comm.rank == 0:
                num, done, bad = len(embedding.slides), len(embedding.done), len(embedding.bad)
                told = f"{counted(num - done - bad, 'slide')} embedded in {duration(time.monotonic() - began)}"
                told += f", {done} done before" if done else ""
                print(told + (f", {bad} could not be read" if bad else ""), flush=True)
    for problem in embedding.bad.values() if comm.rank == 0 else ():
        print(f"could not be read: {problem}")
    bad_slides = counted(len(embedding.bad), "slide")
    told = f"{bad_slides} of {len(embedding.slides)} could not be embedded; the others are written"
    comm.agree(told if embedding.bad else None)


main = embed.main

if __name__ == "__main__":
    main()
