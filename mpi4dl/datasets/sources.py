"""Sources of images or volumes: "synthetic", an .npz file, or files: a folder for each class, a table, or masks."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpi4dl._files import read_regular
from mpi4dl._wording import counted, some
from mpi4dl.datasets.arrays import Synthetic, is_cifar, load_cifar, load_npz
from mpi4dl.datasets.base import BadImage, DatasetError, blaming, task_of
from mpi4dl.datasets.files import (
    DEPTHS,
    SCALES,
    TARGET_SUFFIXES,
    Channels,
    StoredPicture,
    channel_names,
)
from mpi4dl.datasets.kinds import PICTURES, VOLUMES, FileKind
from mpi4dl.datasets.labels import FORMS, LabelForm, files_of, of_values
from mpi4dl.datasets.listed import (
    LAYOUT,
    TRAINING,
    File,
    ListedFiles,
    class_folders,
    files_below,
    known_size,
    mask_as_text,
    parts,
    spread,
    subfolders,
    text_of,
    visible,
    with_details,
)
from mpi4dl.datasets.masks import BLACK_AND_WHITE, IGNORE_INDEX, Mask, mask_suffixes, open_stored, values_in
from mpi4dl.datasets.samples import (
    TABLE,
    Sample,
    SampleTable,
    patients_of,
    read_samples,
    require_annotations,
    without_suffix,
)
from mpi4dl.datasets.split import Named, Subset, split, split_rows
from mpi4dl.datasets.table import require_apart


class SampleFiles(ListedFiles):
    """The files of a table of samples.

    Attributes:
        source: the table or folder.
        kind: what the files are.
        task: what the labels are for; labels_of: the same, and None without labels.
        classes: names of classes, or of the columns of numbers.
        rows: the lines of the table, one for each sample.
        columns: the column of each role; empty without a table.
    """

    def __init__(
        self, source: Path, root: Path, table: SampleTable, kind: FileKind, channels: Channels = "rgb"
    ) -> None:
        self.source, self.kind, self.rows, self.columns = source, kind, table.rows, table.columns
        self.labels_of, self.classes = table.task, table.classes
        self.task = table.task or "classify"
        labels = [0 if row.label is None else row.label for row in table.rows]
        files = [File(row.path, known_size(root / row.path), of) for row, of in zip(table.rows, labels, strict=True)]
        super().__init__(root, files, kind is VOLUMES, channels)
        depth = DEPTHS.get(self.values or "")
        of_bands = (f"images have {counted(self.channels, 'channel')} of {depth}",) if depth else ()
        self.remarks = (*of_bands, *table.remarks)

    @property
    def patients(self) -> list[str]:
        """The patient of each sample."""
        return [row.patient for row in self.rows]

    @property
    def tells_patients(self) -> bool:
        """Whether samples are of patients, rather than each its own."""
        return self.kind.tells_patients or any(row.patient != row.name for row in self.rows)

    def label_as_text(self, index: int) -> str | None:
        """What is to be learnt of a sample, with the microns per pixel and the weight that the table says."""
        row = self.rows[index]
        return with_details(self.mask_as_text(index) or text_of(row.label, self.classes), row.mpp, row.weight)

    def covariates_as_text(self, index: int) -> str:
        """The cells of the covariates of a sample; empty without any."""
        return ", ".join(f"{column}={cell or ''}" for column, cell in self.rows[index].covariates)

    def mask_as_text(self, index: int) -> str | None:
        """The mask of a sample that has one, by its name, size and checksum; None if masks are not read."""
        return None

    def split(self, validates: bool = True, **how: Any) -> tuple[Subset, Subset]:
        """The samples to train on and to validate with. No patient is in both.

        `how`: as `split_rows`. The dataset that both are parts of has rows with the parts that they are for, and
        remarks on them.

        Raises:
            DatasetError: a patient in two parts, nothing to train on, or nothing to validate with.
        """
        if self.labels_of is None:
            raise DatasetError(f"{self.root}: has no labels: name a table with a column such as label")
        whole = copy.copy(self)
        whole.rows, remarks = split_rows(
            self.rows, self.labels_of, self.classes, table=self.source, kind=self.kind, validates=validates, **how
        )
        found = [Subset(whole, [i for i, row in enumerate(whole.rows) if row.split == part]) for part in _TRAIN_VAL]
        for part, lacks in zip(found, ("to train on", "to validate with"), strict=True):
            if not len(part) and (validates or part is found[0]):
                raise DatasetError(
                    f"{self.source}: has no {self.kind.noun} {lacks}: add {self.kind.nouns}, or change the split"
                )
        weights = found[0].weights
        if weights is not None and not any(weights):
            first = whole.rows[found[0].indices[0]]
            raise DatasetError(
                f"{self.source}, line {first.line}: {self.columns['weight']!r} is 0, as of all {self.kind.nouns} to "
                "train on: give one a weight above 0"
            )
        if self.tells_patients:
            counts = [len({whole.rows[i].patient for i in part.indices}) for part in found]
            remarks += (f"{counted(counts[0], 'patient')} to train on + {counts[1]} to validate with",)
        whole.remarks = (*self.remarks, *self.described(), *remarks)
        return found[0], found[1]

    def described(self) -> tuple[str, ...]:
        """What was taken for what in the table."""
        taken = [f"{role} = {column}" for role, column in self.columns.items()]
        return (f"columns of the {self.kind.nouns}: {some(taken, len(taken))}",) if taken else ()


_TRAIN_VAL = ("train", "val")


# A folder with a folder for each class, or with masks of the same names in the folder `masks` beside a folder `images`;
# targets likewise.

CLASSES = "classes.txt"
_TABLES = (".csv", ".tsv", ".xlsx", ".xls", ".ods")  # how tables end that nobody named


def folder_table(root: Path, kind: FileKind, classes: tuple[str, ...] | None = None) -> SampleTable:
    """The files under `root/<class>/`, or those with a file each to learn; or such ones in folders train and val.

    `classes` fixes the classes and their order.

    Raises:
        DatasetError: no such folder, no classes or only one, a class without files, or one that is not in `classes`; no
            files, one without a mask or target, or with two.
    """
    form = paired_form(root)
    found = parts(root) if form is None else None
    if found is None:
        table = pair_table(root, form, kind) if form else _class_table(root, kind, classes)
        patients, remarks = patients_of([row.name for row in table.rows], kind, "a table can name the patients")
        rows = tuple(row._replace(patient=patient) for row, patient in zip(table.rows, patients, strict=True))
        inner = next((row.path.rpartition("/")[0] for row in rows if row.path.count("/") > 1), None)
        if inner is not None and all(row.patient == row.name for row in rows):
            told = f"{kind.nouns} of one subfolder, such as {inner}, may train and validate"
            remarks += (f"{told}: if it is of one patient, name patients in a table",)
        return table._replace(rows=rows, remarks=(*table.remarks, *remarks))
    form = paired_form(root / found.training)
    tables: list[SampleTable] = []
    for name, part in zip((found.training, found.validation), _TRAIN_VAL, strict=True):
        where, before = root / name, f"{name}/"
        own = pair_table(where, form, kind, before) if form else _class_table(where, kind, classes, before)
        tables.append(own._replace(rows=tuple(row._replace(split=part) for row in own.rows)))
        classes = own.classes
    train, val = tables
    return train._replace(rows=train.rows + val.rows, remarks=train.remarks + val.remarks)


def _class_table(root: Path, kind: FileKind, classes: tuple[str, ...] | None, before: str = "") -> SampleTable:
    found = class_folders(root)
    own = [path for path in root.iterdir() if visible(path.name) and path.name.lower().endswith(kind.suffixes)]
    if not found:
        loose = f"; it has {kind.nouns} of its own: move them into one sub-folder per class" if own else ""
        raise DatasetError(f"{root}: has no class folders{loose}; {LAYOUT}")
    if classes is None and len(found) < 2:
        hint = f": add {root / 'val'}, or give {root / found[0]}" if found[0].casefold() in TRAINING else ""
        raise DatasetError(f"{root}: has only one class folder, {found[0]!r}{hint}; a classifier needs two or more")
    require_apart(found, root)
    known = found if classes is None else classes
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise DatasetError(
            f"{root}: has the class {unknown[0]!r}, but the training set has only {', '.join(known)}: "
            f"rename or remove it, or add training {kind.nouns} of that class"
        )
    rows: list[Sample] = []
    for name in found:
        files, _ = kind.below(root / name)
        if not files:
            raise DatasetError(
                f"{root / name}: this class has no {kind.nouns}: add some, or remove the folder; "
                f"files count as {kind.nouns} if they end in {' '.join(kind.suffixes)}"
            )
        paths = [f"{before}{name}/{file}" for file in files]
        rows += [Sample(0, path, path, path, label=known.index(name)) for path in paths]
    left = f"{counted(len(own), f'{kind.noun} is', f'{kind.nouns} are')} of no class in {root}, and left out"
    return SampleTable("classify", known, tuple(rows), {}, (left,) * bool(own))


def paired_form(root: Path) -> LabelForm | None:
    """The form of labels of a folder that has images and a file for each, such as a mask; None of other folders."""
    found = (form for form in FORMS.values() if form.files and all((root / name).is_dir() for name in form.folders))
    return next(found, None)


def pair_table(root: Path, form: LabelForm, kind: FileKind, before: str = "") -> SampleTable:
    """The files of the first folder of the form with those of the second; names begin with `before`."""
    if paired_form(root) is not form:
        raise DatasetError(f"{root}: has {', '.join(subfolders(root)) or 'no folders'}; {form.where}")
    first, second = (root / name for name in form.folders)
    suffixes = TARGET_SUFFIXES if form.of_values else mask_suffixes(kind is VOLUMES)
    images = _by_name(first, kind.below(first)[0], kind.suffixes)
    others = _by_name(second, [path.relative_to(second).as_posix() for path in files_below(second, suffixes)], suffixes)
    if not images:
        raise DatasetError(f"{first}: has no {kind.nouns}; {form.where}")
    spare = len(others) - len(images)
    missing = [name for name in images if name not in others]
    endings = sorted(other.removeprefix(missing[0]) for other in others if missing and other.startswith(missing[0]))
    fitting = [each for each in endings if each[0] in "_-." and all(name + each in others for name in images)]
    if len(fitting) > 1:
        raise DatasetError(f"{second}: has {counted(len(fitting), form.files)} of each name, {some(fitting)}: keep one")
    if fitting:
        others, missing = {name: others[name + fitting[0]] for name in images}, []
    if missing:
        more = f", and {len(missing) - 1} others have none" if len(missing) > 1 else ""
        told = f"{first / images[missing[0]]}: has no {form.files}{more}: add {second / missing[0]}{suffixes[0]}"
        lossy = [name for name in (f"{missing[0]}.jpg", f"{missing[0]}.jpeg") if (second / name).exists()]
        told += f" instead of {lossy[0]}, since JPEG changes numbers" if lossy else ""
        raise DatasetError(f"{told}, or a file of this name that ends in {some(suffixes[1:])}")
    rows = []
    for name, file in images.items():
        path = f"{before}{first.name}/{file}"
        rows.append(Sample(0, path, path, path, annotation=f"{before}{second.name}/{others[name]}"))
    remarks = (f"{spare} {form.files}s of {second} have no image",) if spare else ()
    return SampleTable(form.task, (), tuple(rows), {}, remarks)


def _by_name(folder: Path, files: Sequence[str], suffixes: tuple[str, ...]) -> dict[str, str]:
    """Files below a folder by their path without the ending, in order. Raises DatasetError for two of one name."""
    found: dict[str, str] = {}
    for name in sorted(files):
        short = without_suffix(name, suffixes)
        if short in found:
            raise DatasetError(f"{folder}: has {found[short]} and {name}: one file of each name")
        found[short] = name
    return found


class PairedFiles(SampleFiles):
    """Files of a table of samples, each with a file of its own to learn, such as a mask: `annotations`.

    Raises:
        DatasetError: a file without one.
    """

    def __init__(
        self, source: Path, root: Path, table: SampleTable, kind: FileKind = PICTURES, channels: Channels = "rgb"
    ) -> None:
        super().__init__(source, root, table, kind, channels)
        require_annotations(source, table.rows, files_of(table.task))
        beside = source.parent if source.is_file() else root
        names = [str(row.annotation).replace("\\", "/") for row in table.rows]
        base = beside if (beside / names[0]).is_file() else root
        files = [File(name, known_size(base / name)) for name in names]
        self.annotations = _Targets(base, files, channels="all") if of_values(table.task) else ListedFiles(base, files)

    def lists(self) -> tuple[ListedFiles, ...]:
        return self, self.annotations

    def mask_as_text(self, index: int) -> str:
        return mask_as_text(self.annotations.name(index), self.annotations, index)


class _Targets(ListedFiles):
    noun = "target"


class TargetFiles(PairedFiles):
    """Pictures with a target each, a picture: `classes` are the names of the targets' channels.

    Attributes:
        values: the depth of all targets; input_values: that of all pictures.
        target_scale: how many times as large as their inputs they are.

    Raises:
        DatasetError: targets of another scale than the first, or pictures of other channels or depth than others.
    """

    noun = "input"

    def __init__(self, source: Path, root: Path, table: SampleTable, bands: tuple[int, ...] = ()) -> None:
        super().__init__(source, root, table, channels=bands or "all")
        targets = self.annotations
        for files in (self, targets):
            if files.values is None:
                files.image(0)  # which says why
        if self.values is None or targets.values is None:
            raise DatasetError(f"{source}: no picture can be read, or none of their targets")
        self.input_values, self.values, self.classes = self.values, targets.values, channel_names(targets.channels)
        self.target_scale = 0
        for index in spread(len(self)):
            try:
                image, target = self.image(index), self.label(index)
            except BadImage:  # which reading it will say
                continue
            scale = target.size[0] // image.size[0]
            target.scale = self.target_scale = self.target_scale or (scale if scale in SCALES else 1)
            target.require_size_of(image)
        self.remarks = (
            f"inputs have {counted(self.channels, 'channel')} of {DEPTHS[self.input_values]}, targets "
            f"{counted(targets.channels, 'channel')} of {DEPTHS[self.values]}"
            + (f", and {self.target_scale} times the height and width of inputs" if self.target_scale > 1 else ""),
            *table.remarks,
        )

    def label(self, index: int) -> StoredPicture:
        """The target of image `index`, its header read and its pixels not. Raises BadImage and OtherFile."""
        found: Any = self.annotations.image(index)
        found.scale = self.target_scale
        return found


def _class_names(path: Path) -> tuple[str, ...]:
    """The classes that a file names. Raises DatasetError."""
    with blaming(path, "cannot be read"):
        lines = [line.strip() for line in read_regular(path).decode("utf-8-sig").rstrip().split("\n")]
    wanted = "expected the name of a class in each line"
    for number, line in enumerate(lines, 1):
        if not line or line in lines[: number - 1]:
            what = f"{line!r} again" if line else "nothing"
            raise DatasetError(f"{path}, line {number}: names {what}; {wanted}")
    if len(lines) < 2:
        raise DatasetError(f"{path}: has {len(lines)} names; {wanted}, of two or more")
    return tuple(lines)


class MaskedFiles(PairedFiles):
    """Files of a table of samples with masks: files of class indices, `ignore_index` left out.

    Classes have the names in `classes.txt`, a line for each, in `root`, the folder of the masks' one or one above; else
    as many as `num_classes` says, or as masks have. `classes` fixes them.

    Raises:
        DatasetError: black and white masks whose white is ignored, or a file without a mask.
    """

    def __init__(
        self,
        source: Path,
        root: Path,
        table: SampleTable,
        kind: FileKind = PICTURES,
        classes: tuple[str, ...] | None = None,
        num_classes: int | None = None,
        ignore_index: int | None = IGNORE_INDEX,
        channels: Channels = "rgb",
    ) -> None:
        super().__init__(source, root, table, kind, channels)
        names = [file.name for file in self.annotations.files]
        self._ignored = ignore_index
        places = dict.fromkeys((root, *(root / each for each in {name.partition("/")[0] for name in names})))
        listed = [path for path in (each / CLASSES for each in places) if path.is_file()]
        listed = listed or [path for path in (root.parent / CLASSES,) if path.is_file()]
        found = self._values(spread(len(self)))
        if ignore_index == IGNORE_INDEX and found in BLACK_AND_WHITE:
            raise DatasetError(
                f"{self.annotations.path(0).parent}: masks hold nothing but 0 and 255, and 255 is ignored: set "
                "`ignore_index` to none if white is class 1"
            )
        known = classes or ()
        for path in listed:
            lines = _class_names(path)
            unnamed = known == (*map(str, range(len(known))),)  # as of masks without such a file
            if not unnamed and lines != known[: len(lines)]:
                others = "the classes of training are" if classes else f"{listed[0]} names"
                told = f"names {some(lines, 10)}, but {others} {some(known, 10)}"
                raise DatasetError(f"{path}: {told}: number and name classes in one way")
            known = known or lines
        self.classes = known or tuple(map(str, range(num_classes or self._count())))
        classes, whence = self.classes, f", as {listed[0]} names them" if listed else ""
        self.remarks = (
            f"masks of {self.annotations.path(0).parent} have {len(classes)} classes{whence}"
            + ("" if ignore_index is None else f"; {ignore_index} is ignored"),
            *self.remarks,
        )

    def label(self, index: int) -> Mask:
        """The mask of image `index`, its header read and its pixels not. Raises BadImage and OtherFile."""
        path = self.annotations.checked(index)
        return Mask(path, open_stored(path, self.volumes), len(self.classes), self._ignored)

    def _values(self, indices: Sequence[int]) -> set[int]:
        found: set[int] = set()
        for index in indices:
            try:
                found |= set(values_in(self.annotations.path(index), self.volumes).tolist())
            except BadImage:  # which reading it to train will say
                continue
        return found

    def _count(self) -> int:
        """How many classes the masks to train on have, all of which are read for that."""
        found = self._values([i for i, row in enumerate(self.rows) if row.split in ("", "train")])
        if self._ignored is None and found in BLACK_AND_WHITE:
            return 2
        classes = sorted(found - {self._ignored})
        count = max(2, max(classes, default=0) + 1)
        if classes and 2 * len(classes) < count:
            raise DatasetError(
                f"{self.annotations.path(0).parent}: masks hold {some([*map(str, classes)])}, and classes are numbered "
                f"from 0 on: write 0 to {len(classes) - 1}, or say `num_classes` {count} if other masks have the others"
            )
        return count


def open_files(
    path: Path,
    kind: FileKind = PICTURES,
    *,
    folder: Path | None = None,
    task: str | None = None,
    label_columns: Sequence[str] | None = None,
    classes: tuple[str, ...] | None = None,
    columns: Mapping[str, str] | None = None,
    num_classes: int | None = None,
    ignore_index: int | None = IGNORE_INDEX,
    channels: Channels = "auto",
) -> SampleFiles:
    """The pictures or volumes of a table, or of a folder that has one, or whose folders are classes or masks.

    `folder` has the files of a table; by default it is that of the table. `classes` fixes the classes and their order.
    `channels` are those of pictures that are read. Others: as `read_samples`, and `MaskedFiles`.

    Raises:
        DatasetError: there is no such source, or it does not hold what it should.
    """

    def paired(source: Path, root: Path, table: SampleTable) -> SampleFiles:
        if of_values(table.task):
            return TargetFiles(source, root, table, channels if isinstance(channels, tuple) else ())
        return MaskedFiles(source, root, table, kind, classes, num_classes, ignore_index, channels)

    table = path / TABLE if path.is_dir() and (path / TABLE).is_file() else path
    if table != path or table.suffix.lower() == ".csv":
        how: dict[str, Any] = {"task": task, "label_columns": label_columns, "classes": classes}
        found = read_samples(table, kind, folder=folder, columns=columns or {}, **how)
        root = folder or table.parent
        if files_of(found.task):
            return paired(table, root, found)
        if found.task is None and label_columns is None:
            raise DatasetError(f"{table}: has no column of labels beside the file names; {kind.layout}")
        return SampleFiles(table, root, found, kind, channels)
    named = [*(label_columns or ()), *(name for role, name in (columns or {}).items() if role != "weight")]
    if named:
        raise DatasetError(f"{path}: has no {TABLE}, of which {', '.join(named)} could be columns")
    found = folder_table(path, kind, classes)
    tables = sorted(each.name for each in path.iterdir() if each.suffix.lower() in _TABLES and visible(each.name))
    if tables:
        not_read = f"tables of {path} are not read: {some(tables, 3)}; `images` {path / 'NAME.csv'} would read one"
        found = found._replace(remarks=(*found.remarks, not_read))
    return paired(path, path, found) if files_of(found.task) else SampleFiles(path, path, found, kind, channels)


SYNTHETIC, SYNTHETIC_CLASSES = "synthetic", 10


def open(
    source: str | Path,
    *,
    size: tuple[int, ...] = (1024, 1024),
    num_classes: int | None = None,
    num_train: int = 1000,
    num_val: int = 200,
    validation_fraction: float = 0.2,
    seed: int = 0,
    validating: Mapping[str, bool] | None = None,
    task: str | None = None,
    label_columns: Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
    ignore_index: int | None = IGNORE_INDEX,
    validates: bool = True,
    folds: int | None = None,
    fold: int = 0,
    split_file: Path | None = None,
    of_fold: bool = False,
    channels: Channels = "auto",
) -> tuple[Named, Named]:
    """The training and the validation images of a source.

    - "synthetic": `num_train` and `num_val` images of `size` (height, width) in `num_classes` classes, or 10.
    - a folder with `train/<class>/` and `val/<class>/`, or other names of such parts: these.
    - a folder with `<class>/`: `validation_fraction` of the images is set aside, of each class alike.
    - a folder with `labels.csv`, or another such table: the images that it names, with labels for a `task`, of all
      columns or of `label_columns`: see `samples.read_samples`. A column of patients keeps those together.
    - a folder with `images/` and `masks/`, or with these below train and val: images with a mask each, whose pixels of
      `ignore_index` count for nothing: see `MaskedFiles`.
    - CIFAR's folder of python batches: its training and its test images.
    - an .npz file with x_train, y_train, x_test, y_test: these; with x and y: split as above.

    Files are split by `split_file`, else by the table's column `split`, by `folds`, or by `validation_fraction`: see
    `split.split_rows`. `validating` says of a path, from the folder on, whether it validated before.

    With a `size` of three numbers all of these are volumes, and files of folders one volume each: .npy, .npz, stacks of
    TIFF pages, NIfTI, series of DICOM. With one, synthetic images and .npz files are sequences.

    Pictures are read in colours of 8 bits, or with the `channels` of their files: see `files.Channels`.

    Where nothing `validates`, there may be no images for it.

    Raises:
        DatasetError: the source does not exist or does not hold what it should.
    """
    if source == SYNTHETIC:
        if num_train < 1 or num_val < 1:
            raise DatasetError(f"synthetic: num_train={num_train}, num_val={num_val}: needs at least 1 of each")
        images = Synthetic(num_train + num_val, size, num_classes or SYNTHETIC_CLASSES, seed)
        return Subset(images, range(num_train)), Subset(images, range(num_train, num_train + num_val))
    path = Path(source).expanduser()
    found: Sequence[Named] = ()
    if path.suffix == ".npz":
        found = [part for part in load_npz(path, len(size)) if part is not None]
    elif len(size) == 2 and is_cifar(path):
        found = load_cifar(path)
    else:
        if not path.exists():
            raise DatasetError(
                f"{source}: no such file or folder; expected {SYNTHETIC!r}, a folder of images or an .npz"
            )
        if len(size) == 1:
            raise DatasetError(
                f"{source}: folders hold images and volumes; sequences are synthetic, or in an .npz file"
            )
        files = open_files(
            path,
            VOLUMES if len(size) > 2 else PICTURES,
            task=task,
            label_columns=label_columns,
            columns=columns,
            num_classes=num_classes,
            ignore_index=ignore_index,
            channels=channels,
        )
        found = files.split(
            fraction=validation_fraction, seed=seed, known=validating, folds=folds, fold=fold, split_file=split_file,
            of_fold=of_fold, validates=validates,
        )  # fmt: skip
    training, validation = (
        found if len(found) == 2 else split(found[0], validation_fraction, seed, validating or {}, validates=validates)
    )
    if task is not None and task_of(training) != task:
        raise DatasetError(f"{source}: has labels to {task_of(training)}, not to {task}; {FORMS[task].where}")
    return training, validation
