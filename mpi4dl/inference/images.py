"""The images that a trained model looks at: with labels, to be compared with, or any, wherever they lie."""

import csv
import glob
from collections.abc import Sequence
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

from mpi4dl._files import open_regular
from mpi4dl._wording import counted, some
from mpi4dl.comm import Communicator
from mpi4dl.datasets.arrays import is_cifar, load_cifar, load_npz
from mpi4dl.datasets.base import BadImage, DatasetError, task_of
from mpi4dl.datasets.files import open_image
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.listed import TEST, UNKNOWN, VALIDATION, File, ListedFiles, files_below, subfolders, suffixes_of
from mpi4dl.datasets.slides.tables import open_table
from mpi4dl.datasets.sources import ImageFolder, LabelledFolder, SegmentedFolder, is_segmented
from mpi4dl.datasets.split import Named, Subset
from mpi4dl.datasets.table import TABLE, folded_column
from mpi4dl.datasets.volumes import open_volume
from mpi4dl.inference.options import Evaluating, TableColumns, ToPredict
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.declare import value_of, with_values
from mpi4dl.options.kinds import AUTO
from mpi4dl.runs.description import Description
from mpi4dl.tasks.task import TASKS
from mpi4dl.training.data import LOOKED_AT, SPLIT, open_images, read_as_trained, shared, unlike_values

LISTS = (".txt", ".lst")
PATTERN = frozenset("*?[")


def open_labelled(comm: Communicator, config: Config, about: Description, source: str | None) -> tuple[Named, str]:
    """Images with labels of the kind that the model was trained for, the same on all ranks, and which they are.

    Without a `source` they are those that validated. Collective. Raises Refusal on all ranks.
    """
    _require_pictures(comm, config, source)
    if source is None:
        if config.slides.slides is not None:  # of several columns of a table, those that were learnt
            config = with_values(config, {"task": about.task})
        found = open_images(comm, config).validation
        names = {found.name(index) for index in range(len(found))}  # one of all windows of a slide
        what = f"the {len(names)} images that validated in training"
    else:
        told: list[str] = []

        def open_twice() -> tuple[Named, Named]:
            images, which = _labelled(source, config, about)
            read_as_trained((images, images), about.values)
            told.append(which)
            return images, images

        found, _ = shared(comm, open_twice)
        what = comm.broadcast_object("".join(told))
    require_alike(comm, found, about)
    return found, what


def require_alike(comm: Communicator, found: Named, about: Description) -> None:
    """Raises Refusal on all ranks if labels, or images, are of another kind than in training."""
    comm.agree(_unlike(found, about))


def _unlike(found: Named, about: Description) -> str | None:
    """A difference from the training, in one sentence."""
    if task_of(found) != about.task:
        return f"the labels are to {task_of(found)}, but the model was trained to {about.task}"
    unlike = _other_channels(found, about)
    if unlike is not None:
        return unlike
    unlike = unlike_values(found, about.values)
    if unlike is not None:
        return unlike
    known = about.classes
    if not FORMS[about.task].classes and known and tuple(found.classes) != known[: len(found.classes)]:
        return f"the labels are {', '.join(found.classes[:10])}, but those of training are {', '.join(known[:10])}"
    return None


def _other_channels(found: Named, about: Description) -> str | None:
    """A difference in the number of channels, or of features, in one sentence."""
    if found.channels == about.channels:
        return None
    if about.options.get("features", "none") != "none":
        return (
            f"patches have {found.channels} features, but the model was trained on {about.channels}: embed the slides "
            "by the encoder of training"
        )
    return f"the images have {found.channels} channels, but the model was trained on {about.channels}"


def _labelled(source: str, config: Config, about: Description) -> tuple[Named, str]:
    """The images of a source, and which of them. Raises DatasetError."""
    path, volumes, classes = Path(source).expanduser(), len(config.data.image_size) > 2, about.classes
    if path.suffix == ".npz":
        training, test = load_npz(path, len(config.data.image_size))
        arrays = test or training
        if len(arrays.classes) <= len(classes):  # they are numbers, whatever training called them
            arrays.classes = classes
        return arrays, f"{path}: {'x_test' if test else 'x'}"
    if not volumes and is_cifar(path):
        return load_cifar(path)[1], f"the test images of {path}"
    if not path.exists():
        raise DatasetError(f"{source}: no such file or folder; expected a folder of images with labels, or an .npz")
    if path.suffix.lower() == ".csv" or (path / TABLE).is_file():
        root, table = (path, None) if path.is_dir() else (path.parent, path)
        listed = LabelledFolder(root, table, about.task, _columns(about), volumes, classes)
        numbers, which = listed.held_out()
        return Subset(listed, numbers), f"{len(numbers)} images of {table or root / TABLE}{which}"
    folder, which = _part(path)
    if TASKS[about.task].dense:
        masked = SegmentedFolder(folder, classes, None, config.data.ignore_index, volumes)
        return masked, f"{len(masked)} images of {folder}{which}"
    if about.task != "classify":
        raise DatasetError(f"{source}: has no labels to {about.task}; {FORMS[about.task].where}")
    images = ImageFolder(folder, classes, volumes)
    return images, f"{len(images)} images of {folder}{which}"


def _columns(about: Description) -> tuple[str, ...] | None:
    """The columns of a table that are numbers to be predicted; None of the one that is the class, or of survival."""
    return about.classes if FORMS[about.task].named_by_column else None


def _part(path: Path) -> tuple[Path, str]:
    """The folder to evaluate on: that for tests, of a source of several parts, or for validation."""
    names = subfolders(path)
    if is_segmented(path):
        return path, ""
    for kind in (TEST, VALIDATION):
        found = [name for name in names if name.casefold() in kind]
        if len(found) == 1:
            return path / found[0], ", of the parts that are there"
    return path, ""


def open_any(comm: Communicator, config: Config, about: Description, source: str) -> "UnlabelledFiles":
    """Images without labels: all below a folder, one file, what a pattern matches, or a list has, on all ranks.

    Collective. Raises Refusal on all ranks.
    """

    _require_pictures(comm, config, source)

    def opened() -> tuple[UnlabelledFiles, UnlabelledFiles]:
        files = _listed(source, len(config.data.image_size) > 2)
        files.read_as_trained(about.values)
        return files, files

    found, _ = shared(comm, opened)
    assert isinstance(found, UnlabelledFiles)
    if about.channels != found.channels:
        comm.agree(f"the images have {found.channels} channels, but the model was trained on {about.channels}")
    comm.agree(unlike_values(found, about.values))
    return found


def framed_for(comm: Communicator, asked: ToPredict | Evaluating, columns: TableColumns, config: Config) -> Config:
    """The configuration of training with other slides, and the image size in which these fit. Collective.

    Raises Refusal on all ranks for slides where training saw none, for features of slides likewise, and for columns of
    no other slides.
    """
    slides, features = asked.slides, asked.features
    if slides is None and features is None:
        alone = next((each.name for each in fields(columns) if getattr(columns, each.name) is not None), None)
        comm.agree(None if alone is None else f"`{alone}` is for a table of other slides: name it by `slides`")
        return config
    problem, on_features = None, config.slides.features is not None
    if config.slides.slides is None:
        problem = "`slides` is for a model that was trained on `slides`: name pictures by `images`"
    elif on_features and features is None:
        problem = "the model was trained on `features`: name those of other slides, which mpi4dl embed writes"
    elif features is not None and not on_features:
        problem = "`features` is for a model that was trained on `features`: leave it out, and name `slides` alone"
    comm.agree(problem)
    from mpi4dl.training.setup import framed

    size = config.data.image_size if config.data.fit == "crop" else AUTO
    given: dict[str, Any] = {"slides": slides or features, "features": features, "image_size": size}
    given["slides_folder"] = asked.slides_folder
    with comm.together((ValueError, OSError)):
        named = _columns_of_slides(config, columns, Path(slides or features or "")) if comm.rank == 0 else None
    given |= comm.broadcast_object(named)
    given["on_bad_image"] = "skip"  # which the predictions say
    return framed(with_values(config, given), comm)


def _columns_of_slides(config: Config, columns: TableColumns, table: Path) -> dict[str, Any]:
    """The columns of another table: those that were asked for, else those of training that it has. Raises DatasetError.

    Other ones are found by the usual names.
    """
    table = table.expanduser()
    asked = {each.name: getattr(columns, each.name) for each in fields(columns)}
    trained = {name: value_of(config, name) for name in asked}
    names = {name: (value,) if isinstance(value, str) else value or () for name, value in trained.items()}
    header = open_table(table, {name for each in names.values() for name in each}).columns if table.is_file() else []
    there = {folded_column(name) for name in header}
    kept = {name: trained[name] if {*map(folded_column, names[name])} <= there else None for name in asked}
    return {name: kept[name] if value is None else value for name, value in asked.items()}


def _require_pictures(comm: Communicator, config: Config, source: str | None) -> None:
    """Raise Refusal on all ranks if a model of slides, which have a resolution, is to look at pictures as they are."""
    of_slides = source is not None and config.slides.slides is not None
    comm.agree("the model was trained on `slides`: name others by `slides`, not by `images`" if of_slides else None)


def open_labelled_slides(
    comm: Communicator, config: Config, about: Description, part: str | None = None
) -> tuple[Named, str]:
    """The slides that a configuration names, with labels of the kind of training, and which they are, on all ranks.

    Of a table with a split they are those of a part, by default for tests, or else for validation. Collective. Raises
    Refusal on all ranks.
    """
    from mpi4dl.options.data import open_slides

    def opened() -> tuple[Named, Named]:
        found = open_slides(with_values(config, {"task": about.task}), classes=about.classes)
        parts = [row.part for row in found.rows]
        if part is not None and part not in parts:
            has = f"none is for {part}" if any(parts) else "it has no split"
            raise DatasetError(f"`part` {part}: {config.slides.slides}: {has}")
        chosen = part or next((each for each in ("test", "val") if each in parts), None)
        kept = Subset(found, [i for i, each in enumerate(parts) if chosen in (None, each)])
        return kept, kept

    found, _ = shared(comm, opened)
    require_alike(comm, found, about)
    assert isinstance(found, Subset)
    whole: Any = found.whole
    of_part = "" if len(found) == len(whole) else f"{whole.rows[found.indices[0]].part} "
    return found, f"{len(found)} {of_part}slides of {config.slides.slides}"


def open_slides_of_run(
    comm: Communicator, config: Config, about: Description, folder: Path, part: str
) -> tuple[Named, str]:
    """The slides of a part, such as val or test, by the split that a run keeps in its folder, and which they are.

    Slides that the table has got since are not among them. Collective. Raises Refusal on all ranks.
    """
    from mpi4dl.options.data import open_slides

    kept, missing = folder / SPLIT, None
    if comm.rank == 0 and not kept.is_file():
        missing = f"{folder}: has no {SPLIT}, in which a run keeps which slides are for what: name others by `slides`"
    comm.agree(comm.broadcast_object(missing))

    def opened() -> tuple[Named, Named]:
        whole = open_slides(with_values(config, {"task": about.task}), classes=about.classes)
        split: Any = whole.split(fraction=0.5, seed=0, split_file=kept)[0].whole
        indices = [i for i, row in enumerate(split.rows) if row.part == part]
        if not indices:
            raise DatasetError(f"`part` {part}: {kept}: no slide is for {part}")
        found = Subset(split, indices)
        return found, found

    found, _ = shared(comm, opened)
    require_alike(comm, found, about)
    return found, f"the {len(found)} {part} slides of the run"


def open_to_evaluate(
    comm: Communicator,
    config: Config,
    about: Description,
    folder: Path,
    images: str | None,
    named: bool,
    part: str | None,
) -> tuple[Named, str]:
    """The images with labels that an evaluation is asked for, and which they are, on all ranks.

    `images` is a source of pictures. Of a model of slides `named` says that the configuration names those asked for;
    else they are the slides of a part of the run in this folder. Collective. Raises Refusal on all ranks.
    """
    of_slides = config.slides.slides is not None
    comm.agree(None if of_slides or part is None else "`part` is for a model that was trained on `slides`")
    if named:
        return open_labelled_slides(comm, config, about, part)
    if of_slides and images is None:
        return open_slides_of_run(comm, config, about, folder, part or "val")
    return open_labelled(comm, config, about, images)


def _parts_of_run(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The part, such as train, of each patient and of each slide of a run; empty where the run keeps none.

    Raises OSError, ValueError.
    """
    kept = folder / SPLIT
    if not kept.is_file():
        return {}, {}
    with kept.open(newline="", encoding="utf-8-sig") as file:
        rows = [*csv.DictReader(file)]
    of_patient, of_slide = ({row.get(key, ""): row.get("split", "") for row in rows} for key in ("case_id", "slide_id"))
    return of_patient, of_slide


def seen_before(images: Any, folder: Path) -> list[str]:
    """Warnings about patients that the run in this folder trained on, or chose its weights by; and about slides, where
    a table does not name the patients as that of training did. Raises as above.
    """
    whole: Any = images.whole if isinstance(images, Subset) else images
    rows = [whole.rows[i] for i in (images.indices if whole is not images else range(len(images)))]
    of_patient, of_slide = _parts_of_run(folder)
    found = []
    for part, what in (("train", "trained on"), ("val", "used for validation")):
        patients = sorted({row.patient for row in rows if of_patient.get(row.patient) == part})
        others = (row.slide for row in rows if row.patient not in of_patient)
        slides = sorted({slide for slide in others if of_slide.get(slide) == part})
        for kind, names in (("patient", patients), ("slide", slides)):
            if names:
                seen = counted(len(names), f"{kind} was", f"{kind}s were")
                found.append(f"warning: {seen} {what}: {some(names, 5)}")
    return found


def open_any_slides(comm: Communicator, config: Config, about: Description) -> Named:
    """The slides that a configuration names, without their labels, on all ranks. Collective; raises Refusal."""
    from mpi4dl.options.data import open_slides

    def opened() -> tuple[Named, Named]:
        found = open_slides(config, labelled=False)
        return found, found

    slides = shared(comm, opened)[0]
    comm.agree(_other_channels(slides, about) or unlike_values(slides, about.values))
    return slides


class UnlabelledFiles(ListedFiles):
    """Images of which nothing is known."""

    classes: tuple[str, ...] = ()

    def label(self, index: int) -> Any:
        return 0


def _listed(source: str, volumes: bool) -> UnlabelledFiles:
    path, suffixes = Path(source).expanduser(), suffixes_of(volumes)
    what = "volumes" if volumes else "images"
    if path.is_dir():
        root, files = path, sorted(files_below(path, suffixes))
        found = [File(each.relative_to(root).as_posix(), size) for each, size in files]
        problem = f"{path}: has no {what}, which end in {' '.join(suffixes)}"
    elif path.suffix.lower() in LISTS and path.is_file():
        root, found = _from_list(path)
        problem = f"{path}: names no image; expected the path of one in each line"
    elif path.is_file():
        if not path.name.lower().endswith(suffixes):
            _require_image(path, volumes)
        root, found, problem = path.parent, [_file(path.name, path)], ""
    elif PATTERN & set(source):
        names = sorted(name for name in glob.glob(str(path), recursive=True) if not Path(name).is_dir())
        root, found = Path(), [_file(name, Path(name)) for name in names]
        problem = f"{source}: no file matches this"
    else:
        raise DatasetError(f"{source}: no such file or folder; expected {what}, a folder of them, a pattern, or a list")
    if not found:
        raise DatasetError(problem)
    twice = _twice([each.name for each in found])
    if twice is not None:
        raise DatasetError(f"{source}: names {twice} twice")
    return UnlabelledFiles(root, found, volumes)


def _require_image(path: Path, volumes: bool) -> None:
    """Raise DatasetError for one file that is none of those that a model looks at."""
    try:
        open_volume(path) if volumes else open_image(path)
    except BadImage as error:
        kind = "volume" if volumes else "image"
        raise DatasetError(
            f"{path} is no {kind} ({error.reason}): name {kind}s, a folder of them, a pattern, or a file that ends in "
            f"{' or '.join(LISTS)} with a path in each line"
        ) from error


def _twice(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def _file(name: str, path: Path) -> File:
    try:
        return File(name, path.stat().st_size)
    except OSError:  # which opening it will say
        return File(name, UNKNOWN)


def _from_list(path: Path) -> tuple[Path, list[File]]:
    """The files that a list names, a line each, from its folder on, or from here."""
    try:
        with open_regular(path) as file:
            lines = file.read().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read as a list of images: {error}") from error
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    beside = any((path.parent / name).exists() for name in names)
    root = path.parent if beside else Path()
    return root, [_file(name, root / name) for name in names]


def seen_of(source: Sequence[int], frame: Sequence[int]) -> float:
    """The share of an image's pixels that its centre of the size of `frame` has."""
    return prod(min(a, b) for a, b in zip(source, frame, strict=True)) / prod(source)


class Coverage:
    """How much of its images a model sees: `crops` if that may be the centre alone. Collective.

    Raises Refusal on all ranks if images would be cropped, and nobody asked for that.
    """

    def __init__(self, comm: Communicator, model: Any, images: Named, whole: bool = False) -> None:
        self.frame = model.config.data.image_size
        self.crops = model.fit == "crop" and not whole
        self.shares: list[float] = []
        self.remarks: list[str] = []
        if not self.crops:
            return
        shares: list[float] = []
        with comm.together((ValueError, OSError)):
            if comm.rank == 0:
                count = min(LOOKED_AT, len(images))
                for number in range(count):
                    try:
                        size = images.image(number * (len(images) - 1) // max(1, count - 1)).size
                    except BadImage:
                        continue
                    shares.append(seen_of(size, self.frame))
                if shares and min(shares) < 1 and not model.may_crop:
                    raise ConfigError(self.refusal("the model", min(shares)))
        shares = comm.broadcast_object(shares)
        if shares and min(shares) < 1:
            told = f"{100 * min(shares):.3g} % to {100 * max(shares):.3g} %"
            self.remarks.append(f"the model sees the centre of each image alone: of {len(shares)} looked at {told}")

    def refusal(self, what: str, share: float) -> str:
        frame = "x".join(map(str, self.frame))
        return (
            f"{what} would see the centre of {frame} pixels alone, {100 * share:.3g} % of an image: `fit` auto cropped "
            "large images in training; choose `fit` crop to see that part alone, or `fit` resize for whole images"
        )

    def add(self, share: float) -> None:
        self.shares.append(share)

    def summary(self) -> list[str]:
        """The summary of all images, in a line."""
        if not self.shares or min(self.shares) == 1:
            return []
        mean, least = (100 * each for each in (sum(self.shares) / len(self.shares), min(self.shares)))
        return [f"the model saw {mean:.3g} % of the pixels of images on average, {least:.3g} % at least"]


def require_sight(config: Config, about: Description, source: str) -> None:
    """Raises ConfigError for a model that sees no images."""
    if TASKS[about.task].of_text:
        raise ConfigError(
            f"{source} is `model` {config.model_name}, which was trained on text: continue text with mpi4dl generate"
        )
