"""mpi4dl.datasets.samples and .table: tables as clinics and CLAM write them, folders of slides, files of splits."""

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from mpi4dl import datasets
from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.kinds import FEATURES, SLIDES
from mpi4dl.datasets.samples import SampleTable, read_samples, read_split_file
from mpi4dl.datasets.sources import open_files
from mpi4dl.datasets.table import identifies

FILES = ("s1.svs", "s2.tiff", "a/s3.ndpi", "a/s4.ome.tif", "b/s4.png")


def touch(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    return touch(tmp_path / "slides", FILES)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = touch(tmp_path / "images", ("a/1.png", "a/2.png", "b/1.png", "b/3.jpg"))
    for path in root.glob("*/*"):
        PIL.Image.new("RGB", (5, 4)).save(path)
    return root


def read(root: Path, text: str, encoding: str = "utf-8", **options: Any) -> SampleTable:
    (root / "slides.csv").write_text(text, encoding, newline="")
    return read_samples(root / "slides.csv", **{"kind": SLIDES, **options})


def write(folder: Path, text: str) -> Path:
    (folder / "labels.csv").write_text(text, "utf-8")
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
        (",case_id,slide_id,label\n5,p,a/1,x\n0,p,3,y\n", None, "classify", ("x", "y"), [0, 1]),
        ("patient,file,event,time\n1,a/1,TRUE,1\n2,3,FALSE,2\n", None, "survival", ("risk",), [(1.0, 1.0), (2.0, 0.0)]),
        ("Event,path,Time\n1,a/1.png,37\n0,b/1,0\n", None, "survival", ("risk",), [(37.0, 1.0), (0.0, 0.0)]),
    ],
)
def test_columns_tell_the_task(
    images: Path, text: str, task: str | None, found: str, classes: tuple[str, ...], labels: list[Any]
) -> None:
    folder = open_files(write(images, text), task=task)
    assert (folder.task, folder.classes) == (found, classes)
    assert [folder.label(index) for index in range(len(folder))] == labels
    assert folder.image(0).size == (4, 5)


@pytest.mark.parametrize(
    ("text", "options", "task", "classes", "labels", "columns"),
    [
        ("\ufeffSlide-Name;PatientID;Class;MPP\r\ns1.svs;p;10;0,25\r\na\\s3;q;2;0,5\r\n",
         {}, "classify", ("2", "10"), [1, 0],
         {"slide": "Slide-Name", "patient": "PatientID", "mpp": "MPP", "label": "Class"}),
        ("file\tpatient\ttime\tEvent\tage\ns1\tp\t37.5\t1\t61\ns2\tq\t2\tFALSE\t50\n",
         {}, "survival", ("risk",), [(37.5, 1.0), (2.0, 0.0)],
         {"slide": "file", "patient": "patient", "label": "time, event"}),
        ("Unnamed: 0,wsi,case,necrosis,stroma\n0,s1,p,1,0\n1,s2,q,1,1\n",
         {}, "multilabel", ("necrosis", "stroma"), [(1.0, 0.0), (1.0, 1.0)],
         {"slide": "wsi", "patient": "case", "label": "necrosis, stroma"}),
        ("slide,patient,dose,sex\ns1,p,1.5,f\ns2,q,2,m\n",
         {"label_columns": ["dose"]}, "regress", ("dose",), [(1.5,), (2.0,)],
         {"slide": "slide", "patient": "patient", "label": "dose"}),
        ("slide,patient,label,time,event\ns1,p,x,1,0\ns2,q,y,2,1\n",
         {"task": "survival"}, "survival", ("risk",), [(1.0, 0.0), (2.0, 1.0)],
         {"slide": "slide", "patient": "patient", "label": "time, event"}),
        ("slide,patient,label\ns1,p,y\ns2,q,y\n", {"classes": ("x", "y")}, "classify", ("x", "y"), [1, 1],
         {"slide": "slide", "patient": "patient", "label": "label"}),
        ("slide,patient,label\ns1,p,\ns2,q,nan\n", {"label_columns": ()}, None, (), [None, None],
         {"slide": "slide", "patient": "patient"}),
        ("slide_id,image,who,case_id,annotation\ns1,z,p,u,x\ns2,z,q,v,y\n",
         {"columns": {"slide": "slide_id", "patient": "who"}, "label_columns": ("annotation",)},
         "classify", ("x", "y"), [0, 1],
         {"slide": "slide_id", "patient": "who", "label": "annotation"}),
        ("slide,patient,split,cohort_split,grade\ns1,p,a,train,x\ns2,q,b,val,y\n",
         {"columns": {"split": "Cohort Split"}}, "classify", ("x", "y"), [0, 1],
         {"slide": "slide", "patient": "patient", "split": "cohort_split", "label": "grade"}),
        ("Scan;patient;label;size, in mm, if known, by eye, once\ns1;p;x;1\ns2;q;y;2\n",
         {"columns": {"slide": "Scan"}}, "classify", ("x", "y"), [0, 1],
         {"slide": "Scan", "patient": "patient", "label": "label"}),
        ("slide,patient,mask\ns1,p,b/s4.png\ns4,q,NA\n", {"task": "segment"}, "segment", (), [None, None],
         {"slide": "slide", "patient": "patient", "annotation": "mask"}),
    ],
)  # fmt: skip
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
        "slide_id,case_id,label,split,fold,mpp,annotation,w\n"
        "s1.svs,p,x,Train,0,0.25,s1.geojson,2.5\ns4.png,q,y,dev,,n/a,,0\n"
    )
    first, second = read(slides, text, columns={"weight": "w"}).rows
    assert first == (2, "s1.svs", "s1.svs", "p", "train", 0, 0, 0.25, "s1.geojson", 2.5, ())
    assert second == (3, "s4.png", "b/s4.png", "q", "val", None, 1, None, None, 0.0, ())


def test_slides_are_found_in_another_folder_and_by_absolute_paths(slides: Path, tmp_path_factory: Any) -> None:
    table = tmp_path_factory.mktemp("tables") / "slides.csv"
    table.write_text(f"path,label\n{slides}/a/s3.ndpi,x\ns2.tiff,y\n")
    found = read_samples(table, SLIDES, folder=slides)
    assert [row.path for row in found.rows] == ["a/s3.ndpi", "s2.tiff"]
    assert any("3 slides below" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    ("files", "table", "found"),
    [
        ("h5_files/s.h5 pt_files/s.pt h5_files/t.h5", "s.svs a/t.svs", "h5_files/s.h5 h5_files/t.h5"),
        ("s.h5 pt_files/s.pt pt_files/t.pt", "s t", "s.h5 pt_files/t.pt"),
        ("a/s.h5 b/s.pt a/t.h5", "b/s.svs a/t", "b/s.pt a/t.h5"),
        ("a/s.h5 a/t.h5", "a/s.svs b/t.svs", ""),  # of another folder, and another slide
    ],
)
def test_features_are_those_of_the_folder_of_their_slide(tmp_path: Path, files: str, table: str, found: str) -> None:
    touch(tmp_path, tuple(files.split()))
    text = "slide,label\n" + "".join(f"{name},{number}\n" for number, name in enumerate(table.split()))
    if found:
        assert [row.path for row in read(tmp_path, text, kind=FEATURES).rows] == found.split()
    else:
        with pytest.raises(DatasetError, match="is no file of features"):
            read(tmp_path, text, kind=FEATURES)


def test_names_with_points_are_found_in_subfolders_too(tmp_path: Path) -> None:
    names = ("TCGA-AA-0001-01Z.8c5f", "TCGA-AA-0001-01Z.9d0e")
    touch(tmp_path, tuple(f"{name[-4:]}/{name}.svs" for name in names))
    found = read(tmp_path, f"slide_id,label\n{names[1]},x\n{names[0]},y\n")
    assert [row.path for row in found.rows] == [f"9d0e/{names[1]}.svs", f"8c5f/{names[0]}.svs"]
    assert {row.patient for row in found.rows} == {"TCGA-AA-0001"}
    assert [row.name for row in read_samples(tmp_path, SLIDES).rows] == [*names]


def test_names_of_macos_are_those_of_tables(tmp_path: Path) -> None:
    """Of letters and marks apart, which look the same."""
    name = "präparat/é 1"
    touch(tmp_path, (unicodedata.normalize("NFD", f"{name}.svs"), "s2.svs"))
    for text in (name, f"{name}.svs", "é 1", "é 1.svs"):
        found = read(tmp_path, f"slide_id,label\n{text},x\ns2,y\n")
        assert found.rows[0].path == unicodedata.normalize("NFD", f"{name}.svs")


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


@pytest.mark.parametrize(
    "column",
    [
        *("Pat.-Nr.", "patient_no", "MRN", "Donor ID", "Patienten-ID", "case number", "ID Patient", "Nr. Patient"),
        *("n° patient", "N° de dossier", "Identifiant du patient", "Patient·e", "IPP", "Fall-Nr.", "Fallnummer"),
    ],
)
def test_patients_by_other_names_of_their_column(slides: Path, column: str) -> None:
    text = f"slide;{column};accession;class\ns1;7;x;a\ns2;7;x;b\ns3;8;y;a\n"
    found = read(slides, text)
    assert ([row.patient for row in found.rows], found.columns["patient"]) == (["7", "7", "8"], column)
    assert read(slides, text.replace("class", "case_id")).columns["patient"] == "case_id"
    with pytest.raises(DatasetError, match="which one can be the column of the patient: choose it"):
        read(slides, text.replace("accession", "pid"))
    alone = read(slides, text.replace(column, "size"))
    assert "`patient_column` accession would keep slides that are alike there together" in alone.remarks


def test_slides_that_are_their_patients_by_a_column(slides: Path) -> None:
    found = read(slides, "case_id,slide_id,label\ns1,s1,x\ns2,s2,y\n", task="classify")
    assert ([row.patient for row in found.rows], found.remarks[:-1]) == (["s1", "s2"], ())


def test_a_table_longer_than_any_is_not_read(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpi4dl.datasets.table.MOST_BYTES", 1 << 20)
    write(images, "file,grade\n" + "a/1.png,low\n" * 100_000)
    with pytest.raises(DatasetError, match=r"labels\.csv: has more than 1 MiB"):
        open_files(images)


def test_a_column_says_which_images_are_for_what(images: Path) -> None:
    write(images, "file,split,age\na/1.png,Train,1\na/2.png,test,2\nb/1.png,val,3\nb/3.jpg,trn,4\n")
    training, validation = datasets.open(images)
    assert [training.name(i) for i in range(2)] == ["a/1.png", "b/3.jpg"]
    assert [validation.label(i) for i in range(len(validation))] == [(3.0,)]
    assert training.task == "regress"
    write(images, "file,split,age\na/1.png,train,1\na/2.png,train,2\n")
    with pytest.raises(DatasetError, match=r"has no image to validate with: add images, or change the split"):
        datasets.open(images)


def test_a_column_of_parts_is_the_split_whatever_its_name(images: Path) -> None:
    """Else a run trains on what the table keeps for tests."""
    write(images, "file,cohort,label,phase\na/1.png,x,s,Train\na/2.png,x,t,train\nb/1.png,y,s,Test\nb/3.jpg,y,t,val\n")
    folder = open_files(images)
    assert ([row.split for row in folder.rows], folder.columns["split"]) == (["train", "train", "test", "val"], "phase")
    write(images, "file,label,phase\na/1.png,x,train\na/2.png,y,baseline\nb/1.png,x,train\nb/3.jpg,y,\n")
    assert {row.split for row in open_files(images).rows} == {""}


def test_chosen_columns(images: Path) -> None:
    write(images, "file,sex,age,stage\na/1.png,f,61,2\nb/1.png,m,50,3\n")
    folder = open_files(images, label_columns=("stage", "age"))
    assert (folder.task, folder.classes, folder.label(0)) == ("regress", ("stage", "age"), (2.0, 61.0))
    with pytest.raises(DatasetError, match=r"line 2: 'sex' is 'f', but regress needs a number"):
        open_files(images, task="regress")
    with pytest.raises(DatasetError, match=r"the columns sex, age, stage, .* name those that are learnt"):
        open_files(images)
    with pytest.raises(DatasetError, match=r"has no column 'grade' of labels, but sex, age, stage"):
        open_files(images, label_columns=("grade",))


WRONG_IMAGES: list[tuple[str, str | None, str]] = [
    ("", None, "labels.csv: is empty; expected a line such as file,class"),
    ("file,class\n", None, "labels.csv: names no image"),
    ("name,class\na,b\n", None, "line 1: has name, class: none of them can be the column of file names"),
    ("file\na/1.png\n", None, "has no column of labels beside the file names"),
    ("file,class,class\na,b,c\n", None, "line 1: has two columns 'class'"),
    ("file,class,\na,b,c\n", None, "line 1: has a column without a name"),
    ("file,class\na/1.png,x\n\na/2.png\n", None, "line 4: has 1 values for 2 columns"),
    ("file,class\na/1.png,x\na/2.png,\n", None, "line 3: 'class' is empty"),
    ("file,class\na/1.png,x\n,y\n", None, "line 3: 'file' is empty"),
    ("file,class\na/1.png,x\nb/1.png,y\na/1.png,y\n", None, "line 4: a/1.png is a/1.png, as line 2 is already"),
    ("file,class\na/1.png,x\n3.jpg,y\nb/3,y\n", None, "line 4: b/3 is b/3.jpg, as line 3 is already"),
    ("file,class\na/1.png,x\nb/2.png,y\n", None, "line 3: b/2.png is no image below"),
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
    ("file,class\n\"a/1.png,x\n", None, "is no line of a table"),
    ("file,label\n" + "".join(f"{i},{30 + i}\n" for i in range(40)), None, "40 values in 40 lines, such as '30'"),
    ("file,label\na/1.png,0.5\n3.jpg,0.7\n", None, "numbers that are not whole, which may be classes or amounts"),
    ("file,her2\na/1.png,0\n3.jpg,1+\n", None, "line 3: 'her2' is '1+', which is no number, but line 2 has '0'"),
    ("file,dose\na/1.png,1.5\n3.jpg,NA\n", None, "line 3: 'dose' is 'NA', which says that there is no value"),
    ("file;dose\na/1.png;1.5\n3.jpg;2,5\n", None, "line 2: 'dose' is '1.5', but line 3 has '2,5'"),
    ("file;dose\na/1.png;1,500\n3.jpg;2\n", None, "line 2: 'dose' is '1,500', whose comma may part thousands"),
    ("file;dose\na/1.png;1.500\n3.jpg;2\n", None, "line 2: 'dose' is '1.500', whose point may part thousands"),
    ("file;ki67\na/1.png;12,5 %\n3.jpg;5%\n", None, "'ki67' has numbers with a unit, such as '12,5 %': write"),
    ("file,patient\na/1.png,1\n3.jpg,2\n", None, "has no column of labels beside the file names"),
    ("file,grade\na/1.png,Low\n3.jpg,low\n", None, "line 3: 'grade' is 'low', but line 2 has 'Low'"),
    ("file,label\na/1.png,1\n3.jpg,1.0\n", None, "line 3: 'label' is '1.0', but line 2 has '1'"),
    ("file,label\na/1.png,1\n3.jpg,1\u200b\n", None, "line 3: 'label' is '1\\u200b', but line 2 has '1'"),
    ("file,grade\na/1.png,HER2-\n3.jpg,HER2\u2212\n", None, "but line 2 has 'HER2-': write one class in one way"),
    ("file,label\na/1.png,x\n3.jpg,'--\n", None, "\"'--\", which says that there is no value"),
    ("file,label\na/1.png,x\n3.jpg,[Not Available]\n", None, "'[Not Available]', which says that there is no value"),
    ("file,label\na/1.png,x\n3.jpg,None\n", None, "'None', which says that there is no value"),
    ("file;dose\na/1.png;1'500\n3.jpg;2'000,5\n", None, "which parts thousands: write numbers without marks"),
    ("file\x00,age\na/1.png,1\n", None, "line 1: has a NUL"),
    ("file,stage\n" + "".join(f"{i},{i % 3}\n" for i in range(9)), None, "has 3 whole numbers, which may be classes"),
    ("file,age\na/1.png," + 4300 * "9" + "\n3.jpg,1\n", "regress", "(4300 characters), but regress needs a number"),
]  # fmt: skip
WEIGHED = {"columns": {"weight": "w"}}
WRONG_SLIDES: list[tuple[str, dict[str, Any], list[str]]] = [
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
    ("slide,label\ns1,x\ns9,y\n", {}, ["line 3", "s9", "no slide", "`slides_folder`"]),
    ("slide,label\ns1,x\ns2,z\n", {"classes": ("x", "y")}, ["line 3", "'z'", "x, y"]),
    ("slide;dose\r\ns1;1,5\r\ns2;>10\r\n", {}, ["line 3", "'>10'", "line 2", "'1,5'"]),
    ("slide,patient,label\ns1,p,x\ns2,NA,y\n", {}, ["line 3", "'patient' is 'NA'"]),
    ("slide,patient,label\ns1,P 1,x\ns2,p 1,y\n", {}, ["line 3", "'p 1'", "line 2", "'P 1'"]),
    ("slide,patient,label\ns1,007,x\ns2,7.0,y\n", {}, ["line 3", "'7.0'", "line 2", "'007'"]),
    ("slide,patient,label\ns1,P-007,x\ns2,P\u20137,y\n", {}, ["line 3", "'P\u20137'", "line 2", "'P-007'"]),
    ("slide,patient,label\ns1,p,x\ns2,\u00adp\ufeff,y\n", {}, ["line 3", "'\\xadp\\ufeff'", "line 2", "'p'"]),
    ("slide,patient,label\ns1,p,x\ns2,Unknown,y\n", {}, ["line 3", "'patient' is 'Unknown'", "no value"]),
    ("slide;patient;label\ns1;1,23457E+11;x\ns2;2;y\n", {}, ["line 2", "'1,23457E+11'", "format the column as text"]),
    ("slide,label,set,phase\ns1,x,train,Test\ns2,y,test,Train\n", {}, ["line 1", "set and phase", "leave one"]),
    ("slide,patient,split,label\ns1,p,train,x\ns2,q,val,y\na/s3,p,test,y\n",
     {}, ["line 4", "'p'", "test", "'a/s3'", "train", "'s1' of line 2"]),
    ("slide,patient,fold,label\ns1,p,0,x\ns2,p,1,y\n", {}, ["line 3", "'p'", "fold 1", "'s2'", "fold 0", "'s1'"]),
    ("slide,split,label\ns1,train,x\ns2,,y\n", {}, ["line 3", "'split' is empty", "train, val or test"]),
    ("slide,fold,label\ns1,0,x\ns2,-1,y\n", {}, ["line 3", "'fold' is '-1'"]),
    ("slide,fold,label\ns1,1.0,x\ns2,1.5,y\n", {}, ["line 3", "'fold' is '1.5'"]),
    ("slide,mpp,label\ns1,0.5,x\ns2,0,y\n", {}, ["line 3", "'mpp' is '0'"]),
    ("slide,mpp,label\ns1,0.5,x\ns2,0.00025,y\n", {}, ["line 3", "'mpp' is '0.00025'", "from 0.01 to 100"]),
    ("slide,mpp,label\ns1,250,x\ns2,250,y\n", {}, ["line 2", "'mpp' is '250'"]),
    ("slide,w,label\ns1,1,x\ns2,-1,y\n", WEIGHED, ["line 3", "'w' is '-1'", "0 or more"]),
    ("slide,w,label\ns1,inf,x\ns2,1,y\n", WEIGHED, ["line 2", "'w' is 'inf'", "finite"]),
    ("slide,w,label\ns1,1,x\ns2,nan,y\n", WEIGHED, ["line 3", "'w' is empty"]),
    ("slide,w,label\ns1,1,x\ns2,much,y\n", WEIGHED, ["line 3", "'w' is 'much'"]),
    ("slide,mpp,label\ns1,true,x\ns2,1,y\n", {}, ["line 2", "'mpp' is 'true'"]),
    ("slide;mpp;label\ns1;0,5;x\ns2;0.25;y\n", {}, ["line 3", "'0.25'", "line 2", "'0,5'"]),
    ("slide,label\n", {}, ["names no slide"]),
    ("slide,label\ns1,x\n", {"task": "generate"}, ["classify, multilabel, regress, survival", "generate"]),
    ("slide,label\ns1,x\ns2,y\n", {"folder": Path("nowhere")}, ["nowhere", "no such folder", "`slides_folder`"]),
    ("slide,fold,label\ns1,0,x\ns2," + 5000 * "1" + ",y\n", {}, ["line 3", "5000 characters"]),
]  # fmt: skip


def test_a_column_of_weights_is_one_that_the_user_names(images: Path) -> None:
    folder = write(images, "file,weight,age\na/1.png,0,61.5\na/2.png,0,50\nb/3.jpg,2.5,40.5\n")
    named = open_files(folder, columns={"weight": "Weight"})
    assert (named.classes, [row.weight for row in named.rows]) == (("age",), [0.0, 0.0, 2.5])
    alone = open_files(folder)
    assert (alone.classes, {row.weight for row in alone.rows}) == (("weight", "age"), {None})
    chosen = open_files(folder, label_columns=["age"])
    assert "`weight_column` weight would weigh each image in the loss" in chosen.remarks
    assert open_files(folder, label_columns=["age"], columns={"weight": "lacking"}).rows == chosen.rows
    known = {"a/1.png": False, "a/2.png": False, "b/3.jpg": True}
    with pytest.raises(DatasetError, match=r"line 2: 'weight' is 0, as of all images to train on"):
        named.split(known=known, fraction=0.5, seed=0)
    training, _ = named.split(known={**known, "a/1.png": True, "b/3.jpg": False}, fraction=0.5, seed=0)
    assert training.weights == [0.0, 2.5]


@pytest.mark.parametrize(("text", "task", "message"), WRONG_IMAGES)
def test_what_is_wrong_with_images_is_said_with_its_line(
    images: Path, text: str, task: str | None, message: str
) -> None:
    with pytest.raises(DatasetError, match=re.escape(message)):
        open_files(write(images, text), task=task)


@pytest.mark.parametrize(("text", "options", "parts"), WRONG_SLIDES)
def test_what_is_wrong_with_slides_is_said_with_its_line(
    slides: Path, text: str, options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(DatasetError) as caught:
        read(slides, text, **options)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert re.search(r"slides\.csv|nowhere", message)


def test_text_in_an_unknown_encoding_is_refused_with_its_line(slides: Path) -> None:
    with pytest.raises(DatasetError, match=r"slides\.csv, line 3: is no text in UTF-8 .* in Excel as 'CSV UTF-8'"):
        read(slides, "slide,label\ns1,low\ns2,h\u00f6her\n", "latin-1")


def test_an_unknown_role_is_an_error_of_the_caller(slides: Path) -> None:
    with pytest.raises(ValueError, match="'grade'"):
        read(slides, "slide,label\ns1,x\n", columns={"grade": "label"})


def test_a_label_of_thousands_of_digits_is_a_class(images: Path) -> None:
    """Python turns no text of so many digits into a number."""
    folder = open_files(write(images, f"file,label\na/1.png,{5000 * '9'}\n3.jpg,2\n"))
    assert folder.classes == ("2", 5000 * "9")


@pytest.mark.parametrize(
    "name", ["id", "ID", "patient", "PatientID", "patient_id", "Case ID", "slide_id", "caseId", "MRN"]
)
def test_columns_that_identify_are_never_learnt(images: Path, name: str) -> None:
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


# Folders of slides


@pytest.mark.parametrize(
    ("files", "options", "task", "rows"),
    [
        (("b.svs", "a.ome.tiff"), {}, None, [("a.ome", "", None), ("b", "", None)]),
        (("x/b.svs", "x/a.svs", "y/b.tif", "y/c/d.tif"), {}, "classify",
         [("a", "", 0), ("x/b", "", 0), ("y/b", "", 1), ("d", "", 1)]),
        (("x/b.svs", "y/a.svs"), {}, None, [("b", "", None), ("a", "", None)]),
        (("x/a.svs", "x/b.svs"), {}, None, [("a", "", None), ("b", "", None)]),
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
