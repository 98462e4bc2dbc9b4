"""The colours of all pictures: of curves, kinds of work, purposes of memory, classes of masks, shares and loads."""

BLUE, ORANGE, GREEN = "#2f6fb0", "#c8571b", "#3c7d4f"
# One hue a kind of work, the mirrored copy lighter; told apart in grey and by colour-blind eyes too.
WORK = {
    ("forward", 0): BLUE,
    ("forward", 1): "#a9cdee",
    ("backward", 0): ORANGE,
    ("backward", 1): "#f7bf94",
    ("input", 0): ORANGE,
    ("input", 1): "#f7bf94",
    ("weight", 0): GREEN,
    ("weight", 1): "#b3dcbb",
}
IDLE = "#dcdcdc"
PURPOSES = (BLUE, ORANGE, GREEN, "#8a8a8a", "#8e5ea2")
# Told apart by colour-blind eyes too (Okabe and Ito, 2008), darkened where white paper needs it.
CURVES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#6a3d9a", "#555555")
# From dark to light through equally spaced colours, which differ in grey, too: red, green and blue from 0 to 1.
LOADS = ((0.05, 0.03, 0.20), (0.42, 0.08, 0.43), (0.80, 0.28, 0.30), (0.98, 0.65, 0.24), (0.99, 0.98, 0.75))
INK, PAPER, GOOD, WRONG = (25, 28, 32), (255, 255, 255), (0, 114, 178), (200, 60, 30)


def of_classes(count: int) -> bytes:
    """RGB of as many classes: far from each other for neighbouring numbers, black first, as those of PASCAL VOC."""
    found = bytearray()
    for number in range(count):
        colour = [0, 0, 0]
        for bit in range(8):
            for channel in range(3):
                colour[channel] |= (number >> (3 * bit + channel) & 1) << (7 - bit)
        found += bytes(colour)
    return bytes(found)
