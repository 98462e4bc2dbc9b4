"""Every option, and what it names: models, data, optimizers, tasks."""
