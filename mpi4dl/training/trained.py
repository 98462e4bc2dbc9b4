"""The options by which a model is built, as its users ask for them: `ModelOptions`, or `TrainedOptions` of a run.

No room above this one sees a configuration: what it wants to know of one is an attribute here.
"""

from collections.abc import Collection, Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from mpi4dl.comm import Communicator
from mpi4dl.datasets.base import printable
from mpi4dl.datasets.files import Channels
from mpi4dl.datasets.sources import SampleFiles
from mpi4dl.datasets.split import Named, in_whole
from mpi4dl.datasets.transform import Fit, View
from mpi4dl.options import parts
from mpi4dl.options.config import Config, parse, shared_options
from mpi4dl.options.data import build_views
from mpi4dl.options.declare import options_of, value_of, with_options, with_values
from mpi4dl.options.models import build_model
from mpi4dl.options.sources import source_of
from mpi4dl.results.names import CONFIG
from mpi4dl.runs.assembly import ModelAssembly, assemble
from mpi4dl.runs.description import FILE, Description, described_by, description_of, untrusted
from mpi4dl.tasks.task import TASKS, Task
from mpi4dl.training.data import open_images
from mpi4dl.training.setup import framed

T = TypeVar("T", bound="ModelOptions")


class ModelOptions:
    """The options of a model and of its samples.

    Attributes:
        name, part, options: the model by its name, or as it was given, and its own options.
        source: where samples come from; what depends on the kind of data is asked there.
        size: the image size; patch: the side of patches, or None; patches_at_once: how many a rank runs at once.
        fit: how images get that size, as it was asked for.
        mean, std: by which pixels are normalized.
        batch_size, num_workers, precision, hang_timeout: as the options of these names.
        streams: whether images are read box by box while the model runs.
    """

    def __init__(self, config: Config | None = None) -> None:
        self._config = config = Config() if config is None else config
        model, data = config.model, config.data
        self.name, self.part, self.options = config.model_name, model.model, model.model_options
        self.source, self.size = source_of(config), data.image_size
        self.patch, self.patches_at_once = model.patches, model.patches_at_once
        self.fit, self.mean, self.std = data.fit, data.mean, data.std
        self.batch_size, self.num_workers = data.batch_size, data.num_workers
        self.precision, self.hang_timeout = config.training.precision, config.parallel.hang_timeout
        self.streams = config.streams_images

    @classmethod
    def names(cls) -> Set[str]:
        return options_of(Config).keys()

    @classmethod
    def read(cls, options: Mapping[str, str]) -> "ModelOptions":
        """Those that a file names. Raises ConfigError."""
        return ModelOptions(with_options(Config(), options))

    @classmethod
    def of_run(cls, folder: Path) -> "ModelOptions":
        """Those of the run in a folder. Raises ConfigError for a file that is none of a run."""
        return ModelOptions(parse(["--config", str(folder / CONFIG)]))

    def with_own_model(self, comm: Communicator, folder: Path, asked: bool) -> "ModelOptions":
        """The options with the own model of the run in this folder where that is now, if it has one.

        The file of options is not signed: code that it names counts as the user's if the run's description, which is,
        names it with the same options. Collective. Raises Refusal on all ranks for code that must not be loaded.
        """
        text = self.part
        if not parts.is_own(text):
            return self

        def found() -> str:
            about, options = described_by(folder), shared_options(self._config)
            if about is None and not asked:
                raise untrusted(str(folder), "model", text)
            if about is None:
                return text
            same = all(about.options.get(name) == options[name] for name in ("model", "model_options"))
            return about.part("model", text, str(folder / FILE), same and about.is_ours(), asked)

        return self.with_values({"model": comm.from_first(found)})

    def value(self, name: str) -> Any:
        return value_of(self._config, name)

    def with_values(self: T, values: Mapping[str, Any]) -> T:
        """The same with other values of some options. Raises ConfigError."""
        return self._like(with_values(self._config, values))

    def with_reference(self: T) -> T:
        """The same with the numbers of the stains of a reference of slides. Raises ConfigError, DatasetError."""
        source: Any = self.source
        return self._like(source.with_reference())

    def _like(self: T, config: Config) -> T:
        return type(self)(config)

    def assemble(self, comm: Communicator, own: Collection[str], num_samples: int | None = None) -> ModelAssembly:
        """The plan, and the device of this rank. Collective; raises Refusal as `runs.assembly.assemble`."""
        return assemble(self._config, comm, own, num_samples=num_samples)

    def build(self, num_outputs: int, channels: int) -> nn.Module:
        return build_model(self._config, num_outputs, channels)


class TrainedOptions(ModelOptions):
    """The options of a training, and what it decided about the model and its images: `about`.

    Attributes:
        skips_glass: whether training left out what of slides is no tissue.
        in_bounds: whether coordinates of annotations begin where the scanner began.
        channels: which of pictures are read.
    """

    def __init__(self, config: Config, about: Description) -> None:
        super().__init__(config)
        self.about = about
        self.skips_glass = config.slides.background != "keep"
        self.in_bounds = config.slides.annotation_origin == "bounds"
        self.channels: Channels = config.data.channels

    def _like(self, config: Config) -> "TrainedOptions":
        return TrainedOptions(config, self.about)

    @classmethod
    def of(
        cls, comm: Communicator, weights: Path, folder: Path, trusts_code: bool, own: Mapping[str, Any]
    ) -> "TrainedOptions":
        """Those of weights, or of the run in their folder; with `own` parts instead of those of training. Collective.

        Raises Refusal on all ranks if there are none, or if they name code that must not be loaded, or that is other
        than it was.
        """
        about, ours = description_of(comm, weights, folder)
        with comm.together((ValueError, OSError)):
            config = about.config(str(weights), ours, trusts_code, **own)
        if source_of(config).of_slides:  # those of early runs were padded
            config = with_values(config, {"fit": source_of(config).fit_of((), about.fit)})
        return cls(config, about)

    def framed(self, comm: Communicator, values: Mapping[str, Any]) -> "TrainedOptions":
        """Those for other slides, with the image size in which these fit. Collective; raises Refusal on all ranks."""
        return self._like(framed(with_values(self._config, values), comm))

    @cached_property
    def task(self) -> Task:
        """The task of the training. The loss tells only whether classes of a mask may overlap, if it has a name."""
        loss = self._config.training.loss
        named = loss if isinstance(loss, str) and not parts.is_own(loss) else None
        options = self._config.training.loss_options if named or loss is None else {}
        return TASKS[self.about.task](self.about.num_outputs, named, options)

    @property
    def makes_pictures(self) -> bool:
        """Whether the model makes images out of files, each of which it sees at its own size."""
        return self.task.makes_images and self.source.has_files

    def view(self, fit: Fit) -> View:
        """How images become the inputs of the model. Raises ValueError, TypeError."""
        return build_views(self._config, self.about.channels, fit)[1]

    def files(self) -> SampleFiles:
        """The files that the options name, with labels of the kind of training. Raises ConfigError, DatasetError."""
        return source_of(with_values(self._config, {"task": self.about.task})).open_files(self.about.classes)

    def validation(self, comm: Communicator) -> Named:
        """The images that validated in training. Collective; raises Refusal on all ranks."""
        return open_images(comm, self.source).validation

    def remarks_on(self, images: Named) -> list[str]:
        """Remarks on covariates of samples. Raises DatasetError for those that cannot be."""
        if not self._config.slides.covariates:
            return []
        from mpi4dl.datasets.covariates import remarks

        whole, indices = in_whole(images)
        rows = [whole.rows[index] for index in indices]
        return [printable(line) for line in remarks(self._config.slides.covariates, rows, whole.source)]
