"""Tests of pipelines: models that are read and cut, what stages hand on, and the loop that runs a table."""
