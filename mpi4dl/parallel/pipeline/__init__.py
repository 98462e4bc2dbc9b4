"""Pipelines: a model cut into stages, and how its ranks run the table of who does what in which order."""
