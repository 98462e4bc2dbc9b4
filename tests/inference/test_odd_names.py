"""Names of slides and classes are text in pictures and tables, whatever matplotlib and spreadsheets make of them."""

import csv
import io
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from matplotlib.figure import Figure

from mpi4dl._numbers import as_cell, of_cell
from mpi4dl._wording import literal
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.slides.slide import Level, Slide, SlideFile
from mpi4dl.inference.class_maps import thumbnail_of
from mpi4dl.inference.maps import PatchMap, picture
from mpi4dl.results.formats import table_row

NAMES = ("a$_$b", "$\\frac$", "_hidden", "a\nb", "\udcff", r"\$x$")


@pytest.mark.parametrize("name", NAMES)
def test_matplotlib_shows_names_as_they_are(name: str) -> None:
    axes = Figure().add_subplot()
    axes.plot([1, 2], label=literal(name))
    (shown,) = axes.legend().get_texts()
    text, is_formula = shown._preprocess_math(shown.get_text())
    assert not is_formula
    assert text.strip() == "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


@pytest.mark.parametrize("draw", ["class map", "heat map"])
def test_pictures_of_slides_with_such_names_are_drawn(draw: str) -> None:
    name = NAMES[0]
    image = WholeImage(np.broadcast_to(np.uint8(255), (90, 140, 3)))
    slide = Slide(SlideFile(Path(f"{name}.tif"), (Level(image, 1.0),), 0.5), 1.0)
    if draw == "class map":
        found = thumbnail_of(np.zeros((90, 140), np.uint8), slide, (name, "b"))
    else:
        found = picture(slide, PatchMap([(0, 0), (1, 1)], np.ones(2, np.float32), 32, name))
    assert PIL.Image.open(io.BytesIO(found)).width > 100


@pytest.mark.parametrize("name", ["=1+1", "+cmd", "-ve", "@x", "\tx", "'=1", "''-x"])
def test_no_name_is_a_formula_in_a_table_and_each_can_be_read_back(name: str) -> None:
    row = table_row(["image", "prediction", "risk"], {"image": f"{name}.png", "prediction": name, "risk": -0.5})
    cells = next(csv.reader([row.decode()]))
    assert cells[2] == "-0.5"
    assert all(cell[0] not in "=+-@\t\r" for cell in cells[:2])
    assert [of_cell(cell) for cell in cells[:2]] == [f"{name}.png", name]


@pytest.mark.parametrize("text", ["plain", "'quoted", "-1", "1e5", "", "a=b"])
def test_other_text_is_left_as_it_is(text: str) -> None:
    assert as_cell(text) == of_cell(text) == text
