"""Plans measured one after the other: which ones, in which jobs, and what they reach."""
