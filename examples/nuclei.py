"""Write small pictures to begin an encoder with: synthetic tissue with nuclei of two sizes, in three densities.

Each of the six classes has pictures in many stains. They stand for the slides that a published encoder has seen: it
knows nuclei, but none as large as in the lesions of the slides that it is tuned on.

    python -m examples.nuclei --out data/nuclei
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.ndimage import gaussian_filter

SIDE_PX = 64
SIZES_PX = {"small": 1.5, "middle": 2.5}  # radii of nuclei
DENSITIES = {"sparse": 0.05, "usual": 0.15, "crowded": 0.35}  # the share of the picture that nuclei take
PARTS = {"train": 200, "val": 40}


def picture(radius_px: float, share: float, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Nuclei in a stain of random strength and colour, (64, 64, 3)."""
    plasm = np.array((210, 145, 190)) + random.uniform(-35, 35, 3)
    nuclei = np.array((85, 45, 110)) + random.uniform(-40, 40, 3)
    smooth = gaussian_filter(random.normal(size=(SIDE_PX, SIDE_PX)), radius_px * 0.7, mode="wrap")
    dark = smooth > np.quantile(smooth, 1 - share)
    shade = gaussian_filter(random.normal(size=(SIDE_PX, SIDE_PX, 1)), (8, 8, 0), mode="wrap")
    found = np.where(dark[..., None], nuclei, plasm + 150 * shade)
    return np.clip(found + random.normal(size=found.shape) * 6, 0, 255).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/nuclei"))
    out = parser.parse_args().out
    begun = out.with_name(f"{out.name}.begun")
    shutil.rmtree(begun, ignore_errors=True)
    random = np.random.default_rng(0)
    for size, radius_px in SIZES_PX.items():
        for density, share in DENSITIES.items():
            for part, count in PARTS.items():
                folder = begun / part / f"{size}-{density}"
                folder.mkdir(parents=True, exist_ok=True)
                for number in range(count):
                    Image.fromarray(picture(radius_px, share, random)).save(folder / f"{number}.png")
    begun.rename(out)
    print(f"{out}: {len(SIZES_PX) * len(DENSITIES)} classes of pictures of {SIDE_PX} x {SIDE_PX} px")


if __name__ == "__main__":
    main()
