"""Every option of a training run, in sections: `options.sections` has a module for each.

    mpi4dl train --config run.toml --batch-size 8

reads `run.toml`, whose tables are the sections below, and lets flags override it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpi4dl._commands import typed
from mpi4dl.options.declare import ConfigError, facts, parse_options, shared_options, to_toml
from mpi4dl.options.kinds import AUTO, part_name
from mpi4dl.options.presets import PRESETS, of_encoder
from mpi4dl.options.sections.data import Data
from mpi4dl.options.sections.model import Model
from mpi4dl.options.sections.optimizer import Optimizer, Tuning
from mpi4dl.options.sections.parallel import Parallel
from mpi4dl.options.sections.run import Run
from mpi4dl.options.sections.slides import Slides
from mpi4dl.options.sections.training import Learning, Training

__all__ = ["Config", "ConfigError", "Data", "Learning", "Model", "Optimizer", "Parallel", "Run", "Slides", "Training"]
__all__ += ["Tuning", "facts", "parse", "shared_options", "to_toml"]

USAGE = "[--config FILE] [--FLAG VALUE ...]"
DESCRIPTION = "Train an unmodified PyTorch model on images or text, over the ranks of an MPI job."

# Options that may be AUTO, which is what suits the task.
OF_THE_TASK = ("flip", "optimizer", "lr", "optimizer_options", "lr_schedule", "warmup", "epochs")

USUAL_SIZE = (224, 224)  # of images, where nobody says another one


@dataclass(frozen=True)
class Config:
    """All options of a training run. `OF_THE_TASK` may be AUTO until `options.tasks.with_task` knows the task."""

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
        if self.data.image_size == AUTO and self.slides.named is None:
            object.__setattr__(self, "data", replace(self.data, image_size=USUAL_SIZE))
        size, tiles = self.data.image_size, self.parallel.tiles
        if self.data.corpus:
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
        """What the preset and the encoder that `values` name give options that they lack.

        The rate and the decay of presets are for AdamW alone.
        """
        preset = PRESETS.get(values.get("preset", ""), {})
        if values.get("optimizer", AUTO) not in (AUTO, "AdamW"):
            preset = {name: value for name, value in preset.items() if name not in ("lr", "optimizer_options")}
        return {**preset, **of_encoder(values)}

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
        return self.parallel.stream is not None or self.model.sees_patches


def parse(argv: Sequence[str]) -> Config:
    """The configuration that a command line asks for, without the program's name.

    Raises ConfigError with one message for the user; only `--help` exits.
    """
    return parse_options(Config, argv, f"mpirun -n RANKS {typed('train')} {USAGE}", DESCRIPTION)


def default_options() -> dict[str, str]:
    """The defaults of all options that runs share, as a TOML file has them."""
    return shared_options(Config())


def default_toml() -> str:
    return to_toml(Config())


def hang_timeout(argv: Sequence[str]) -> float:
    """How long a job that is started so may wait; the default, if it is to be refused."""
    try:
        return parse(argv).parallel.hang_timeout
    except ConfigError:
        return Config().parallel.hang_timeout
