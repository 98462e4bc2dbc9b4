"""Estimates of a training by a plan: time, memory and messages; and the search for the fastest plan."""
