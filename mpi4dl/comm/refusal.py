"""What all ranks say no to together."""


class Refusal(ValueError):
    """What was asked for cannot be done. It is raised by all ranks together, with the same message."""
