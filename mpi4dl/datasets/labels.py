"""Forms of labels, one for each task on images: what one looks like, where it is written, and what may be done with it.

Readers of folders, tables and datasets of your own ask a form. A task whose labels look like none of these adds one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

SURVIVAL = ("time", "event")


@dataclass(frozen=True)
class LabelForm:
    """The labels of a task.

    Attributes:
        task: the name of the task.
        where: where labels of images are written, for errors.
        may_be: whether a label, a tensor, may be of this form; the first form that says so is that of a dataset that
            does not name its task.
        in_folders: whether folders of images can tell them; in_tables: whether a table can have them.
        columns: the columns of a table that they are, in this order; empty: any.
        named_by_column: each column is a label of its own, and classes are the names of columns.
        classes: the names of what is learnt, if they are always the same.
        wrong: what is wrong with a number in a column of a table; empty: nothing.
        have_means: whether a weighted mean of two labels is a label, as mixup needs it.
        files: what labels are called that are files, each for an image; empty: they are no files.
        folders: the folders of images and of these files, beside each other.
        of_values: whether these files have values of pixels, as images have, and no classes.
        column: the usual column of these files in a table, beside those of `samples.ROLES`.
    """

    task: str
    where: str
    may_be: Callable[[torch.Tensor], bool] = lambda label: True
    in_folders: bool = False
    in_tables: bool = True
    columns: tuple[str, ...] = ()
    named_by_column: bool = False
    classes: tuple[str, ...] = ()
    wrong: Callable[[str, float], str] = lambda column, number: ""
    have_means: bool = False
    files: str = ""
    folders: tuple[str, str] = ("", "")
    of_values: bool = False
    column: str = ""


def _wrong_survival(column: str, number: float) -> str:
    if column == "event":
        return "" if number in (0, 1) else "survival needs 0 or 1"
    return "no time is negative" if number < 0 else ""


_TABLE = "write them into labels.csv, in the folder of the images"
# In the order in which an own dataset's labels are looked at.
FORMS: Mapping[str, LabelForm] = {
    form.task: form
    for form in (
        LabelForm(
            "classify",
            "a class is the folder of an image, or a column of labels.csv",
            lambda label: label.dim() < 2 and label.numel() == 1 and not label.is_floating_point(),
            in_folders=True,
            have_means=True,
        ),
        LabelForm(
            "multilabel",
            _TABLE,
            lambda label: label.dim() == 1 and {*label.tolist()} <= {0, 1},
            named_by_column=True,
            wrong=lambda column, number: "" if number in (0, 1) else "multilabel needs 0 or 1",
            have_means=True,
        ),
        LabelForm("regress", _TABLE, lambda label: label.dim() < 2, named_by_column=True, have_means=True),
        LabelForm(
            "survival",
            _TABLE,
            lambda label: label.numel() == 2,
            columns=SURVIVAL,
            classes=("risk",),
            wrong=_wrong_survival,
        ),
        LabelForm(
            "segment",
            "expected images/NAME.png and masks/NAME.png, or such folders below train and val",
            lambda label: label.dim() >= 2,
            in_folders=True,
            in_tables=False,
            files="mask",
            folders=("images", "masks"),
        ),
        LabelForm(
            "image",
            "expected inputs/NAME.png and targets/NAME.png, such folders below train and val, or a table with columns "
            "image and target",
            lambda label: label.dim() >= 2,
            in_folders=True,
            in_tables=False,
            files="target",
            folders=("inputs", "targets"),
            of_values=True,
            column="target",
        ),
    )
}


def files_of(task: str | None) -> str:
    """What the labels of a task are called if they are files, such as mask; else nothing."""
    return "" if task is None or task not in FORMS else FORMS[task].files


def of_values(task: str | None) -> bool:
    """Whether the labels of a task are files with values of pixels, such as targets."""
    return task is not None and task in FORMS and FORMS[task].of_values
