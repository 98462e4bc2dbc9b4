"""A GPU that is not there: CPU tensors that say they are on one, whose every access is checked for its waits."""
