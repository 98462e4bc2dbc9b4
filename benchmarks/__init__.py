"""Benchmarks: configurations take turns in one run, so that their ratios mean something on a noisy machine."""
