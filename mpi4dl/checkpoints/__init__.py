"""Checkpoints: all ranks write them in parallel while training continues, with whole values that any plan can read.

checkpoints    the interface for a training loop; the values of an engine and their pieces, and back
storage        safetensors files, written and read in ranges
manifest       whole checkpoints and their checksums; the thread that writes while training continues
saved          a checkpoint on disk, checked field by field
json_values    settings and random states as JSON, exactly
weights        pretrained weights
"""

from mpi4dl.checkpoints.checkpoints import Checkpoints, load, save_model

__all__ = ["Checkpoints", "load", "save_model"]
