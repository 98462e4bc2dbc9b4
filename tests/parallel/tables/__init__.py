"""Tests of tables: drawn by hand, formulas, faults, and random tables played at random speeds."""
