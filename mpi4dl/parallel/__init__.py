"""The ways to spread a model over ranks: spatial (tiles of the image) and replicas (gradients and their owners)."""
