"""The records of images by task, as JSON and as rows of a table.

    classify      prediction, probabilities of all classes        regress    prediction, or several by name
    multilabel    predictions (0, 1) and probabilities by name    survival   risk, of which more is worse
    image         prediction, the file of the picture; beside a target how alike both are: psnr, ssim, mae
    segment       the file of the mask, the pixels of each class; beside a true mask how alike both are; of slides
                  `beside`, the picture and the polygons, in JSON alone

With labels there is `label`, or `labels` by name, or `time` and `event`. Unreadable images have an `error` instead.
"""

from collections.abc import Sequence

from mpi4dl.results.formats import flat
from mpi4dl.tasks.task import Task

NOT_NUMBERS = "the model's outputs are not numbers (NaN)"


def columns_of(
    task: type[Task],
    classes: Sequence[str],
    labelled: bool,
    apart: bool = False,
    crops: bool = False,
    patients: bool = False,
) -> list[str]:
    """The columns of a table of records, such as "probability tumour"; `apart`: each class has a mask of its own.

    With `crops` there is `seen`, the share of an image's pixels that the model saw; with `patients` the patient.
    """
    every = flat(task.blank(classes, labelled, apart))
    return ["image", *(["patient"] if patients else []), *every, *(["seen"] if crops else []), "error"]
