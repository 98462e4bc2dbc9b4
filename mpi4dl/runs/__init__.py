"""The folder of a run: what is recorded in it, what its model is, and where its weights are."""
