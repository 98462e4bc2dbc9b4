"""The table of a run's samples, `samples.csv` in its folder, by which the run goes on.

    file,slide_id,case_id,label,split,fold,mpp,annotation,mask_print,bytes,crc32
    a/s1.svs,s1,p1,tumour,train,,0.25,,,104857600,2774910125

`file` is the path from the folder of samples on, or a sample's name. `split` is train, val or test. Labels of numbers
have a column each, with their names; `mask_print` tells a mask from others. `bytes` and `crc32`, of some of its bytes,
tell a file from others. Cells are empty where there is nothing. With `weight_column` there is a column `loss_weight`
behind these, and with `covariates` one of this name, such as `age=61, sex=f`. `mpi4dl train --split-file` takes such a
table, and pandas.read_csv reads it.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._files import read_regular, write_durably
from mpi4dl._wording import counted, some
from mpi4dl.datasets.files import ZARR_SUFFIXES
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.listed import with_details
from mpi4dl.datasets.samples import COVARIATES, LOSS_WEIGHT, MASK_PRINT
from mpi4dl.datasets.split import Named, in_whole
from mpi4dl.options.declare import ConfigError

FILE = "samples.csv"
MOST_NAMES = 3
BEFORE = ("file", "slide_id", "case_id")
AFTER = ("split", "fold", "mpp", "annotation", MASK_PRINT, "bytes", "crc32")
IF_ASKED = (LOSS_WEIGHT, COVARIATES)  # behind these


class RunSample(NamedTuple):
    """A line of the table: see above. `label` is all that is to be learnt, as text; None if nothing tells it."""

    file: str
    name: str
    patient: str
    label: str | None
    split: str
    num_bytes: int | None = None
    checksum: int | None = None
    covariates: str = ""

    @property
    def tells_patient(self) -> bool:
        return self.patient not in (self.file, self.name)

    @property
    def content(self) -> tuple[int, int] | None:
        """What tells a file from others, whatever its name; None of a folder, of which metadata alone are compared."""
        if self.num_bytes is None or self.checksum is None or self.file.lower().endswith(ZARR_SUFFIXES):
            return None
        return self.num_bytes, self.checksum


class RunSamples(NamedTuple):
    """The samples of a run, and the lines that its table has of them."""

    samples: tuple[RunSample, ...]
    lines: tuple[Mapping[str, str], ...] = ()
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, training: Named, validation: Named) -> "RunSamples":
        """The samples that train and validate, and all others of their table that are for something."""
        found: dict[tuple[str, str], tuple[Any, int]] = {}
        for part, split in ((training, "train"), (validation, "val")):
            whole, indices = in_whole(part)
            found |= {(split, whole.name(index)): (whole, index) for index in indices}
        whole, _ = in_whole(training)
        rows = getattr(whole, "rows", ())
        found |= {("test", row.path): (whole, i) for i, row in enumerate(rows) if row.split == "test"}
        names = _names_of_labels(whole)
        lines = [_line(split, whole, index, names) for (split, _), (whole, index) in found.items()]
        more = [name for name in IF_ASKED if any(name in line for line in lines)]
        return cls(_samples(lines, names), tuple(lines), (*BEFORE, *names, *AFTER, *more))

    @classmethod
    def of_documents(cls, sizes: Mapping[str, Mapping[str, int]]) -> "RunSamples":
        """The documents of text: `sizes` has the bytes of each, by its part and its name."""
        lines = tuple(
            {**dict.fromkeys(BEFORE, name), "split": split, "bytes": str(size)}
            for split, of in sizes.items()
            for name, size in of.items()
        )
        return cls(_samples(lines, ()), lines, (*BEFORE, "label", *AFTER))

    @classmethod
    def read(cls, path: Path) -> "RunSamples":
        """The table of a run. Raises ConfigError if it is damaged."""
        try:
            reader = csv.DictReader(io.StringIO(read_regular(path).decode(errors="surrogateescape")), strict=True)
            lines = tuple(reader)
            columns = tuple(reader.fieldnames or ())
            more = [name for name in IF_ASKED if name in columns[-len(IF_ASKED) :]]
            names = [name for name in columns if name not in (*BEFORE, *AFTER, *more)]
            whole = columns == (*BEFORE, *names, *AFTER, *more)
            if not whole or any(None in line or None in line.values() for line in lines):
                raise ValueError
            samples = _samples(lines, names)
        except (OSError, ValueError, csv.Error) as error:
            raise ConfigError(
                f"{path}: is not the table of a run's samples, it is damaged ({type(error).__name__}): restore it, or "
                "remove it to split the samples anew"
            ) from error
        return cls(samples, lines, columns)

    @classmethod
    def at(cls, path: Path) -> "RunSamples | None":
        """The table of the run that this folder is, or has a checkpoint of; None if there is none."""
        for folder in (path, path.absolute().parent, path.absolute().parent.parent):
            if (folder / FILE).is_file():
                return cls.read(folder / FILE)
        return None

    def write(self, folder: Path) -> None:
        """Put it into the folder of a run, in place of an older one, at once or not at all. Raises OSError."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(self.lines)
        write_durably(folder / FILE, text.getvalue().encode(errors="surrogateescape"))

    def validating(self) -> dict[str, bool]:
        """Of each sample that trains or validates which it does, by its file."""
        return {each.file: each.split == "val" for each in self.samples if each.split != "test"}

    def split_of(self) -> tuple[dict[str, str], dict[str, str], dict[Any, str]]:
        """What each patient is for, and each sample by its name, and by the size and checksum of its file."""
        keys = ("patient", "name", "content")
        of_patient, of_name, of = ({getattr(each, key): each.split for each in reversed(self.samples)} for key in keys)
        return of_patient, of_name, {content: split for content, split in of.items() if content is not None}

    def in_doubt(self) -> Iterator[str]:
        """Warnings about files with the bytes of files of another part, and of files with another label."""
        for key, told in (("split", "in two parts"), ("label", "of two labels")):
            found: dict[Any, dict[str, str]] = {}
            for each in self.samples:
                found.setdefault(each.content or each, {}).setdefault(str(getattr(each, key)), each.file)
            pairs = [
                " and ".join(f"{file} ({place})" for place, file in places.items())
                for places in found.values()
                if len(places) > 1
            ]
            if pairs:
                files = counted(len(pairs), "file is", "files are")
                yield f"warning: {files} {told}, under two names: {some(pairs, MOST_NAMES)}"

    def _by_key(self) -> dict[str, RunSample]:
        """The samples by their file; those of two datasets that call samples alike by their part, too."""
        times: dict[str, int] = {}
        for each in self.samples:
            times[each.file] = times.get(each.file, 0) + 1
        return {each.file if times[each.file] == 1 else f"{each.split} {each.file}": each for each in self.samples}

    def require_unchanged(self, now: "RunSamples") -> None:
        """Raise ConfigError if a sample has another label, patient or other covariates, or its file other content.

        A file that is in another folder now is known by its size and its checksum, if no other file has both.
        """
        before, after = self._by_key(), now._by_key()
        pairs = [(name, name) for name in before if name in after]
        there, here = _by_file(before), _by_file(after)
        pairs += [(name, here[key]) for key, name in there.items() if here.get(key, name) != name]
        both = [(new, before[old], after[new]) for old, new in pairs]
        labels = [f"{name} ({was.label}, now {now.label})" for name, was, now in both if was.label != now.label]
        covariates = [
            f"{name} ({was.covariates or 'none'}, now {now.covariates or 'none'})"
            for name, was, now in both
            if was.covariates != now.covariates
        ]
        patients = [
            f"{name} ({was.patient}, now {now.patient})"
            for name, was, now in both
            if was.patient != now.patient and (was.tells_patient or now.tells_patient)
        ]
        files = [name for name, new in pairs if name == new and _differ(before[name], after[name])]
        for changed, what, back in (
            (labels, "with another label", "put the labels back, or train with the new ones"),
            (covariates, "with other covariates", "put the cells back, or train with the new ones"),
            (patients, "of another patient", "put the cells back, or split anew"),
            (files, "with other content", "put the files back, or train on the new ones"),
        ):
            if changed:
                raise ConfigError(
                    f"{counted(len(changed), 'sample')} {what} than when the run began: "
                    f"{some(changed, MOST_NAMES)}: {back} in another `run_folder`"
                )

    def changes(self, now: "RunSamples") -> Iterator[str]:
        """What to say of samples that came, went or moved since."""
        before, after = self._by_key(), now._by_key()
        old, new = self.validating(), now.validating()
        for names, what in (
            ([name for name in before if name not in after], "is gone since"),
            ([name for name in after if name not in before], "is new"),
            ([name for name in before if name in after and _differ(before[name], after[name])], "has other content"),
            ([name for name in new if name in old and new[name] > old[name]], "was trained on, and now validates"),
            ([name for name in new if name in old and new[name] < old[name]], "validated, and is now trained on"),
        ):
            if names:
                more = f" and {counted(len(names) - MOST_NAMES, 'other')}" if len(names) > MOST_NAMES else ""
                yield f"of the samples, {', '.join(names[:MOST_NAMES])}{more} {what}"


def _names_of_labels(whole: Any) -> list[str]:
    form = FORMS.get(getattr(whole, "labels_of", None) or "")
    if form is None or not (form.columns or form.named_by_column):
        return ["label"]
    return [*(form.columns or whole.classes)]


def _line(split: str, whole: Any, index: int, names: Sequence[str]) -> dict[str, str]:
    file, rows = whole.name(index), getattr(whole, "rows", None)
    line = {"file": file, "slide_id": file, "case_id": file, "split": split}
    files = getattr(whole, "files", None)
    if files is not None:
        line["bytes"], line["crc32"] = _cell(files[index].num_bytes), _cell(whole.fingerprint(index))
    if rows is None:
        if getattr(whole, "tells_patients", False):
            line["case_id"] = whole.patients[index]
        told = whole.label_as_text(index) if hasattr(whole, "label_as_text") else None  # else its image tells it
        return {**line, names[0]: _cell(told)}
    row = rows[index]
    line |= {"slide_id": row.name, "case_id": row.patient, "fold": _cell(row.fold), "mpp": _cell(row.mpp)}
    line |= {"annotation": _cell(row.annotation), MASK_PRINT: _cell(whole.mask_as_text(index))}
    line |= {} if row.weight is None else {LOSS_WEIGHT: repr(row.weight)}
    line |= {COVARIATES: whole.covariates_as_text(index)} if row.covariates else {}
    if isinstance(row.label, tuple):
        line |= {name: repr(number) for name, number in zip(names, row.label, strict=True)}
    elif row.label is not None:
        line["label"] = whole.classes[row.label]
    return line


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _samples(lines: Sequence[Mapping[str, str]], names: Sequence[str]) -> tuple[RunSample, ...]:
    """The samples of lines, whose labels are in the columns of these names. Raises ValueError."""
    found = []
    for line in lines:
        told = line.get(MASK_PRINT) or ", ".join(line[name] for name in names if line.get(name))
        label = with_details(told or None, line.get("mpp") or None, line.get(LOSS_WEIGHT))  # as `label_as_text`
        size, checksum = (int(line[name]) if line.get(name) else None for name in ("bytes", "crc32"))
        file, name, patient = (line[key] for key in BEFORE)
        found.append(RunSample(file, name, patient, label, line["split"], size, checksum, line.get(COVARIATES, "")))
    return tuple(found)


def _differ(before: RunSample, now: RunSample) -> bool:
    """Whether a file has another size or other bytes, as far as both are known."""
    pairs = ((before.num_bytes, now.num_bytes), (before.checksum, now.checksum))
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def _by_file(samples: Mapping[str, RunSample]) -> dict[tuple[int, int], str]:
    """The names of the samples by size and checksum, of those that share them with no other."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, sample in samples.items():
        if sample.num_bytes is not None and sample.checksum is not None:
            found.setdefault((sample.num_bytes, sample.checksum), []).append(name)
    return {key: names[0] for key, names in found.items() if len(names) == 1}
