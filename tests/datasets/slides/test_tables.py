"""mpi4dl.datasets.samples: tables of slides as clinics and CLAM write them, and each way to get one wrong."""

import csv
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.kinds import SLIDES
from mpi4dl.datasets.samples import SampleTable, read_samples, read_split_file

FILES = ("s1.svs", "s2.tiff", "a/s3.ndpi", "a/s4.ome.tif", "b/s4.png")


def touch(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    return touch(tmp_path, FILES)


def read(root: Path, text: str, encoding: str = "utf-8", **options: Any) -> SampleTable:
    (root / "slides.csv").write_text(text, encoding, newline="")
    return read_samples(root / "slides.csv", **{"kind": SLIDES, **options})


@pytest.mark.parametrize(
    ("text", "options", "task", "classes", "labels", "columns"),
    [
        (
            "case_id,slide_id,label\np,s1,x\nq,s2,y\n",
            {},
            "classify",
            ("x", "y"),
            [0, 1],
            {"slide": "slide_id", "patient": "case_id", "label": "label"},
        ),
        (
            "\ufeffSlide-Name;PatientID;Class;MPP\r\ns1.svs;p;10;0,25\r\na\\s3;q;2;0,5\r\n",
            {},
            "classify",
            ("2", "10"),
            [1, 0],
            {"slide": "Slide-Name", "patient": "PatientID", "mpp": "MPP", "label": "Class"},
        ),
        (
            "file\tpatient\ttime\tEvent\tage\ns1\tp\t37.5\t1\t61\ns2\tq\t2\tFALSE\t50\n",
            {},
            "survival",
            ("risk",),
            [(37.5, 1.0), (2.0, 0.0)],
            {"slide": "file", "patient": "patient", "label": "time, event"},
        ),
        (
            ",slide,patient,grade\n0,s1,p,1_1\n1,s2,q,1_2\n",
            {},
            "classify",
            ("1_1", "1_2"),
            [0, 1],
            {"slide": "slide", "patient": "patient", "label": "grade"},
        ),
        (
            "Unnamed: 0,wsi,case,necrosis,stroma\n0,s1,p,1,0\n1,s2,q,1,1\n",
            {},
            "multilabel",
            ("necrosis", "stroma"),
            [(1.0, 0.0), (1.0, 1.0)],
            {"slide": "wsi", "patient": "case", "label": "necrosis, stroma"},
        ),
        (
            "slide,patient,dose,sex\ns1,p,1.5,f\ns2,q,2,m\n",
            {"label_columns": ["dose"]},
            "regress",
            ("dose",),
            [(1.5,), (2.0,)],
            {"slide": "slide", "patient": "patient", "label": "dose"},
        ),
        (
            "slide,patient,label,time,event\ns1,p,x,1,0\ns2,q,y,2,1\n",
            {"task": "survival"},
            "survival",
            ("risk",),
            [(1.0, 0.0), (2.0, 1.0)],
            {"slide": "slide", "patient": "patient", "label": "time, event"},
        ),
        (
            "slide,patient,label\ns1,p,y\ns2,q,y\n",
            {"classes": ("x", "y")},
            "classify",
            ("x", "y"),
            [1, 1],
            {"slide": "slide", "patient": "patient", "label": "label"},
        ),
        (
            "slide,patient,label\ns1,p,\ns2,q,nan\n",
            {"label_columns": ()},
            None,
            (),
            [None, None],
            {"slide": "slide", "patient": "patient"},
        ),
        (
            "slide_id,image,who,case_id,annotation\ns1,z,p,u,x\ns2,z,q,v,y\n",
            {"columns": {"slide": "slide_id", "patient": "who"}, "label_columns": ("annotation",)},
            "classify",
            ("x", "y"),
            [0, 1],
            {"slide": "slide_id", "patient": "who", "label": "annotation"},
        ),
        (
            "slide,patient,split,cohort_split,grade\ns1,p,a,train,x\ns2,q,b,val,y\n",
            {"columns": {"split": "Cohort Split"}},
            "classify",
            ("x", "y"),
            [0, 1],
            {"slide": "slide", "patient": "patient", "split": "cohort_split", "label": "grade"},
        ),
        (
            "Scan;patient;label;size, in mm, if known, by eye, once\ns1;p;x;1\ns2;q;y;2\n",
            {"columns": {"slide": "Scan"}},
            "classify",
            ("x", "y"),
            [0, 1],
            {"slide": "Scan", "patient": "patient", "label": "label"},
        ),
        (
            "slide,patient,mask\ns1,p,b/s4.png\ns4,q,NA\n",
            {"task": "segment"},
            "segment",
            (),
            [None, None],
            {"slide": "slide", "patient": "patient", "annotation": "mask"},
        ),
    ],
)
def test_columns_are_found_by_their_names(
    slides: Path,
    text: str,
    options: Mapping[str, Any],
    task: str | None,
    classes: tuple[str, ...],
    labels: list[Any],
    columns: dict[str, str],
) -> None:
    found = read(slides, text, **options)
    assert (found.task, found.classes) == (task, classes)
    assert [row.label for row in found.rows] == labels
    assert found.columns == columns
    assert [row.patient for row in found.rows] == ["p", "q"]
    assert [row.line for row in found.rows] == [2, 3]


def test_all_that_a_row_has(slides: Path) -> None:
    text = (
        "slide_id,case_id,label,split,fold,mpp,annotation\ns1.svs,p,x,Train,0,0.25,s1.geojson\ns4.png,q,y,dev,,n/a,\n"
    )
    first, second = read(slides, text).rows
    assert first == (2, "s1.svs", "s1.svs", "p", "train", 0, 0, 0.25, "s1.geojson")
    assert second == (3, "s4.png", "b/s4.png", "q", "val", None, 1, None, None)


def test_slides_are_found_in_another_folder_and_by_absolute_paths(slides: Path, tmp_path_factory: Any) -> None:
    table = tmp_path_factory.mktemp("tables") / "slides.csv"
    table.write_text(f"path,label\n{slides}/a/s3.ndpi,x\ns2.tiff,y\n")
    found = read_samples(table, SLIDES, folder=slides)
    assert [row.path for row in found.rows] == ["a/s3.ndpi", "s2.tiff"]
    assert any("3 slides below" in remark for remark in found.remarks)


def test_names_with_points_are_found_in_subfolders_too(tmp_path: Path) -> None:
    names = ("TCGA-AA-0001-01Z.8c5f", "TCGA-AA-0001-01Z.9d0e")
    touch(tmp_path, tuple(f"{name[-4:]}/{name}.svs" for name in names))
    found = read(tmp_path, f"slide_id,label\n{names[1]},x\n{names[0]},y\n")
    assert [row.path for row in found.rows] == [f"9d0e/{names[1]}.svs", f"8c5f/{names[0]}.svs"]
    assert {row.patient for row in found.rows} == {"TCGA-AA-0001"}
    assert [row.name for row in read_samples(tmp_path, SLIDES).rows] == [*names]


def test_annotations_are_no_slides(slides: Path) -> None:
    text = "slide,patient,mask\ns4,p,./b/s4.png\n"
    (row,) = read(slides, text).rows
    assert (row.path, row.annotation) == ("a/s4.ome.tif", "./b/s4.png")


@pytest.mark.parametrize(
    ("names", "patients", "remark"),
    [
        (("s1", "s2"), ["s1", "s2"], "each slide is its own patient"),
        (("TCGA-AA-0001-01Z", "tcga-ab-0002"), ["TCGA-AA-0001", "TCGA-AB-0002"], "2 TCGA barcodes"),
        (("TCGA-AA-0001-01Z", "TCGA-AA-00012"), ["TCGA-AA-0001", "TCGA-AA-00012"], "each other slide"),
    ],
)
def test_without_a_column_of_patients(tmp_path: Path, names: list[str], patients: list[str], remark: str) -> None:
    touch(tmp_path, tuple(f"{name}.uuid.svs" for name in names))
    found = read(tmp_path, "slide,label\n" + "".join(f"{name},{name[-3:]}\n" for name in names))
    assert [row.patient for row in found.rows] == patients
    assert any(remark in each for each in found.remarks)


def test_slides_that_are_their_patients_by_a_column(slides: Path) -> None:
    found = read(slides, "case_id,slide_id,label\ns1,s1,x\ns2,s2,y\n", task="classify")
    assert ([row.patient for row in found.rows], found.remarks[:-1]) == (["s1", "s2"], ())


@pytest.mark.parametrize(
    ("text", "options", "parts"),
    [
        ("name,label\ns1,x\n", {}, ["line 1", "name, label", "`slide_column`"]),
        ("file,path,label\ns1,s1,x\n", {}, ["line 1", "file and path", "`slide_column`"]),
        ("slide,case_id,patient,label\ns1,p,p,x\n", {}, ["line 1", "case_id and patient", "`patient_column`"]),
        ("slide,mask,annotation\ns1,p,x\n", {}, ["line 1", "mask and annotation", "`annotation_column`"]),
        ("slide,label,target\ns1,p,x\n", {}, ["line 1", "label and target", "`label_columns`"]),
        ("slide,label,time,event\ns1,p,1,1\n", {}, ["line 1", "label", "time and event", "`label_columns`"]),
        ("slide,label\ns1,x\n", {"columns": {"patient": "who"}}, ["'who'", "slide, label", "`patient_column`"]),
        ("slide,label\ns1,x\n", {"label_columns": ["who"]}, ["'who'", "label"]),
        ("slide,patient\ns1,x\n", {"task": "classify"}, ["no column of labels"]),
        ("slide,label\ns1,x\n", {"task": "segment"}, ["slide, label", "`annotation_column`"]),
        ("slide,label\ns1,x\n,y\n", {}, ["line 3", "'slide' is empty"]),
        ("slide,label\ns1,x\ns2,y\ns1,y\n", {}, ["line 4", "s1", "line 2"]),
        ("slide,label\ns1,x\ns2,y\ns1.svs,y\n", {}, ["line 4", "s1.svs", "line 2"]),
        ("slide,label\ns1,x\ns9,y\n", {}, ["line 3", "s9", "no slide", "`slides_folder`"]),
        ("slide,label\ns1,x\ns4,y\n", {}, ["line 3", "s4", "2 slides", "a/s4.ome.tif", "b/s4.png"]),
        ("slide,label\ns1,x\ns2,z\n", {"classes": ("x", "y")}, ["line 3", "'z'", "x, y"]),
        ("slide,label\ns1,x\ns2,x\n", {}, ["all slides", "'x'"]),
        ("slide,label\ns1,x\ns2,NaN\n", {}, ["line 3", "'label' is 'NaN'"]),
        ("slide,her2\ns1,0\ns2,1+\n", {}, ["line 3", "'1+'", "line 2", "'0'"]),
        ("slide,dose\ns1,1.5\ns2,1_1\n", {}, ["line 3", "'1_1'", "line 2", "'1.5'"]),
        ("slide;dose\r\ns1;1,5\r\ns2;n.b.\r\n", {"task": "regress"}, ["line 3", "'n.b.'", "regress"]),
        ("slide;dose\r\ns1;1,5\r\ns2;>10\r\n", {}, ["line 3", "'>10'", "line 2", "'1,5'"]),
        ("slide,patient,label\ns1,p,x\ns2,,y\n", {}, ["line 3", "'patient' is empty"]),
        ("slide,patient,label\ns1,p,x\ns2,NA,y\n", {}, ["line 3", "'patient' is 'NA'"]),
        ("slide,patient,label\ns1,P 1,x\ns2,p 1,y\n", {}, ["line 3", "'p 1'", "line 2", "'P 1'"]),
        (
            "slide,patient,split,label\ns1,p,train,x\ns2,q,val,y\na/s3,p,test,y\n",
            {},
            ["line 4", "'p'", "test", "'a/s3'", "train", "'s1' of line 2"],
        ),
        ("slide,patient,fold,label\ns1,p,0,x\ns2,p,1,y\n", {}, ["line 3", "'p'", "fold 1", "'s2'", "fold 0", "'s1'"]),
        ("slide,split,label\ns1,train,x\ns2,,y\n", {}, ["line 3", "'split' is empty", "train, val or test"]),
        ("slide,split,label\ns1,train,x\ns2,b,y\n", {}, ["line 3", "'split' is 'b'"]),
        ("slide,fold,label\ns1,0,x\ns2,-1,y\n", {}, ["line 3", "'fold' is '-1'"]),
        ("slide,fold,label\ns1,1.0,x\ns2,1.5,y\n", {}, ["line 3", "'fold' is '1.5'"]),
        ("slide,fold,label\ns1,0,x\ns2," + 5000 * "1" + ",y\n", {}, ["line 3", "5000 characters"]),
        ("slide,mpp,label\ns1,0.5,x\ns2,0,y\n", {}, ["line 3", "'mpp' is '0'"]),
        ("slide,mpp,label\ns1,true,x\ns2,1,y\n", {}, ["line 2", "'mpp' is 'true'"]),
        ("slide,mpp,label\ns1,0.5,x\ns2,inf,y\n", {}, ["line 3", "'mpp' is 'inf'"]),
        ("slide;mpp;label\ns1;0,5;x\ns2;0.25;y\n", {}, ["line 3", "'0.25'", "line 2", "'0,5'"]),
        ("slide,label\ns1,x,z\n", {}, ["line 2", "3 values for 2 columns"]),
        ("slide,label,label\ns1,x,z\n", {}, ["line 1", "two columns 'label'"]),
        ("", {}, ["is empty"]),
        ("slide,label\n", {}, ["names no slide"]),
        ("slide,label\ns1,x\n", {"task": "generate"}, ["classify, multilabel, regress, survival", "generate"]),
        ("slide,label\ns1,x\ns2,y\n", {"folder": Path("nowhere")}, ["nowhere", "no such folder", "`slides_folder`"]),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    slides: Path, text: str, options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(DatasetError) as caught:
        read(slides, text, **options)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert re.search(r"slides\.csv|nowhere", message)


def test_text_in_an_unknown_encoding_is_refused_with_its_line(slides: Path) -> None:
    with pytest.raises(DatasetError, match=r"slides\.csv, line 3: .*UTF-8"):
        read(slides, "slide,label\ns1,low\ns2,h\u00f6her\n", "latin-1")


def test_an_unknown_role_is_an_error_of_the_caller(slides: Path) -> None:
    with pytest.raises(ValueError, match="'grade'"):
        read(slides, "slide,label\ns1,x\n", columns={"grade": "label"})


CLASSES = ("benign", "tumour", "1_1", "Stage II", "h\u00f6her")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tables_mean_the_same_however_they_are_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Delimiters, encodings, line endings, decimal marks, the order of columns and lines: none changes a row."""
    draw = data.draw
    root = tmp_path_factory.getbasetemp() / "written"
    count = 8
    touch(root, tuple(f"{i % 3}/slide {i}.svs" for i in range(count)))
    classes = draw(st.lists(st.sampled_from(CLASSES), min_size=2, max_size=4, unique=True), label="classes")
    patients = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count), label="patients")
    comma = draw(st.booleans(), label="decimal commas")
    mpps = [None if i % 4 == 3 else 0.25 + i / 16 for i in range(count)]
    columns = {
        draw(st.sampled_from(["slide_id", "Slide ID", "filename", "WSI"])): [f"slide {i}" for i in range(count)],
        draw(st.sampled_from(["case_id", "Patient", "subject-id"])): [f"p{n}" for n in patients],
        draw(st.sampled_from(["label", "Target"])): [classes[i % len(classes)] for i in range(count)],
        "split": [("train", "Val", "testing")[n % 3] for n in patients],
        "MPP": ["NA" if mpp is None else str(mpp).replace(".", "," if comma else ".") for mpp in mpps],
    }
    names = draw(st.permutations([*columns]), label="columns")
    order = draw(st.permutations(range(count)), label="lines")
    rows = [names, *([columns[name][i] for name in names] for i in order)]
    text = io.StringIO()
    ending = draw(st.sampled_from(["\n", "\r\n"]), label="ending")
    csv.writer(text, delimiter=draw(st.sampled_from(",;\t")), lineterminator=ending).writerows(rows)
    path = root / "slides.csv"
    path.write_bytes(text.getvalue().encode(draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))))
    found = read_samples(path, SLIDES)
    assert (found.task, found.classes) == ("classify", tuple(sorted(classes)))
    for line, (i, row) in enumerate(zip(order, found.rows, strict=True), 2):
        label = found.classes.index(classes[i % len(classes)])
        part = ("train", "val", "test")[patients[i] % 3]
        assert row == (
            *(line, f"slide {i}", f"{i % 3}/slide {i}.svs", f"p{patients[i]}", part, None, label, mpps[i], None),
        )


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["train", "val", "test"])), min_size=1, max_size=8))
def test_no_patient_of_a_table_is_in_two_splits(
    tmp_path_factory: pytest.TempPathFactory, slides: list[tuple[int, str]]
) -> None:
    root = touch(tmp_path_factory.getbasetemp() / "splits", tuple(f"s{n}.svs" for n in range(8)))
    text = "slide,patient,split\n" + "".join(f"s{n},p{patient},{part}\n" for n, (patient, part) in enumerate(slides))
    # The first line whose patient has another part before.
    parts: dict[int, str] = {}
    twice = next((n for n, (patient, part) in enumerate(slides) if parts.setdefault(patient, part) != part), None)
    if twice is None:
        assert [row.split for row in read(root, text).rows] == [part for _, part in slides]
        return
    patient, part = slides[twice]
    first = next(n for n, slide in enumerate(slides) if slide[0] == patient)
    with pytest.raises(DatasetError) as caught:
        read(root, text)
    named = [f"line {twice + 2}: patient 'p{patient}'", f"{part} by 's{twice}'"]
    named += [f"{slides[first][1]} by 's{first}' of line {first + 2}"]
    assert [each for each in named if each not in str(caught.value)] == [], caught.value


def test_damaged_tables_are_refused_or_read(slides: Path) -> None:
    whole = b"slide,patient,split,time,event,mpp,fold\ns1,p,train,3.5,1,0.5,0\nb/s4.png,q,val,4,0,0.25,1\n"
    random = np.random.default_rng(0)
    for read_file in (read_samples, read_split_file):
        for _ in range(100):
            spoilt = bytearray(whole)
            for _ in range(random.integers(1, 4)):
                spoilt[random.integers(len(spoilt))] = random.choice([0, 10, 13, 34, 44, 59, 255, random.integers(256)])
            (slides / "slides.csv").write_bytes(bytes(spoilt[: random.integers(1, len(spoilt) + 1)]))
            with suppress(DatasetError):
                read_file(slides / "slides.csv")


# Folders of slides


@pytest.mark.parametrize(
    ("files", "options", "task", "rows"),
    [
        (("b.svs", "a.ome.tiff"), {}, None, [("a.ome", "", None), ("b", "", None)]),
        (("x/b.svs", "x/a.svs", "y/b.tif", "y/c/d.tif"), {}, "classify",
         [("a", "", 0), ("x/b", "", 0), ("y/b", "", 1), ("d", "", 1)]),
        (("x/b.svs", "y/a.svs"), {}, None, [("b", "", None), ("a", "", None)]),
        (("x/b.svs", "y/a.svs"), {"task": "classify"}, "classify", [("b", "", 0), ("a", "", 1)]),
        (("x/b.svs", "y/a.svs"), {"task": "classify", "label_columns": ()}, None, [("b", "", None), ("a", "", None)]),
        (("y/b.svs",), {"classes": ("x", "y")}, "classify", [("b", "", 1)]),
        (("train/x/a.svs", "train/y/b.svs", "Test/x/c.svs", "Test/y/d.svs"), {}, "classify",
         [("c", "test", 0), ("d", "test", 1), ("a", "train", 0), ("b", "train", 1)]),
    ],
)  # fmt: skip
def test_folders(
    tmp_path: Path, files: tuple[str, ...], options: dict[str, Any], task: str | None, rows: list[Any]
) -> None:
    found = read_samples(touch(tmp_path, files), **{"kind": SLIDES, **options})
    assert found.task == task
    assert [(row.name, row.split, row.label) for row in found.rows] == rows
    assert [row.path for row in found.rows] == sorted(files)
    assert {row.line for row in found.rows} == {0}


@pytest.mark.parametrize(
    ("files", "options", "parts"),
    [
        ((), {}, ["no slides", ".svs"]),
        (("a.svs", "a.tif"), {}, ["a.svs", "a.tif"]),
        (("a.svs", "x/b.tif"), {"task": "classify"}, ["a.svs", "slides.csv"]),
        (("x/b.tif",), {"task": "classify"}, ["'x'", "two"]),
        (("x/b.tif",), {"task": "classify", "classes": ("u", "v")}, ["'x'", "u, v"]),
        (("x/b.tif",), {"task": "regress"}, ["regress", "slides.csv"]),
        (("x/b.tif",), {"columns": {"slide": "x"}}, ["slides.csv"]),
        (("train/TCGA-AA-0001-1.svs", "val/TCGA-AA-0001-2.svs"), {}, ["TCGA-AA-0001", "train", "val"]),
    ],
)
def test_folders_that_are_wrong(
    tmp_path: Path, files: tuple[str, ...], options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(DatasetError) as caught:
        read_samples(touch(tmp_path, files), **{"kind": SLIDES, **options})
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value


# Files of splits


@pytest.mark.parametrize(
    "text",
    [
        ",train,val,test\n0,a,c,1_1\n1,b,,\n",
        "train;val;test\r\na;c;1_1\r\nb;;\r\n",
        ",train,val,test\na,True,False,False\nb,TRUE,False,False\nc,False,True,False\n1_1,False,False,True\nd,False,False,False\n",
        "slide_id,case_id,split\na,p,train\nb,p,train\nc,q,val\n1_1,r,test\n",
        "\ufeffslide_id;fold;split\r\na;0;train\r\nb;1,0;train\r\nc;;val\r\n1_1;NaN;test\r\n",
    ],
)
def test_split_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "splits_0.csv").write_text(text, newline="", encoding="utf-8")
    found = read_split_file(tmp_path / "splits_0.csv")
    assert {each.name: each.split for each in found} == {"a": "train", "b": "train", "c": "val", "1_1": "test"}
    folds = {"a": 0, "b": 1} if "fold" in text else {}
    assert {each.name: each.fold for each in found if each.fold is not None} == folds


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (",train,val,test\n0,a,c,\n1,b,a,\n", ["line 3", "'a'", "val", "line 2", "train"]),
        (",train,val,test\n0,a,c,\n1,a,,\n", ["line 3", "'a'", "line 2"]),
        (",train,val\na,True,True\n", ["line 2", "'a'"]),
        (",train,val\n,True,False\n", ["line 2", "names no sample"]),
        ("train,val\nTrue,False\n", ["no column of samples"]),
        (",train\n0,a\n", ["line 1", "train", "slide_id and split"]),
        (",train,val,valid\n0,a,b,c\n", ["line 1", "val and valid"]),
        ("slide,label\na,x\n", ["line 1", "slide, label"]),
        ("slide,split\na,x\n", ["line 2", "'split' is 'x'"]),
        ("slide,fold\na,0\nb,x\n", ["line 3", "'fold' is 'x'"]),
        ("slide,fold\na,0\na,1\n", ["line 3", "'a'", "fold 1", "line 2", "fold 0"]),
        ("train,val\nnan,nan\n", ["names no sample"]),
    ],
)
def test_split_files_that_are_wrong(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "splits_0.csv").write_text(text)
    with pytest.raises(DatasetError) as caught:
        read_split_file(tmp_path / "splits_0.csv")
    assert [part for part in ["splits_0.csv", *parts] if part not in str(caught.value)] == [], caught.value


def test_columns_of_numbers_that_the_user_names_are_those_of_training_in_order(slides: Path) -> None:
    """Under other names. The same names in another order stay what they are."""
    text = "slide,Dosis,Alter\ns1,1,2.5\ns2,3,4.5\n"
    how: dict[str, Any] = {"task": "regress", "label_columns": ("Alter", "Dosis")}
    found = read(slides, text, classes=("age", "dose"), **how)
    assert found.classes == ("age", "dose")
    assert [row.label for row in found.rows] == [(2.5, 1.0), (4.5, 3.0)]
    assert read(slides, text, classes=("Dosis", "Alter"), **how).classes == ("Alter", "Dosis")
