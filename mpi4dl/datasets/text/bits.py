"""Turns a loss in nats per token into bits per byte, by which models with different tokenizers are compared."""

from math import log


def bits_per_byte(nats_per_token: float, num_tokens: int, num_bytes: int) -> float:
    """nats_per_token * num_tokens / (num_bytes * ln 2), the size to which the model would compress a byte of text.

    Args:
        nats_per_token: the mean cross-entropy, in its natural logarithm.
        num_tokens: the tokens of a text, ends of documents included, such as a `TokenStream` counts them.
        num_bytes: the bytes of the same text in UTF-8.

    Raises:
        ValueError: a text without bytes.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes={num_bytes}: bits per byte need a text of at least one byte")
    return nats_per_token * num_tokens / (num_bytes * log(2))
