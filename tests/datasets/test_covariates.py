"""Columns of patients beside slides: how they are read, fitted to the patients to train on, and become numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.covariates import Covariate, fitted, remarks
from mpi4dl.datasets.kinds import SLIDES
from mpi4dl.datasets.samples import SampleTable, read_samples
from mpi4dl.options.config import Config, ConfigError, parse, shared_options, to_toml
from mpi4dl.options.declare import with_options

TABLE = """patient,file,label,Age,sex,site,stain,split
a,1,x,60,f,1,TRUE,train
a,2,x,60,f,1.0,FALSE,train
a,3,x,66,f,1,TRUE,train
b,4,y,50,m,4,TRUE,train
c,5,y,NA,,2,TRUE,train
d,6,y,{age},{sex},{site},TRUE,test
"""
ASKED = tuple(map(Covariate.read, ("age", "sex", "site:class", "stain")))
TRAINED = range(5)


def read(root: Path, text: str = TABLE, asked: tuple[Covariate, ...] = ASKED, **test: Any) -> SampleTable:
    for number in range(1, 7):
        (root / f"{number}.svs").touch()
    (root / "slides.csv").write_text(text.format(**{"age": 70, "sex": "f", "site": 4, **test}))
    return read_samples(root / "slides.csv", SLIDES, columns={"covariates": asked})


def test_columns_are_fitted_to_each_patient_to_train_on_once(tmp_path: Path) -> None:
    """A patient is the mean of its slides: 62 of a, and 50 of b."""
    found = read(tmp_path)
    age, sex, site, stain = fitted(ASKED, found.rows, TRAINED)
    assert (age.fit, sex.fit, site.fit) == ((56.0, 6.0), ("f", "m"), ("1", "2", "4"))
    of_a, of_b, of_c = 2 / 3, 1.0, 1.0
    assert stain.fit == pytest.approx((np.mean([of_a, of_b, of_c]), np.std([of_a, of_b, of_c])))
    assert (found.task, found.classes, found.columns["covariates"]) == ("classify", ("x", "y"), "Age, sex, site, stain")
    cells = [[cell for _, cell in row.covariates] for row in found.rows]
    numbers = [[age.numbers(each[0]), sex.numbers(each[1]), site.numbers(each[2])] for each in cells]
    assert numbers[1:] == [
        [[4 / 6], [1, 0], [1, 0, 0]],
        [[10 / 6], [1, 0], [1, 0, 0]],
        [[-1.0], [0, 1], [0, 0, 1]],
        [[0.0], [0, 0], [0, 1, 0]],
        [[14 / 6], [1, 0], [0, 0, 1]],
    ]


@pytest.mark.parametrize("test", [{"age": 1e6}, {"age": "NA", "sex": "x", "site": 9}, {"age": "", "sex": "NA"}])
def test_what_is_not_trained_on_changes_nothing(tmp_path: Path, test: dict[str, Any]) -> None:
    expected = fitted(ASKED, read(tmp_path).rows, TRAINED)
    assert fitted(ASKED, read(tmp_path, **test).rows, TRAINED) == expected
    assert fitted(ASKED, read(tmp_path, **test).rows, range(6)) != expected


def test_what_is_said_of_cells(tmp_path: Path) -> None:
    found = read(tmp_path, sex="other", site=9.0)
    fit = fitted(ASKED, found.rows, TRAINED)
    assert [*remarks(fit, found.rows, "slides.csv")] == [
        "covariate age: no value of 1 slide, taken for its mean: 5",
        "covariate sex: no value of 1 slide, taken for no class: 5",
        "warning: covariate sex: 1 slide of classes that training did not have, taken for no class: 6 (other)",
        "warning: covariate site: 1 slide of classes that training did not have, taken for no class: 6 (9.0)",
    ]
    assert [fit[1].numbers("other"), fit[2].numbers("9.0"), fit[2].numbers("4.0")] == [[0, 0], [0, 0, 0], [0, 0, 1]]
    later = read(tmp_path, asked=fit, age="old")
    with pytest.raises(DatasetError, match=r"slides.csv, line 7: 'age' is 'old', but training had numbers"):
        list(remarks(fit, later.rows, "slides.csv"))
    later = read(tmp_path, asked=(Covariate("age", is_class=True),), age="old")
    assert fitted([Covariate("age", is_class=True)], later.rows, TRAINED)[0].fit == ("50", "60", "66")


def test_one_value_of_all_stays_where_it_is(tmp_path: Path) -> None:
    (age,) = fitted(ASKED[:1], read(tmp_path).rows, [3, 4])
    assert (age.fit, age.numbers("50"), age.numbers(None), age.numbers("51")) == ((50.0, 1.0), [0.0], [0.0], [1.0])


@pytest.mark.parametrize(
    ("asked", "text", "message"),
    [
        ("agee", TABLE, r"slides.csv, line 1: has no column 'agee' of covariates, but patient, file"),
        ("sex", TABLE.replace("stain", "sex_"), "has two columns 'SEX' of covariates, but sex, sex_"),
        ("patient", TABLE, "'patient' is the column of the patient: leave it out of `covariates`"),
        ("label", TABLE, "'label' is the column of the label: leave it out of `covariates`"),
        ("age", TABLE.replace("66", "ca. 66"), "line 4: 'Age' is 'ca. 66', .* or name it by `covariates` age:class"),
        ("sex", TABLE.replace("m,4", "F,4"), "line 5: 'sex' is 'F', but line 2 has 'f': write one class in one way"),
        ("age", TABLE.replace("60", "1,500").replace(",", ";").replace("1;500", "1,500"), "may part thousands"),
    ],
)
def test_which_columns_are_refused(tmp_path: Path, asked: str, text: str, message: str) -> None:
    name = "SEX" if asked == "sex" else asked
    with pytest.raises(DatasetError, match=message):
        read(tmp_path, text, (Covariate(name),))


def test_a_column_without_values_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="`covariates` sex: no slide to train on has a value"):
        fitted(ASKED[1:2], read(tmp_path).rows, [4])


def test_labels_are_no_covariates_and_covariates_no_labels(tmp_path: Path) -> None:
    text = TABLE.replace("label", "grade")
    with pytest.raises(DatasetError, match="'Age' is 'NA'"):  # else all columns are labels
        read(tmp_path, text, ())
    assert read(tmp_path, text).classes == ("x", "y")
    columns = {"covariates": (Covariate("grade"),)}
    with pytest.raises(DatasetError, match="'grade' is the column of the label"):
        read_samples(tmp_path / "slides.csv", SLIDES, columns=columns, label_columns=["grade"])
    with pytest.raises(DatasetError, match="is a folder of slides, and has no columns"):
        read_samples(tmp_path, SLIDES, columns=columns)


FIT = '[["age", 61.25, 9.5], ["sex", "f", "it\'s, \\"x\\""], ["site:class", "1", "2"]]'


def test_a_file_keeps_what_columns_were_fitted_to(tmp_path: Path) -> None:
    asked = parse(["--covariates", "age, sex,site:class"])
    assert shared_options(asked)["covariates"] == '"age,sex,site:class"'
    config = with_options(asked, {"covariates": FIT})
    assert shared_options(config)["covariates"] == FIT
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert parse(["--config", str(tmp_path / "config.toml")]) == config
    assert [each.width for each in config.slides.covariates] == [1, 2, 2]
    assert [each.width for each in asked.slides.covariates] == [1, 1, 1]


@pytest.mark.parametrize(
    "value",
    [
        '"age,age"',
        '":class"',
        "3",
        "[[]]",
        "[[1]]",
        '[["a", 1.0]]',
        '[["a", 1.0, 0.0]]',
        '[["a", 1.0, "b"]]',
        '[["a", 1]]',
    ],
)
def test_what_no_covariates_are(value: str) -> None:
    with pytest.raises(ConfigError, match="must be names of columns"):
        with_options(Config(), {"covariates": value})
