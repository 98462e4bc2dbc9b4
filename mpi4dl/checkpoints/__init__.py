"""Checkpoints: written by all ranks in parallel while training goes on, whole values that any plan can read.

checkpoints  the face: what a training loop calls          storage     safetensors files, written and read in ranges
state        an engine -> values and their pieces, back    manifest    which checkpoints are whole; their checksums
writer       the thread that writes while training goes on plain       settings as JSON, exactly; randomness  its states
"""

from mpi4dl.checkpoints.checkpoints import Checkpoints, load, save_model

__all__ = ["Checkpoints", "load", "save_model"]
