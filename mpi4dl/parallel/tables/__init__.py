"""Tables: for each rank, who does what in which order, made by schedules, checked, timed and drawn: no tensors."""
