"""Trained models on images, with labels and without, under any plan."""
