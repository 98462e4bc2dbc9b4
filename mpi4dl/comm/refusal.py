"""What all ranks say no to together."""


class Refusal(ValueError):
    """What was asked for cannot be done. It is raised by all ranks together, with the same message."""


class RankFailed(RuntimeError):
    """Another rank failed, in a way that is no refusal, where all were to do something; with that rank's traceback."""
