"""Colours of stained tissue: their random variation, and their normalization to a reference. Each pixel by itself.

    byte v -> optical density d = -ln(max(v, 1) / 255) -> a linear map of the three densities -> byte

White has density 0. Stains absorb light, so densities of several stains add up: d = c S, where a row of S is the colour
of a stain, and c has the concentrations.

    Ruifrok & Johnston, "Quantification of histochemical staining by color deconvolution", 2001
    Reinhard et al., "Color transfer between images", 2001
    Macenko et al., "A method for normalizing histology slides for quantitative analysis", 2009
    Tellez et al., "Whole-slide mitosis detection in H&E breast histology using PHH3 as a reference", 2018
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import Pixels

Array = npt.NDArray[np.float64]
Recolour = Callable[[Pixels], Pixels]  # pixels (..., 3), each by itself

TOP = 255.0
MOST_EXPONENT = 29.0  # a product of three factors remains finite in float32

# Colours of hematoxylin, eosin and DAB: densities of red, green and blue, each of length 1 (Ruifrok & Johnston).
_HED = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
HED: Array = _HED / np.linalg.norm(_HED, axis=1, keepdims=True)


def densities_of(pixels: npt.NDArray[Any]) -> Array:
    """The optical densities of bytes."""
    return -np.log(np.maximum(np.asarray(pixels, np.float64), 1.0) / TOP)


class DensityMap:
    """Maps densities d of pixels to d @ matrix + offset.

    A byte has one of 256 densities. So each channel of the result is a product of three numbers out of tables, which
    rounds alike in a box of any size, on any machine.
    """

    def __init__(self, matrix: Array, offset: Sequence[float] | Array = (0.0, 0.0, 0.0)) -> None:
        exponents = -np.asarray(matrix, np.float64).T[:, :, None] * densities_of(np.arange(256))
        factors = np.exp(np.clip(exponents, -MOST_EXPONENT, MOST_EXPONENT))  # (channel, of channel, byte)
        factors[:, 0] *= TOP * np.exp(-np.asarray(offset, np.float64))[:, None]
        self._factors = factors.astype(np.float32)

    def __call__(self, pixels: Pixels) -> Pixels:
        """Other pixels (..., 3) for pixels (..., 3)."""
        found = np.empty(pixels.shape, np.uint8)
        for channel, (red, green, blue) in enumerate(self._factors):
            plane = red[pixels[..., 0]]
            plane *= green[pixels[..., 1]]
            plane *= blue[pixels[..., 2]]
            np.rint(plane, out=plane)
            found[..., channel] = np.minimum(plane, np.float32(TOP), out=plane)
        return found


def stain_variation(numbers: Sequence[float]) -> DensityMap:
    """Three factors of the concentrations of hematoxylin, eosin and DAB, and what is then added to each of them."""
    factors, added = np.asarray(numbers[:3], np.float64), np.asarray(numbers[3:], np.float64)
    return DensityMap(np.linalg.inv(HED) @ (factors[:, None] * HED), added @ HED)


# Normalization: what the colours of a slide are is measured once, on some of its tissue.

LEAST_DENSITY = 0.15  # of tissue; less is glass (Macenko et al.)
EXTREME = 1.0  # percent of angles, and of concentrations, that are left out at either end
LEAST_PIXELS = 2000  # with tissue, of which stains are measured
LEAST_ANGLE = 0.05  # between the colours of two stains, radians


@dataclass(frozen=True)
class MacenkoStains:
    """The colours of hematoxylin and eosin, three numbers of length 1 each, and the largest concentration of each."""

    numbers: tuple[float, ...]

    @classmethod
    def measured(cls, pixels: Pixels) -> "MacenkoStains | None":
        """Those of the pixels (N, 3) of some tissue; None if there are too few, or two stains cannot be told apart."""
        densities = densities_of(pixels)
        densities = densities[densities.min(1) >= LEAST_DENSITY]
        if len(densities) < LEAST_PIXELS:
            return None
        # The plane of the two largest singular directions, the first of which is near the mean colour.
        _, plane = np.linalg.eigh(densities.T @ densities)
        plane = plane[:, [2, 1]]
        plane *= np.where(plane.sum(0) < 0, -1.0, 1.0)
        across, along = (densities @ plane).T[::-1]
        first, last = np.percentile(np.arctan2(across, along), (EXTREME, 100 - EXTREME))
        if last - first < LEAST_ANGLE:
            return None
        colours = sorted(
            (plane @ (np.cos(angle), np.sin(angle)) for angle in (first, last)), key=lambda colour: -colour[0]
        )  # hematoxylin absorbs more red than eosin does
        largest = np.percentile(densities @ np.linalg.pinv(np.array(colours)), 100 - EXTREME, axis=0)
        if largest.min() <= 0:
            return None
        return cls((*np.concatenate(colours).tolist(), *largest.tolist()))

    def to(self, reference: "MacenkoStains") -> Recolour:
        """Pixels with these stains become pixels with those of the reference."""
        own, wanted = (np.reshape(each.numbers[:6], (2, 3)) for each in (self, reference))
        scale = np.array(reference.numbers[6:]) / np.array(self.numbers[6:])
        return DensityMap(np.linalg.pinv(own) @ (scale[:, None] * wanted))


# From red, green and blue to long, medium and short cones, and from the logarithms of these to l, alpha, beta.
_TO_CONES = np.array([[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]])
_TO_LAB = np.diag([1 / np.sqrt(3), 1 / np.sqrt(6), 1 / np.sqrt(2)]) @ [[1, 1, 1], [1, 1, -2], [1, -1, 0]]
_LEAST_SPREAD = 1e-3
GLASS = 0.1  # density
_AT_ONCE = 1 << 18  # pixels


@dataclass(frozen=True)
class ReinhardColours:
    """The mean and the standard deviation of l, alpha and beta over tissue, three numbers each."""

    numbers: tuple[float, ...]

    @classmethod
    def measured(cls, pixels: Pixels) -> "ReinhardColours | None":
        """Those of the pixels (N, 3) of some tissue; None if there are too few, or all are of one colour."""
        pixels = pixels[densities_of(pixels).max(1) >= LEAST_DENSITY]
        if len(pixels) < LEAST_PIXELS:
            return None
        lab = np.log(np.maximum(pixels, 1.0) @ _TO_CONES.T) @ _TO_LAB.T  # natural logarithms of bytes from 1 on
        mean, std = lab.mean(0), lab.std(0)
        return None if std.min() < _LEAST_SPREAD else cls((*mean.tolist(), *std.tolist()))

    def to(self, reference: "ReinhardColours") -> Recolour:
        """Pixels with these colours become pixels with those of the reference; the whiter a pixel, the less.

        Glass, whose largest density is at most `GLASS`, remains as it is. From twice that on a pixel changes fully.
        """
        (own_mean, own_std), (mean, std) = (np.reshape(each.numbers, (2, 3)) for each in (self, reference))
        scale = std / own_std
        back, from_cones = np.linalg.inv(_TO_LAB), np.linalg.inv(_TO_CONES)
        # Of a logarithm of cones x it is x @ mixed + moved: the means and both changes of basis in one.
        mixed = _TO_LAB.T @ np.diag(scale) @ back.T
        moved = (mean - scale * own_mean) @ back.T

        def recolour(pixels: Pixels) -> Pixels:
            flat = pixels.reshape(-1, 3)
            found = np.empty(flat.shape, np.uint8)
            for start in range(0, len(flat), _AT_ONCE):
                some = flat[start : start + _AT_ONCE]
                planes = [np.maximum(some[:, channel], 1.0) for channel in range(3)]
                cones = [np.log(each) for each in _combined(planes, _TO_CONES.T)]
                cones = [np.exp(each + by) for each, by in zip(_combined(cones, mixed), moved, strict=True)]
                share = np.clip(densities_of(some.min(1)) / GLASS - 1.0, 0.0, 1.0)
                for channel, made in enumerate(_combined(cones, from_cones.T)):
                    blended = some[:, channel] + share * (made - some[:, channel])
                    found[start : start + _AT_ONCE, channel] = np.clip(np.rint(blended), 0, TOP)
            return found.reshape(pixels.shape)

        return recolour


def _combined(planes: Sequence[Array], matrix: Array) -> list[Array]:
    """Planes (3) times a matrix (3, 3), written out: a product of matrices may round otherwise in other boxes."""
    return [planes[0] * a + planes[1] * b + planes[2] * c for a, b, c in matrix.T]


Measured = MacenkoStains | ReinhardColours

# By name, how colours are measured, and those of the reference that is built in: for Macenko the stains of the code of
# its authors, for Reinhard the means and deviations of the slide of the TCGA that is the default of HistomicsTK.
METHODS: dict[str, tuple[type[MacenkoStains] | type[ReinhardColours], tuple[float, ...]]] = {
    "macenko": (MacenkoStains, (0.5626, 0.7201, 0.4062, 0.2159, 0.8012, 0.5581, 1.9705, 1.0308)),
    "reinhard": (ReinhardColours, (8.63234435, -0.11501964, 0.03868433, 0.57506023, 0.10403329, 0.01364062)),
}


@dataclass(frozen=True)
class StainNormalization:
    """A method of `METHODS`, and the numbers of its reference."""

    method: str
    reference: tuple[float, ...]

    def measured(self, pixels: Pixels) -> Measured | None:
        """What the method measures of the pixels (N, 3) of some tissue; None if they do not suffice."""
        return METHODS[self.method][0].measured(pixels)

    def recolour(self, measured: Measured) -> Recolour:
        """What makes the colours that were measured those of the reference."""
        reference: Any = METHODS[self.method][0](self.reference)
        return measured.to(reference)
