"""Costs of a plan: seconds of units on tiles and of messages, and the sources of these numbers."""
