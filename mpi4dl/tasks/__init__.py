"""What is learnt and measured: losses, metrics, heads."""
