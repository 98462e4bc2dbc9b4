"""Pictures of what validations find, for TensorBoard: confusion matrices, and images with what they were taken for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CELL_PX, LETTER_PX, MARGIN_PX = 44, 13, 6
MOST_LETTERS = 18
MOST_CLASSES = 40  # of a matrix that is drawn
INK, PAPER, GOOD, WRONG = (25, 28, 32), (255, 255, 255), (0, 114, 178), (200, 60, 30)


def _short(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 3] + "..."


def confusion_picture(matrix: "Sequence[Sequence[float]] | Tensor", classes: Sequence[str]) -> Any:
    """An array (H, W, 3) of bytes: rows are the classes that samples have, columns those they were taken for.

    The darker, the larger the share of a row. None of a matrix of too many classes to be read.
    """
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    rows = [[float(value) for value in row] for row in matrix]
    if not rows or len(rows) > MOST_CLASSES:
        return None
    names = [_short(classes[i]) if i < len(classes) else f"class {i}" for i in range(len(rows))]
    font = ImageFont.load_default(LETTER_PX)
    widest = round(max(font.getlength(name) for name in names)) + 2 * MARGIN_PX
    side, top = CELL_PX * len(rows), widest
    image = Image.new("RGB", (widest + side + MARGIN_PX, top + side + MARGIN_PX), PAPER)
    draw = ImageDraw.Draw(image)
    for j, name in enumerate(names):
        label = Image.new("RGB", (widest, CELL_PX), PAPER)
        ImageDraw.Draw(label).text((MARGIN_PX, CELL_PX // 2), name, INK, font, anchor="lm")
        image.paste(label.rotate(90, expand=True), (widest + j * CELL_PX, 0))
    for i, row in enumerate(rows):
        y, total = top + i * CELL_PX, sum(row) or 1.0
        draw.text((widest - MARGIN_PX, y + CELL_PX // 2), names[i], INK, font, anchor="rm")
        for j, value in enumerate(row):
            share = min(1.0, max(0.0, value / total))
            colour = tuple(round(p + (c - p) * share) for p, c in zip(PAPER, GOOD, strict=True))
            x = widest + j * CELL_PX
            draw.rectangle((x, y, x + CELL_PX, y + CELL_PX), colour, outline=(200, 205, 210))
            place = (x + CELL_PX // 2, y + CELL_PX // 2)
            draw.text(place, f"{value:g}", PAPER if share > 0.55 else INK, font, anchor="mm")
    return np.asarray(image)


def palette(count: int) -> bytes:
    """Colours that are far from each other for neighbouring numbers, black first: as those of PASCAL VOC."""
    found = bytearray()
    for number in range(count):
        colour = [0, 0, 0]
        for bit in range(8):
            for channel in range(3):
                colour[channel] |= (number >> (3 * bit + channel) & 1) << (7 - bit)
        found += bytes(colour)
    return bytes(found)


def overlaid(images_NCHW: "Tensor", true_NHW: "Tensor", predicted_NHW: "Tensor") -> Any:
    """An array (H, W, 3) of bytes: a row for each image, of the image, its mask over it, and the predicted one.

    Masks have numbers of classes, of which 0 and negative ones stay uncoloured.
    """
    import numpy as np

    pixels = (images_NCHW.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    pixels = pixels.repeat(3, axis=3) if pixels.shape[3] == 1 else pixels
    colours = np.frombuffer(palette(256), np.uint8).reshape(-1, 3)
    rows = []
    for image, *masks in zip(pixels, true_NHW.numpy(), predicted_NHW.numpy(), strict=True):
        shown = [image]
        for mask in masks:
            mixed = (image // 2 + colours[mask % 256] // 2).astype(np.uint8)
            shown.append(np.where((mask > 0)[..., None], mixed, image))
        rows.append(np.concatenate([np.pad(each, ((0, 4), (0, 4), (0, 0)), constant_values=255) for each in shown], 1))
    return np.concatenate(rows) if rows else None


def captioned(images_NCHW: "Tensor", labels: Sequence[str], predictions: Sequence[str]) -> Any:
    """An array (H, W, 3) of bytes: a few images with values 0 to 1 side by side, each with label and prediction."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    font, line = ImageFont.load_default(LETTER_PX), LETTER_PX + 5
    pixels = (images_NCHW.detach().float().cpu().clamp(0, 1) * 255).round().byte()
    parts = []
    for image, label, prediction in zip(pixels, labels, predictions, strict=True):
        array = image.expand(3, -1, -1) if image.shape[0] == 1 else image[:3]
        shown = Image.fromarray(array.permute(1, 2, 0).contiguous().numpy())
        texts = ((_short(label), INK), (f"as {_short(prediction)}", INK if label == prediction else WRONG))
        width = max(shown.width, *(round(font.getlength(text)) + 4 for text, _ in texts))
        part = Image.new("RGB", (width + MARGIN_PX, shown.height + 2 * line), PAPER)
        part.paste(shown, (0, 0))
        for number, (text, colour) in enumerate(texts):
            ImageDraw.Draw(part).text((2, shown.height + number * line), text, colour, font)
        parts.append(np.asarray(part))
    return np.concatenate(parts, axis=1) if parts else None
