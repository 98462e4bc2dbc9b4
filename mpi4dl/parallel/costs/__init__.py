"""Costs of the units of a model on a rank: one record, counted by a dry run; seconds are that times rates, or timed."""

GFLOPS = 50.0  # billions of FLOPs a second that a rank is assumed to reach, where it is not measured
