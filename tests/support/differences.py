"""Where two tensors differ, as a person reads it."""

from torch import Tensor


def first_difference(ours: Tensor, plain: Tensor, differs: Tensor) -> str:
    """The first place, as indices, and both values there; `differs` has the shape of both and is true somewhere."""
    places = differs.nonzero()
    place = tuple(places[0].tolist())
    values = f"{ours[place].item()}, but plain {plain[place].item()}"
    return f"{len(places)} of {differs.numel()} elements differ, first {place}: {values}"
