"""Write small pictures to begin an encoder with: pieces of ten photographs that scikit-image ships, a class for each.

They are of stones, grass, faces, stars and others, none of stained tissue. Pieces to train on come from the upper two
thirds of a photograph, those to validate with from its lowest quarter, so none shares a pixel.

    python -m examples.textures --out data/textures
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data

PHOTOGRAPHS = (
    "astronaut",
    "brick",
    "camera",
    "cat",
    "coffee",
    "grass",
    "gravel",
    "hubble_deep_field",
    "moon",
    "retina",
)
SIDE_PX = 64
PARTS = {"train": (0.0, 0.66, 200), "val": (0.75, 1.0, 40)}  # the first and the last share of the rows, and how many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/textures"))
    out = parser.parse_args().out
    random = np.random.default_rng(0)
    for name in PHOTOGRAPHS:
        picture = Image.fromarray(getattr(data, name)()).convert("RGB")
        for part, (first, last, count) in PARTS.items():
            folder = out / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                left = random.integers(picture.width - SIDE_PX + 1)
                top = random.integers(int(first * picture.height), int(last * picture.height) - SIDE_PX + 1)
                picture.crop((left, top, left + SIDE_PX, top + SIDE_PX)).save(folder / f"{number}.png")
    print(f"{out}: {len(PHOTOGRAPHS)} classes of pictures of {SIDE_PX} x {SIDE_PX} px")


if __name__ == "__main__":
    main()
