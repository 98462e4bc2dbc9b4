"""Slides with their predictions and maps, in a browser."""
