"""Show a picture that a model makes: its target, made whole, and made in tiles that are each seen alone, side by side.

    python examples/seams.py RUN FOLDER NAME SIDE OUT.png

FOLDER has inputs/NAME and targets/NAME. The tiles of SIDE px do not overlap, as when a model is run tile by tile.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from mpi4dl import TrainedModel

SHOWN_PX, TIMES = 160, 2  # the part from the upper left that is shown, and how much it is enlarged


def main(run: str, folder: str, name: str, side: int, out: str) -> None:
    model = TrainedModel(run)
    whole = Image.open(Path(folder, "inputs", name))
    with TemporaryDirectory() as temporary:
        inputs, made = Path(temporary, "inputs"), Path(temporary, "made")
        inputs.mkdir()
        whole.save(inputs / "whole.png")
        corners = [(left, top) for top in range(0, whole.height, side) for left in range(0, whole.width, side)]
        for left, top in corners:
            box = (left, top, min(left + side, whole.width), min(top + side, whole.height))
            whole.crop(box).save(inputs / f"{left}_{top}.png")
        files = {record["image"]: made / record["prediction"] for record in model.predict(inputs, made)}
        tiled = Image.new("RGB", whole.size)
        for left, top in corners:
            tiled.paste(Image.open(files[f"{left}_{top}.png"]), (left, top))
        panels = [Image.open(Path(folder, "targets", name)), Image.open(files["whole.png"]), tiled]
        px = SHOWN_PX * TIMES
        shown = Image.new("RGB", (len(panels) * px + 8 * (len(panels) - 1), px), "white")
        for number, panel in enumerate(panels):
            part = panel.convert("RGB").crop((0, 0, SHOWN_PX, SHOWN_PX)).resize((px, px), Image.Resampling.NEAREST)
            shown.paste(part, (number * (px + 8), 0))
    shown.quantize(128).save(out, optimize=True)
    print(f"{out}: the target, made whole, and made in tiles of {side} px")


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5])
