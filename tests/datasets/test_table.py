"""mpi4dl.datasets.samples and .table: labels.csv for every task, and a line for every way to get it wrong."""

import csv
import io
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl import datasets
from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.samples import read_samples
from mpi4dl.datasets.sources import open_files
from mpi4dl.datasets.table import identifies


@pytest.fixture
def images(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/3.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        PIL.Image.new("RGB", (5, 4)).save(tmp_path / name)
    return tmp_path


def write(folder, text, encoding="utf-8"):
    (folder / "labels.csv").write_text(text, encoding)
    return folder


@pytest.mark.parametrize(
    ("text", "task", "found", "classes", "labels"),
    [
        ("file,grade\na/1.png,low\nb/3.jpg,high\n", None, "classify", ("high", "low"), [1, 0]),
        ("\ufefffilename;class\r\na/2;10\r\n3;2\r\n\r\n", None, "classify", ("2", "10"), [1, 0]),
        ('"image"\t"age"\n"./a/2.png"\t" 61.5"\n3.jpg\t-1e1', None, "regress", ("age",), [(61.5,), (-10.0,)]),
        ("file,age\na/1.png,61\n3,61\na/2.png,50\n", "classify", "classify", ("50", "61"), [1, 1, 0]),
        ("file,t,s\na/1.png,1,0\nb\\1.png,1,1\n", None, "multilabel", ("t", "s"), [(1.0, 0.0), (1.0, 1.0)]),
        ("file,t,s\na/1.png,1.5,0\nb/1.png,1,.5\n", None, "regress", ("t", "s"), [(1.5, 0.0), (1.0, 0.5)]),
        ("file,t,s\na/1.png,1,0\nb/1.png,1,.5\n", "regress", "regress", ("t", "s"), [(1.0, 0.0), (1.0, 0.5)]),
        ("file,gone\na/1.png,1\nb/1.png,0\n", None, "classify", ("0", "1"), [1, 0]),
        ("file,grade\na/1.png,1_1\nb/1.png,1_2\n", None, "classify", ("1_1", "1_2"), [0, 1]),
        ("sep=;\nslide_id;patient;dose;\na/1;7;1,5;\n3;8;0,25;\n;;;\n", None, "regress", ("dose",), [(1.5,), (0.25,)]),
        ("case_id,slide_id,label\np,a/1,x\np,3,y\n", None, "classify", ("x", "y"), [0, 1]),
        ("patient,file,event,time\n1,a/1,TRUE,1\n2,3,FALSE,2\n", None, "survival", ("risk",), [(1.0, 1.0), (2.0, 0.0)]),
        ("Event,path,Time\n1,a/1.png,37\n0,b/1,0\n", None, "survival", ("risk",), [(37.0, 1.0), (0.0, 0.0)]),
    ],
)
def test_columns_tell_the_task(images, text, task, found, classes, labels):
    folder = open_files(write(images, text), task=task)
    assert (folder.task, folder.classes) == (found, classes)
    assert [folder.label(index) for index in range(len(folder))] == labels
    assert folder.image(0).size == (4, 5)


def test_a_table_longer_than_any_is_not_read(images, monkeypatch):
    monkeypatch.setattr("mpi4dl.datasets.table.MOST_BYTES", 1 << 20)
    write(images, "file,grade\n" + "a/1.png,low\n" * 100_000)
    with pytest.raises(DatasetError, match=r"labels\.csv: has more than 1 MiB"):
        open_files(images)


def test_a_column_says_which_images_are_for_what(images):
    write(images, "file,split,age\na/1.png,Train,1\na/2.png,test,2\nb/1.png,val,3\nb/3.jpg,trn,4\n")
    training, validation = datasets.open(images)
    assert [training.name(i) for i in range(2)] == ["a/1.png", "b/3.jpg"]
    assert [validation.label(i) for i in range(len(validation))] == [(3.0,)]
    assert training.task == "regress"
    write(images, "file,split,age\na/1.png,train,1\na/2.png,train,2\n")
    with pytest.raises(DatasetError, match=r"has no image to validate with: add images, or change the split"):
        datasets.open(images)


def test_chosen_columns(images):
    write(images, "file,sex,age,stage\na/1.png,f,61,2\nb/1.png,m,50,3\n")
    folder = open_files(images, label_columns=("stage", "age"))
    assert (folder.task, folder.classes, folder.label(0)) == ("regress", ("stage", "age"), (2.0, 61.0))
    with pytest.raises(DatasetError, match=r"line 2: 'sex' is 'f', but regress needs a number"):
        open_files(images, task="regress")
    with pytest.raises(DatasetError, match=r"the columns sex, age, stage, .* name those that are learnt"):
        open_files(images)
    with pytest.raises(DatasetError, match=r"has no column 'grade' of labels, but sex, age, stage"):
        open_files(images, label_columns=("grade",))


@pytest.mark.parametrize(
    ("text", "task", "message"),
    [
        ("", None, "labels.csv: is empty; expected a line such as file,class"),
        ("file,class\n", None, "labels.csv: names no image"),
        ("name,class\na,b\n", None, "line 1: has name, class: none of them can be the column of file names"),
        ("file\na/1.png\n", None, "has no column of labels beside the file names"),
        ("file,class,class\na,b,c\n", None, "line 1: has two columns 'class'"),
        ("file,class,\na,b,c\n", None, "line 1: has a column without a name"),
        ("file,class\na/1.png,x\n\na/2.png\n", None, "line 4: has 1 values for 2 columns"),
        ("file,class\na/1.png,x\na/2.png,\n", None, "line 3: 'class' is empty"),
        ("file,class\na/1.png,x\n,y\n", None, "line 3: 'file' is empty"),
        (
            "file,class\na/1.png,x\nb/1.png,y\na/1.png,y\n",
            None,
            "line 4: a/1.png is a/1.png, as line 2 is already",
        ),
        ("file,class\na/1.png,x\n3.jpg,y\nb/3,y\n", None, "line 4: b/3 is b/3.jpg, as line 3 is already"),
        ("file,class\na/1.png,x\nb/2.png,y\n", None, "line 3: b/2.png is no image below"),
        ("file,class\na/1.png,x\n../x.png,y\n", None, "line 3: ../x.png is no image below"),
        ("file,class\n1.png,x\n3.jpg,y\n", None, "line 2: 1.png is one of 2 images, such as a/1.png and b/1.png below"),
        ("file,class\na/1.png,x\n3.jpg,x\n", None, "all images have class 'x'; a classifier needs two classes or more"),
        ("file,age\na/1.png,1\n3.jpg,nan\n", "regress", "line 3: 'age' is 'nan', but regress needs a number"),
        ("file,x,y\na/1.png,1,0\n3.jpg,1,2\n", "multilabel", "line 3: 'y' is '2', but multilabel needs 0 or 1"),
        ("file,time,event\na/1.png,1,0\n3.jpg,1,2\n", None, "line 3: 'event' is '2', but survival needs 0 or 1"),
        ("file,time,event\na/1.png,-1,0\n", None, "line 2: 'time' is '-1', but no time is negative"),
        ("file,time\na/1.png,1\n", "survival", "has no column 'event': survival needs time and event"),
        ("file,x,y\na/1.png,1,0\n", "classify", "has the columns x, y, but a class is one column"),
        ("file,x\na/1.png,1\n", "segment", "segment needs a column mask or annotation: name it by `annotation_column`"),
        ("file,split,x\na/1.png,a,1.5\n", None, "line 2: 'split' is 'a', but must be train, val or test"),
        ('file,class\n"a/1.png,x\n', None, "is no line of a table"),
        (
            "file,stage\n" + "".join(f"{i},{i % 3}\n" for i in range(9)),
            None,
            "has 3 whole numbers, which may be classes",
        ),
        ("file,label\na/1.png,0.5\n3.jpg,0.7\n", None, "numbers that are not whole, which may be classes or amounts"),
        ("file,her2\na/1.png,0\n3.jpg,1+\n", None, "line 3: 'her2' is '1+', which is no number, but line 2 has '0'"),
        ("file,dose\na/1.png,1.5\n3.jpg,NA\n", None, "line 3: 'dose' is 'NA', which says that there is no value"),
        ("file;dose\na/1.png;1.5\n3.jpg;2,5\n", None, "line 2: 'dose' is '1.5', but line 3 has '2,5'"),
        ("file;dose\na/1.png;1,500\n3.jpg;2\n", None, "line 2: 'dose' is '1,500', whose comma may part thousands"),
        ("file;dose\na/1.png;1.500\n3.jpg;2\n", None, "line 2: 'dose' is '1.500', whose point may part thousands"),
        ("file,patient\na/1.png,1\n3.jpg,2\n", None, "has no column of labels beside the file names"),
        ("file,grade\na/1.png,Low\n3.jpg,low\n", None, "line 3: 'grade' is 'low', but line 2 has 'Low'"),
        ("file,label\na/1.png,1\n3.jpg,1.0\n", None, "line 3: 'label' is '1.0', but line 2 has '1'"),
        ("file,age\na/1.png," + 4300 * "9" + "\n3.jpg,1\n", "regress", "(4300 characters), but regress needs a number"),
        ("file\0,age\na/1.png,1\n", None, "line 1: has a NUL"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(images, text, task, message):
    with pytest.raises(DatasetError, match=re.escape(message)):
        open_files(write(images, text), task=task)


def test_a_label_of_thousands_of_digits_is_a_class(images):
    """Python turns no text of so many digits into a number."""
    folder = open_files(write(images, f"file,label\na/1.png,{5000 * '9'}\n3.jpg,2\n"))
    assert folder.classes == ("2", 5000 * "9")


def test_text_in_an_unknown_encoding_is_refused_with_its_line(images):
    write(images, "file,grade\na/1.png,low\n3.jpg,h\u00f6her\n", "latin-1")
    with pytest.raises(DatasetError, match=r"labels.csv, line 3: is no text in UTF-8 .* in Excel as 'CSV UTF-8'"):
        open_files(images)


@pytest.mark.parametrize(
    "name", ["id", "ID", "patient", "PatientID", "patient_id", "Case ID", "slide_id", "caseId", "MRN"]
)
def test_columns_that_identify_are_never_learnt(images, name):
    assert identifies(name)
    write(images, f"file,{name},dose\na/1.png,1,1.5\n3.jpg,2,2.5\n")
    folder = open_files(images)
    assert (folder.task, folder.classes) == ("regress", ("dose",))
    assert name in folder.columns.values() or f"columns not used: {name}" in folder.remarks
    assert "the task is regress, as the columns tell: `task` says otherwise" in folder.remarks
    with pytest.raises(DatasetError, match=f"the column '{name}' identifies a patient or sample"):
        open_files(images, label_columns=(name,))
    for other in ("age", "label", "class_id", "ki67_index", "time", "event", "idh1", "status", "grade", "valid"):
        assert not identifies(other)


class Clinical:
    """A table as clinics write them: what it means, how it is written, and what is wrong with it, if anything."""

    CLASSES = ("benign", "tumour", "Stage II", "1_1", "h\u00f6her", "none", "3+")
    MISSING = ("", "nan", "NaN", "NA", "n/a", "n.a.", "N.A.", "-", "#N/A", "NULL", "?")

    def __init__(self, data: st.DataObject) -> None:
        draw = data.draw
        self.count = draw(st.integers(4, 12), label="count")
        self.kind = draw(st.sampled_from(["classify", "regress", "multilabel", "survival", "binary"]), label="kind")
        self.delimiter = draw(st.sampled_from(",;\t"), label="delimiter")
        self.comma = draw(st.booleans(), label="decimal commas")
        numbers = st.lists(st.integers(-9999, 9999), min_size=self.count, max_size=self.count, unique=True)
        bits = st.lists(st.integers(0, 1), min_size=self.count, max_size=self.count).filter(lambda x: len({*x}) == 2)
        self.columns: dict[str, list[str]] = {}
        self.labels: list[Any] = []
        if self.kind == "classify":
            name = draw(st.sampled_from(["label", "Class", "diagnosis"]))
            known = draw(st.lists(st.sampled_from(self.CLASSES), min_size=2, max_size=4, unique=True))
            self.columns[name] = [known[i % len(known)] for i in range(self.count)]
            self.classes = tuple(sorted(known))
            self.labels = [self.classes.index(each) for each in self.columns[name]]
        elif self.kind == "binary":
            values = draw(bits)
            words = draw(st.sampled_from([("0", "1"), ("FALSE", "TRUE"), ("no", "yes")]))
            self.columns["recurrence"] = [words[value] for value in values]
            self.classes, self.labels = words, values
        elif self.kind == "multilabel":
            self.classes = ("necrosis", "stroma")
            values = [draw(bits) for _ in self.classes]
            words = [draw(st.sampled_from([("0", "1"), ("FALSE", "TRUE"), ("false", "true")])) for _ in self.classes]
            for name, column, said in zip(self.classes, values, words, strict=True):
                self.columns[name] = [said[value] for value in column]
            self.labels = [tuple(map(float, row)) for row in zip(*values, strict=True)]
        elif self.kind == "regress":
            self.classes = ("dose",)
            values = [n + 0.25 for n in draw(numbers)]
            self.columns["dose"] = [self.decimal(value) for value in values]
            self.labels = [(value,) for value in values]
        else:
            self.classes = ("risk",)
            values, events = [abs(n) + 0.5 for n in draw(numbers)], draw(bits)
            self.columns |= {"Time": [self.decimal(value) for value in values], "event": [*map(str, events)]}
            self.labels = [(value, float(event)) for value, event in zip(values, events, strict=True)]
        self.targets = tuple(self.columns)
        self.damaged: int | None = None
        self.again = False
        damage = draw(st.sampled_from(["", "", "missing", "underscore", "twice", "mixed", "case"]), label="damage")
        self.spoil(damage, draw(st.integers(1, self.count - 1)), draw(st.sampled_from(self.MISSING)))
        self.more(data)

    def decimal(self, value: float) -> str:
        return str(value).replace(".", ",") if self.comma else str(value)

    def spoil(self, damage: str, row: int, missing: str) -> None:
        """Harm one line so that nobody can say what it means."""
        name, amounts = self.targets[0], self.kind in ("regress", "survival")
        if damage == "missing":
            self.columns[name][row] = missing
        elif damage == "underscore" and amounts:
            self.columns[name][row] = "1_1"
        elif damage == "mixed" and amounts:
            other = "0.5" if self.comma else "0,5"
            self.columns[name][row] = other
            # The line with a point is named.
            row = row if self.comma else next(i for i in range(self.count) if i != row)
        elif damage == "twice":
            self.again = True
        elif damage == "case" and self.columns[name][row].swapcase() != self.columns[name][row]:
            if self.kind not in ("classify", "binary"):
                return
            word = self.columns[name][row]
            if self.columns[name].count(word) < 2:
                return
            self.columns[name][row] = word.swapcase()
            row = row if word in self.columns[name][:row] else self.columns[name].index(word, row)
        else:
            return
        self.damaged = row

    def more(self, data: st.DataObject) -> None:
        """What is beside the labels, and how the text is written."""
        draw = data.draw
        self.columns["file"] = [f"a/{i}.png" for i in range(self.count)]
        if draw(st.booleans(), label="identifiers"):
            self.columns |= {"patient": [str(i // 2) for i in range(self.count)], "MRN": [f"C{i}" for i in range(self.count)]}  # fmt: skip  # noqa: E501
        names = draw(st.permutations([*self.columns]), label="order")
        if self.kind == "multilabel":  # whose labels stand as the columns do
            self.classes = tuple(name for name in names if name in self.targets)
            places = [self.targets.index(name) for name in self.classes]
            self.labels = [tuple(label[place] for place in places) for label in self.labels]
        rows = [names, *([self.columns[name][i] for name in names] for i in range(self.count))]
        if self.again:
            rows.append(rows[1 + (self.damaged or 0)])
            self.damaged = self.count
        pad = draw(st.sampled_from(["", " ", "\u00a0"]), label="pad")
        empty, below = draw(st.integers(0, 2), label="empty columns"), draw(st.integers(0, 2), label="empty rows")
        rows = [[f"{pad}{value}{pad}" for value in row] + [""] * empty for row in rows] + [
            [""] * (len(names) + empty)
        ] * below
        quoting = draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]), label="quoting")
        text, ending = io.StringIO(), draw(st.sampled_from(["\n", "\r\n"]), label="ending")
        csv.writer(text, delimiter=self.delimiter, quoting=quoting, lineterminator=ending).writerows(rows)
        self.encoding = draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]), label="encoding")
        self.content = text.getvalue().encode(self.encoding)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_tables_as_clinics_write_them_mean_what_they_say_or_are_refused_with_the_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    told = Clinical(data)
    path: Path = tmp_path_factory.getbasetemp() / "clinical" / "clinical.csv"
    (path.parent / "a").mkdir(parents=True, exist_ok=True)
    for number in range(12):
        (path.parent / "a" / f"{number}.png").touch()
    path.write_bytes(told.content)
    if told.damaged is not None:
        with pytest.raises(DatasetError, match=rf"clinical\.csv, line {told.damaged + 2}: "):
            read_samples(path)
        return
    found = read_samples(path)
    assert found.task == ("classify" if told.kind == "binary" else told.kind)
    assert found.classes == told.classes
    assert [row.label for row in found.rows] == told.labels
    assert [row.name for row in found.rows] == told.columns["file"]


def test_damaged_tables_are_refused_or_read(images):
    """Whatever bytes are in it: a table or one sentence, and nothing else."""
    whole = b"file,split,time,event\na/1.png,train,3.5,1\nb/3.jpg,val,4,0\n"
    random = np.random.default_rng(0)
    for _ in range(300):
        spoilt = bytearray(whole)
        for _ in range(random.integers(1, 4)):
            spoilt[random.integers(len(spoilt))] = random.choice([0, 10, 13, 34, 44, 59, 255, random.integers(256)])
        (images / "labels.csv").write_bytes(bytes(spoilt[: random.integers(1, len(spoilt) + 1)]))
        with suppress(DatasetError):
            read_samples(images / "labels.csv")
