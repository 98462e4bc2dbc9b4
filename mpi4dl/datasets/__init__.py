"""Images of which every rank reads its own part: synthetic ones, folders of pictures, slides or volumes, arrays.

`open` a source, choose a `View` (the training size, how images fill it, augmentation), and let a `Loader` go through
the batches of tiles.
"""

from mpi4dl.datasets.augment import Augmentation, Mixup, Variation
from mpi4dl.datasets.base import BadImage, Dataset, DatasetError, Image, printable
from mpi4dl.datasets.files import open_image
from mpi4dl.datasets.loader import Batch, Loader, class_counts
from mpi4dl.datasets.map_style import adapt
from mpi4dl.datasets.masks import pixels_of
from mpi4dl.datasets.sources import open
from mpi4dl.datasets.transform import View
from mpi4dl.datasets.volumes import open_volume

__all__ = [
    "Augmentation",
    "BadImage",
    "Batch",
    "Dataset",
    "DatasetError",
    "Image",
    "Loader",
    "Mixup",
    "Variation",
    "View",
    "adapt",
    "class_counts",
    "open",
    "open_image",
    "open_volume",
    "pixels_of",
    "printable",
]
