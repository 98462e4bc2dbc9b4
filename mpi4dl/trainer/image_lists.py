"""Which images a run trains on and validates with, kept in its folder, so that going on moves none of them.

    images.json     {"classes": [...], "fit": "resize", "training": {"cat/1.png": 3145, ...}, "validation": {...},
                     "values": null}

A name is the path from the folder of images on, a number its size in bytes, or null where it has none. `values` says
what values of volumes are read as.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._wording import counted
from mpi4dl.checkpoints.storage import write_durably
from mpi4dl.datasets.split import Named, Subset
from mpi4dl.datasets.view import Fit
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.trainer.folder import naming

FILE = "images.json"
MOST_NAMES = 3

Sizes = Mapping[str, int | None]


class ImageLists(NamedTuple):
    """The names and sizes of both parts of a run's images, their classes, and how they fill the image size."""

    classes: tuple[str, ...]
    fit: Fit
    training: Sizes
    validation: Sizes
    values: str | None = None

    @classmethod
    def of(cls, training: Named, validation: Named, fit: Fit) -> "ImageLists":
        values = getattr(training, "values", None)
        return cls(training.classes, fit, _sizes(training), _sizes(validation), values)

    @classmethod
    def before(cls, config: Config) -> "ImageLists | None":
        """The lists of the run that a configuration goes on with; None if there is none. Raises ConfigError."""
        resume, folder = config.run.resume, config.run.run_folder
        if resume == "none" or (resume == "auto" and folder is None):
            return None
        asked = Path(folder or "") if resume == "auto" else Path(resume)
        # A run's folder, or that of checkpoints in it, or one of these.
        for path in (asked, asked.absolute().parent, asked.absolute().parent.parent):
            if (path / FILE).is_file():
                return cls.read(path / FILE)
        return None

    @classmethod
    def read(cls, path: Path) -> "ImageLists":
        """Raises ConfigError for what is no such file."""
        try:
            found = json.loads(path.read_bytes())
            parts = [{str(name): size for name, size in found[part].items()} for part in ("training", "validation")]
            fit: Fit = "crop" if found["fit"] == "crop" else "resize"
            return cls(tuple(map(str, found["classes"])), fit, parts[0], parts[1], found.get("values"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: is not the list of a run's images, it is damaged ({type(error).__name__}): restore it, or "
                "remove it to split the images anew"
            ) from error

    def write(self, folder: Path) -> None:
        """Put them into the folder of a run, in place of older ones, at once or not at all. Raises OSError."""
        with naming(folder / FILE):
            write_durably(folder / FILE, json.dumps(self._asdict(), indent=1).encode())

    def validating(self) -> dict[str, bool]:
        """Of each image whether it validates."""
        return dict.fromkeys(self.training, False) | dict.fromkeys(self.validation, True)

    def changes(self, now: "ImageLists") -> Iterator[str]:
        """What to say of images that came, went or changed since these lists were made."""
        if now.classes != self.classes:
            yield f"the classes were {', '.join(self.classes)}, and are {', '.join(now.classes)}"
        before, after = {**self.training, **self.validation}, {**now.training, **now.validation}
        old, new = self.validating(), now.validating()
        for names, what in (
            ([name for name in before if name not in after], "is gone since"),
            ([name for name in after if name not in before], "is new"),
            ([name for name in after if name in before and after[name] != before[name]], "has another size"),
            ([name for name in after if name in before and new[name] > old[name]], "was trained on, and now validates"),
            ([name for name in after if name in before and new[name] < old[name]], "validated, and is now trained on"),
        ):
            if names:
                more = f" and {counted(len(names) - MOST_NAMES, 'other')}" if len(names) > MOST_NAMES else ""
                yield f"of the images, {', '.join(names[:MOST_NAMES])}{more} {what}"


def _sizes(dataset: Named) -> Sizes:
    whole: Any = dataset.whole if isinstance(dataset, Subset) else dataset
    indices = dataset.indices if isinstance(dataset, Subset) else range(len(dataset))
    files = getattr(whole, "files", None)
    return {whole.name(index): None if files is None else files[index].num_bytes for index in indices}
