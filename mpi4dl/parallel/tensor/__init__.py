"""Tensor parallelism: the parameters of layers are cut over ranks, as images are."""
