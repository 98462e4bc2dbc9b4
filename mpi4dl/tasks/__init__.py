"""Tasks: losses, metrics, heads."""
