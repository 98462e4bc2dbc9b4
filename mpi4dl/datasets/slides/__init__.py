"""Whole-slide images: readers, tables of slides and patients, splits, tissue."""
