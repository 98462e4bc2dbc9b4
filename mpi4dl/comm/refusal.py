"""The errors that all ranks raise together, and the error of a rank about others."""

import copy


class Refusal(ValueError):
    """The request cannot be done. It is raised by all ranks together, with the same message."""


class RankFailed(RuntimeError):
    """Another rank failed, in a way that is no refusal, where all were to do something; with that rank's traceback."""


class Mismatch(ValueError, RuntimeError):
    """Ranks made calls that do not belong together: other operations, sizes or dtypes."""


# Errors of code about wrong arguments. Anything else says nothing of the code, but of the machine.
NOT_TAKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    copy.Error,
)
