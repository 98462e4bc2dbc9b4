"""What all ranks say no to together, and what one rank finds that others did."""


class Refusal(ValueError):
    """What was asked for cannot be done. It is raised by all ranks together, with the same message."""


class RankFailed(RuntimeError):
    """Another rank failed, in a way that is no refusal, where all were to do something; with that rank's traceback."""


class Mismatch(ValueError, RuntimeError):
    """Ranks made calls that do not belong together: other operations, sizes or dtypes."""
