"""Floating-point numbers as integers of the same order, so that every rank gets the same bits of a maximum.

Which of NaN and 1, of two NaNs, or of 0.0 and -0.0 is the greater, C decides by which of them comes first; and that
differs between the ranks of a reduction. Integers have no such pairs:

    float   -inf  ...  -1.0  ...  -0.0   0.0  ...  1.0  ...  inf   NaN, whatever its sign and payload
    key      -m   ...    -k  ...   -1     0   ...  k-1  ...  m-1   the last for a maximum, the first for a minimum

So a NaN of any rank is the result, as of torch.maximum and torch.minimum.
"""

import math

import torch
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def keys_of(values: Tensor, op: str) -> Tensor:
    """Integers, new and of the size of `values`' dtype, whose "max" or "min" is that of the floats `values`."""
    bits = values.view(INTEGERS[values.itemsize])
    limits = torch.iinfo(bits.dtype)
    return _mirrored(bits).masked_fill_(values.isnan(), limits.max if op == "max" else limits.min)


def values_of(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats whose keys these are."""
    return with_one_nan(_mirrored(keys).view(dtype))


def with_one_nan(values: Tensor) -> Tensor:
    """Give all NaNs among floats, or among parts of complex numbers, the same sign and payload, in place.

    NaN + NaN is the first of them, so ranks that add in other orders have NaNs of other bits.
    """
    parts = torch.view_as_real(values) if values.is_complex() else values
    parts.nan_to_num_(math.nan, math.inf, -math.inf)
    return values


def _mirrored(bits: Tensor) -> Tensor:
    """Bits as keys, and keys as bits: negative floats, whose magnitude grows downwards, are turned over."""
    width = 8 * bits.itemsize
    return bits ^ ((bits >> (width - 1)) & torch.iinfo(bits.dtype).max)
