"""mpi4dl.datasets.table and .labelled: labels.csv for every task, and a line for every way to get it wrong."""

import re
from contextlib import suppress

import numpy as np
import PIL.Image
import pytest

from mpi4dl import datasets
from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.labelled import LabelledFolder
from mpi4dl.datasets.table import read_table


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
        ("file,t,s\na/1.png,1,0\nb/1.png,1,.5\n", None, "regress", ("t", "s"), [(1.0, 0.0), (1.0, 0.5)]),
        ("Event,path,Time\n1,a/1.png,37\n0,b/1,0\n", None, "survival", ("risk",), [(37.0, 1.0), (0.0, 0.0)]),
    ],
)
def test_columns_tell_the_task(images, text, task, found, classes, labels):
    folder = LabelledFolder(write(images, text), task=task)
    assert (folder.task, folder.classes) == (found, classes)
    assert [folder.label(index) for index in range(len(folder))] == labels
    assert folder.image(0).size == (4, 5)


def test_a_column_says_which_images_are_for_what(images):
    write(images, "file,split,age\na/1.png,Train,1\na/2.png,test,2\nb/1.png,val,3\nb/3.jpg,trn,4\n")
    training, validation = datasets.open(images)
    assert [training.name(i) for i in range(2)] == ["a/1.png", "b/3.jpg"]
    assert [validation.label(i) for i in range(len(validation))] == [(3.0,)]
    assert training.task == "regress"
    write(images, "file,split,age\na/1.png,train,1\na/2.png,train,2\n")
    with pytest.raises(DatasetError, match=r"'split' has only train: it needs train, and val or test"):
        datasets.open(images)


def test_chosen_columns(images):
    write(images, "file,sex,age,stage\na/1.png,f,61,2\nb/1.png,m,50,3\n")
    folder = LabelledFolder(images, columns=("stage", "age"))
    assert (folder.task, folder.classes, folder.label(0)) == ("regress", ("stage", "age"), (2.0, 61.0))
    with pytest.raises(DatasetError, match=r"line 2: 'sex' is 'f', but regress needs a number"):
        LabelledFolder(images)
    with pytest.raises(DatasetError, match=r"has no column 'grade' of labels, but sex, age, stage"):
        LabelledFolder(images, columns=("grade",))


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
            "line 4: names a/1.png again, which line 2 does already",
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
        ("file,x\na/1.png,1\n", "segment", "a table of labels is for one of classify, multilabel, regress, survival"),
        ("file,split,x\na/1.png,a,1\n", None, "line 2: 'split' is 'a', but must be train, val or test"),
        ('file,class\n"a/1.png,x\n', None, "is no line of a table"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(images, text, task, message):
    with pytest.raises(DatasetError, match=re.escape(message)):
        LabelledFolder(write(images, text), task=task)


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
            read_table(images / "labels.csv")
