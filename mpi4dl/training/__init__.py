"""A run of the training command: epochs, validations, checkpoints and reports."""
