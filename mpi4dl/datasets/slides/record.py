"""Where the slides of predictions are: recorded beside them, so that they can be shown later.

    {"source": "/data/slides.csv", "root": "/data", "columns": {"slide": "slide_id", "label": "label"},
     "slides": {"a/s1.svs": {"slide": "s1", "patient": "p1", "annotation": "/data/s1.geojson", "mpp": 0.25}}}

`source` is the table or folder of slides, and names of slides begin at `root`. `mpp` are the microns per pixel that
the table or the user says; null: the file says them.
"""

from pathlib import Path
from typing import Any

from mpi4dl.datasets.slides.dataset import SlideFolder
from mpi4dl.datasets.split import Named, Subset

SLIDES = "slides.json"  # beside predictions


def record_of(images: Named) -> dict[str, Any] | None:
    """What a record of these slides, or of some of them, has, as JSON; None for other images."""
    slides = images.whole if isinstance(images, Subset) else images
    if not isinstance(slides, SlideFolder):
        return None
    root = slides.root.absolute()
    assumed = slides.options.resolution.assumed_mpp
    return {
        "source": str(slides.source.absolute()),
        "root": str(root),
        "columns": dict(slides.columns),
        "slides": {
            row.path: {
                "slide": row.slide,
                "patient": row.patient,
                "annotation": None if row.annotation is None else str(annotation_of(row.annotation, slides)),
                "mpp": assumed if row.mpp is None else row.mpp,
            }
            for row in slides.rows
        },
    }


def annotation_of(name: str, slides: SlideFolder) -> Path:
    """The file of an annotation, which a table names from the folder of slides on, or from its own."""
    beside = slides.source.absolute().parent / name
    below = slides.root.absolute() / name
    return beside if beside.is_file() and not below.is_file() else below
