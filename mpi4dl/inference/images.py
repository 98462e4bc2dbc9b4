"""The images that a trained model looks at: with labels, to be compared with, or any, wherever they lie."""

import glob
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from mpi4dl._files import read_regular
from mpi4dl._wording import counted, some
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.arrays import is_cifar, load_cifar, load_npz
from mpi4dl.datasets.base import BadImage, DatasetError, blaming, task_of
from mpi4dl.datasets.files import DEPTHS, Channels, is_zarr, open_image
from mpi4dl.datasets.kinds import PICTURES, SLIDES, VOLUMES, FileKind
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.listed import TEST, VALIDATION, File, ListedFiles, known_size, subfolders
from mpi4dl.datasets.samples import TABLE, open_table
from mpi4dl.datasets.sources import SampleFiles, paired_form
from mpi4dl.datasets.split import Named, Subset, in_whole
from mpi4dl.datasets.table import folded_column
from mpi4dl.datasets.transform import FITTED, as_fit
from mpi4dl.datasets.volumes import open_volume
from mpi4dl.inference.options import Evaluating, LabelledColumns, TableColumns, ToPredict
from mpi4dl.options.kinds import AUTO
from mpi4dl.options.sources import some_sizes
from mpi4dl.runs.description import Description
from mpi4dl.runs.samples import FILE as SAMPLES
from mpi4dl.runs.samples import RunSamples
from mpi4dl.training.data import shared, unlike_values
from mpi4dl.training.trained import TrainedOptions

LISTS = (".txt", ".lst")
PATTERN = frozenset("*?[")


def open_labelled(
    comm: Communicator, trained: TrainedOptions, source: str | None, columns: TableColumns | None = None
) -> tuple[Named, str]:
    """Images with labels of the kind that the model was trained for, the same on all ranks, and which they are.

    Without a `source` they are those that validated; `columns` are those of a table. Collective. Raises Refusal on all
    ranks.
    """
    _require_pictures(comm, trained, source)
    if source is None:
        found = trained.validation(comm)
        names = {found.name(index) for index in range(len(found))}  # one of all windows of a slide
        what = f"the {len(names)} images that validated in training"
    else:
        found, what = _shared(comm, lambda: _labelled(source, trained, columns or LabelledColumns()))
    comm.agree(difference(found, trained.about))
    return found, what


def _shared(comm: Communicator, opened: Callable[[], tuple[Named, str]]) -> tuple[Named, str]:
    """What `opened()` finds on rank 0, and says of it, on all ranks. Collective; raises Refusal on all ranks."""
    told = [""]

    def open_one() -> tuple[Named]:
        found, told[0] = opened()
        return (found,)

    return shared(comm, open_one)[0], comm.broadcast_object(told[0])


def difference(found: Named, about: Description) -> str | None:
    """The difference of labels, or images, from the kind of the training, in one sentence."""
    if task_of(found) != about.task:
        return f"the labels are to {task_of(found)}, but the model was trained to {about.task}"
    unlike = _other_channels(found, about)
    if unlike is not None:
        return unlike
    unlike = unlike_values(found, about.values)
    if unlike is not None:
        return unlike
    depth = getattr(in_whole(found)[0], "input_values", None)
    if depth and about.input_values and depth != about.input_values:
        return f"inputs have {DEPTHS[depth]}, but training had {DEPTHS[about.input_values]}"
    known = about.classes
    if not FORMS[about.task].classes and known and tuple(found.classes) != known[: len(found.classes)]:
        return f"the labels are {', '.join(found.classes[:10])}, but those of training are {', '.join(known[:10])}"
    return None


def _other_channels(found: Named, about: Description) -> str | None:
    """A difference in the number of channels, or of features, in one sentence."""
    if found.channels == about.channels:
        return None
    if about.options.get("features", '"none"') != '"none"':
        return (
            f"patches have {found.channels} features, but the model was trained on {about.channels}: embed the slides "
            "by the encoder of training"
        )
    return f"the images have {found.channels} channels, but the model was trained on {about.channels}"


def _labelled(source: str, trained: TrainedOptions, columns: TableColumns) -> tuple[Named, str]:
    """The images of a source, and which of them. Raises DatasetError, ConfigError."""
    about, axes = trained.about, len(trained.size)
    path, volumes, classes = Path(source).expanduser(), axes > 2, about.classes
    if path.suffix == ".npz":
        training, test = load_npz(path, axes)
        arrays = test or training
        if len(arrays.classes) <= len(classes):  # they are numbers, whatever training called them
            arrays.classes = classes
        return arrays, f"{path}: {'x_test' if test else 'x'}"
    if not volumes and is_cifar(path):
        return load_cifar(path)[1], f"the test images of {path}"
    if not path.exists():
        raise DatasetError(f"{source}: no such file or folder; expected a folder of images with labels, or an .npz")
    table = _table_at(path)
    folder, which = (path, "") if table else _part(path)
    if not table and not FORMS[about.task].in_folders:
        raise DatasetError(f"{source}: has no labels to {about.task}; {FORMS[about.task].where}")
    kind = VOLUMES if volumes else PICTURES
    values = {**_columns_of(trained, columns, table or folder, kind), "images": str(folder)}
    if table and FORMS[about.task].named_by_column:
        values["label_columns"] = values["label_columns"] or classes
    files = trained.with_values(values).files()
    if not table:
        return files, f"{len(files)} {files.kind.nouns} of {folder}{which}"
    return held_out(files, None)


def _table_at(path: Path) -> Path | None:
    """The table of labels that a source of images is, or has."""
    found = path if path.suffix.lower() == ".csv" else path / TABLE
    return found if found.is_file() else None


def held_out(files: SampleFiles, split: str | None) -> tuple[Subset, str]:
    """The samples of a table for a split, by default those for tests, or else for validation, or all; and which.

    Raises DatasetError if none is for this split.
    """
    splits = [row.split for row in files.rows]
    if split is not None and split not in splits:
        has = f"none is for {split}" if any(splits) else "it has no split"
        raise DatasetError(f"`part` {split}: {files.source}: {has}")
    chosen = split or next((each for each in ("test", "val") if each in splits), None)
    kept = [i for i, each in enumerate(splits) if chosen in (None, each)]
    of_split = "" if chosen is None else f"{chosen} "
    return Subset(files, kept), f"{len(kept)} {of_split}{files.kind.nouns} of {files.source}"


def _part(path: Path) -> tuple[Path, str]:
    """The folder to evaluate on: that for tests, of a source of several parts, or for validation."""
    names = subfolders(path)
    if paired_form(path) is not None:
        return path, ""
    for kind in (TEST, VALIDATION):
        found = [name for name in names if name.casefold() in kind]
        if len(found) == 1:
            return path / found[0], ", of the parts that are there"
    return path, ""


def open_any(comm: Communicator, trained: TrainedOptions, source: str) -> "UnlabelledFiles":
    """Images without labels: all below a folder, one file, what a pattern matches, or a list has, on all ranks.

    Collective. Raises Refusal on all ranks.
    """

    _require_pictures(comm, trained, source)
    about = trained.about
    pictures = partial(UnlabelledPictures, told=(about.channels, about.input_values))
    kind = pictures if trained.makes_pictures else UnlabelledFiles
    found, _ = _shared(comm, lambda: (_listed(source, len(trained.size) > 2, kind, trained.channels), ""))
    assert isinstance(found, UnlabelledFiles)
    if about.channels != found.channels:
        comm.agree(f"the images have {found.channels} channels, but the model was trained on {about.channels}")
    comm.agree(unlike_values(found, about.values))
    return found


def framed_for(
    comm: Communicator, asked: ToPredict | Evaluating, columns: TableColumns, trained: TrainedOptions
) -> TrainedOptions:
    """The options of training with other slides, and the image size in which these fit. Collective.

    Raises Refusal on all ranks for slides where training saw none, for features of slides likewise, and for columns of
    no other table.
    """
    slides, features = asked.slides, asked.features
    if slides is None and features is None:
        alone = next((each.name for each in fields(columns) if getattr(columns, each.name) is not None), None)
        labelled = isinstance(asked, Evaluating) and asked.images is not None
        table = comm.broadcast_object(labelled and _table_at(Path(str(asked.images)).expanduser()) is not None)
        other = f"`{alone}` is for a table of other slides or images: name one by `slides` or `images`"
        comm.agree(other if alone and not table else None)
        return trained
    comm.agree(trained.source.refusal(slides, features))
    size = trained.size if FITTED[as_fit(trained.fit)].windows else AUTO
    given: dict[str, Any] = {"slides": slides or features, "features": features, "image_size": size}
    given["slides_folder"] = asked.slides_folder
    given |= comm.from_first(lambda: _columns_of(trained, columns, Path(slides or features or ""), SLIDES))
    given["on_bad_image"] = "skip"  # which the predictions say
    return trained.framed(comm, given)


def _columns_of(training: TrainedOptions, columns: TableColumns, table: Path, kind: FileKind) -> dict[str, Any]:
    """The columns of another table: those that were asked for, else those of training that it has. Raises DatasetError.

    Other ones are found by the usual names.
    """
    table = table.expanduser()
    asked = {each.name: getattr(columns, each.name) for each in fields(columns)}
    trained = {name: training.value(name) for name in asked}
    names = {name: (value,) if isinstance(value, str) else value or () for name, value in trained.items()}
    header = (
        open_table(table, kind, {name for each in names.values() for name in each}).columns if table.is_file() else []
    )
    there = {folded_column(name) for name in header}
    kept = {name: trained[name] if {*map(folded_column, names[name])} <= there else None for name in asked}
    return {name: kept[name] if value is None else value for name, value in asked.items()}


def _require_pictures(comm: Communicator, trained: TrainedOptions, source: str | None) -> None:
    """Raise Refusal on all ranks if a model of slides, which have a resolution, is to look at pictures as they are."""
    of_slides = source is not None and trained.source.of_slides
    comm.agree("the model was trained on `slides`: name others by `slides`, not by `images`" if of_slides else None)


def open_files_of_run(comm: Communicator, trained: TrainedOptions, folder: Path, part: str) -> tuple[Named, str]:
    """The samples of a split, such as val or test, by the table that a run keeps in its folder, and which they are.

    Files that came since are not among them. Collective. Raises Refusal on all ranks.
    """
    kept = folder / SAMPLES

    def opened() -> tuple[Named, str]:
        if not kept.is_file():
            raise DatasetError(
                f"{folder}: has no {SAMPLES}, in which a run keeps which samples are for what: name others"
            )
        split: Any = trained.files().split(fraction=0.5, seed=0, split_file=kept)[0].whole
        indices = [i for i, row in enumerate(split.rows) if row.split == part]
        if not indices:
            raise DatasetError(f"`part` {part}: {kept}: no sample is for {part}")
        contents = {each.file: each.content for each in RunSamples.read(kept).samples}
        changed = [split.name(i) for i in indices if contents.get(split.name(i)) not in (None, _content(split, i))]
        told = f", of which {counted(len(changed), 'has', 'have')} other content since: {some(changed, 5)}"
        return Subset(
            split, indices
        ), f"the {len(indices)} {part} {split.kind.nouns} of the run{told if changed else ''}"

    found, which = _shared(comm, opened)
    comm.agree(difference(found, trained.about))
    return found, which


def open_to_evaluate(
    comm: Communicator,
    trained: TrainedOptions,
    folder: Path,
    images: str | None,
    columns: TableColumns,
    named: bool,
    part: str | None,
) -> tuple[Named, str]:
    """The images with labels that an evaluation is asked for, and which they are, on all ranks.

    `images` is a source of pictures, and `columns` those of its table. Of a model of slides `named` says that the
    options name those asked for; else they are the slides of a part of the run in this folder. Collective. Raises
    Refusal on all ranks.
    """
    of_files = images is None and trained.source.has_files
    comm.agree(
        None if of_files or part is None else "`part` is for the files that a run was trained on, or other `slides`"
    )
    if named:
        found, which = _shared(comm, lambda: held_out(trained.files(), part))
        comm.agree(difference(found, trained.about))
        return found, which
    if of_files:
        return open_files_of_run(comm, trained, folder, part or "val")
    return open_labelled(comm, trained, images, columns)


def _content(whole: Any, index: int) -> tuple[int, int | None]:
    return whole.files[index].num_bytes, whole.fingerprint(index)


def seen_before(images: Any, folder: Path) -> list[str]:
    """Warnings about patients that the run in this folder trained on, or chose its weights by; and about samples of no
    such patient that it did so with, by the bytes of their files, and of slides by their names. Raises ConfigError.
    """
    whole, indices = in_whole(images)
    rows, kept = getattr(whole, "rows", None), folder / SAMPLES
    if rows is None or not kept.is_file():
        return []
    of_patient, of_name, of_content = RunSamples.read(kept).split_of()
    patients, samples = (dict[str, set[str]]({"train": set(), "val": set(), "test": set()}) for _ in range(2))
    for index in indices:
        row, named = rows[index], whole.kind.tells_patients
        if row.patient in of_patient and (named or row.patient != row.name):
            patients[of_patient[row.patient]].add(row.patient)
            continue
        content = _content(whole, index) if hasattr(whole, "files") else None
        part = (of_name.get(row.name) if named else None) or of_content.get(content)
        if part is not None:
            samples[part].add(row.name)
    found = []
    for part, what in (("train", "trained on"), ("val", "used for validation")):
        for kind, names in (("patient", patients[part]), (whole.kind.noun, samples[part])):
            if names:
                seen = counted(len(names), f"{kind} was", f"{kind}s were")
                found.append(f"warning: {seen} {what}: {some(sorted(names), 5)}")
    return found


def open_any_slides(comm: Communicator, trained: TrainedOptions) -> Named:
    """The slides that the options name, without their labels, on all ranks. Collective; raises Refusal."""
    slides, _ = _shared(comm, lambda: (trained.source.open_files(labelled=False), ""))
    comm.agree(_other_channels(slides, trained.about) or unlike_values(slides, trained.about.values))
    return slides


class UnlabelledFiles(ListedFiles):
    """Images of which nothing is known."""

    classes: tuple[str, ...] = ()

    def label(self, index: int) -> Any:
        return 0


class UnlabelledPictures(UnlabelledFiles):
    """Pictures as their files store them, of which others are made; `told` are their number of channels and depth."""

    noun, are_made_from = "input", True

    def __init__(
        self, root: Path, files: Sequence[File], volumes: bool, channels: Channels, told: tuple[int, str | None]
    ) -> None:
        self._told = told
        super().__init__(root, files, channels=channels if isinstance(channels, tuple) else "all")
        self.values = None  # which are compared with those of the targets of training

    def _look(self) -> tuple[int, str | None]:
        return self._told


def _listed(
    source: str, volumes: bool, listed: "Callable[..., UnlabelledFiles]", channels: Channels
) -> UnlabelledFiles:
    path, kind = Path(source).expanduser(), VOLUMES if volumes else PICTURES
    what, suffixes = kind.nouns, kind.suffixes
    if is_zarr(path):
        root, found, problem = path.parent, [File(path.name, known_size(path))], ""
    elif path.is_dir():
        root, found = path, [File(name, known_size(path / name)) for name in kind.below(path)[0]]
        problem = f"{path}: has no {what}, which end in {' '.join(suffixes)}"
    elif path.suffix.lower() in LISTS and path.is_file():
        root, found = _from_list(path)
        problem = f"{path}: names no image; expected the path of one in each line"
    elif path.is_file():
        if not path.name.lower().endswith(suffixes):
            _require_image(path, volumes)
        root, found, problem = path.parent, [File(path.name, known_size(path))], ""
    elif PATTERN & set(source):
        names = sorted(
            name for name in glob.glob(str(path), recursive=True) if is_zarr(Path(name)) or not Path(name).is_dir()
        )
        root, found = Path(), [File(name, known_size(Path(name))) for name in names]
        problem = f"{source}: no file matches this"
    else:
        raise DatasetError(f"{source}: no such file or folder; expected {what}, a folder of them, a pattern, or a list")
    if not found:
        raise DatasetError(problem)
    (name, times), *_ = Counter(each.name for each in found).most_common(1)
    if times > 1:
        raise DatasetError(f"{source}: names {name} twice")
    return listed(root, found, volumes, channels)


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


def _from_list(path: Path) -> tuple[Path, list[File]]:
    """The files that a list names, a line each, from its folder on, or from here."""
    with blaming(path, "cannot be read as a list of images"):
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    beside = any((path.parent / name).exists() for name in names)
    root = path.parent if beside else Path()
    return root, [File(name, known_size(root / name)) for name in names]


def seen_of(source: Sequence[int], frame: Sequence[int]) -> float:
    """The share of an image's pixels that its centre of the size of `frame` has."""
    return prod(min(a, b) for a, b in zip(source, frame, strict=True)) / prod(source)


class Coverage:
    """How much of its images a model sees: `crops` if that may be the centre alone. Collective.

    Raises Refusal on all ranks if images would be cropped, and nobody asked for that.
    """

    def __init__(self, comm: Communicator, model: Any, images: Named, whole: bool = False) -> None:
        self.frame, self.may_crop = model.trained.size, model.may_crop
        self.crops = FITTED[model.fit].windows and not whole
        self.shares: list[float] = []
        self.remarks: list[str] = []
        if not self.crops:
            return
        shares = comm.from_first(lambda: [seen_of(size, self.frame) for size in some_sizes(images)])
        if shares and min(shares) < 1:
            comm.agree(None if self.may_crop else self.refusal("the model", min(shares)))
            told = f"{100 * min(shares):.3g} % to {100 * max(shares):.3g} %"
            self.remarks.append(f"the model sees the centre of each image alone: of {len(shares)} looked at {told}")

    def refusal(self, what: str, share: float) -> str:
        frame = "x".join(map(str, self.frame))
        return (
            f"{what} would see the centre of {frame} pixels alone, {100 * share:.3g} % of an image: `fit` auto cropped "
            "large images in training; choose `fit` crop to see that part alone, or `fit` resize for whole images"
        )

    def add(self, images: Named, index: int) -> float:
        """Add an image; the share that the model saw. Raises Refusal for a part of it alone, and DatasetError."""
        share = seen_of(images.image(index).size, self.frame)
        if share < 1 and not self.may_crop:
            raise Refusal(self.refusal(images.name(index), share))
        self.shares.append(share)
        return share

    def summary(self) -> list[str]:
        if not self.shares or min(self.shares) == 1:
            return []
        mean, least = (100 * each for each in (sum(self.shares) / len(self.shares), min(self.shares)))
        return [f"the model saw {mean:.3g} % of the pixels of images on average, {least:.3g} % at least"]
