"""Where slides are: recorded under `slides` with predictions and evaluations of them, so that they can be shown later.

    {"source": "/data/slides.csv", "root": "/data", "columns": {"slide": "slide_id", "label": "label"},
     "in_bounds": false,
     "slides": {"a/s1.svs": {"slide": "s1", "patient": "p1", "annotation": "/data/s1.geojson", "mpp": 0.25}}}

Of features the slides are named by their files of features, with the slide itself as `file`, if it is at hand.

`source` is the table or folder of slides, and names of slides begin at `root`. `mpp` are the microns per pixel that
the table or the user says; null: the file says them. `in_bounds`: coordinates of annotations begin where the scanner
began.
"""

from pathlib import Path
from typing import Any

from mpi4dl._signatures import signature_of
from mpi4dl.datasets.split import Named, in_whole

KEY = "slides"  # of predictions.json and evaluation.json


def places_of(*parts: Named) -> dict[str, Any]:
    """What a file of results says of the slides that it is of, with this user's signature; nothing of other images.

    The parts are of one table or folder, such as those of folds.
    """
    found = record_of(*parts)
    return {} if found is None else {KEY: {**found, "signature": signature_of(found)}}


def record_of(*parts: Named) -> dict[str, Any] | None:
    """What a record of these slides, or of some of them, has, as JSON; None for other images.

    Of pictures of which others are made it is their folder alone.
    """
    wholes = [in_whole(part)[0] for part in parts]
    whole = wholes[-1]
    if not whole.of_slides:
        return {"root": str(whole.root.absolute())} if getattr(whole, "are_made_from", False) else None
    assumed = whole.options.resolution.assumed_mpp
    return {
        "source": str(whole.source.absolute()),
        "root": str((whole.slides_root or whole.root).absolute()),
        "columns": dict(whole.columns),
        "in_bounds": whole.options.masks.in_bounds,
        "slides": {
            row.path: {
                "slide": row.name,
                "patient": row.patient,
                "annotation": None if row.annotation is None else str(annotation_of(row.annotation, whole)),
                "mpp": assumed if row.mpp is None else row.mpp,
                **whole.place_of(row.path),
            }
            for part in wholes
            for row in part.rows
        },
    }


def annotation_of(name: str, whole: Any) -> Path:
    """The file of an annotation, which a table names from its own folder on, or from that of the slides."""
    beside, below = (folder.absolute() / name.replace("\\", "/") for folder in (whole.source.parent, whole.root))
    return Path(below if below.is_file() and not beside.is_file() else beside)
