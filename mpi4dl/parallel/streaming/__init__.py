"""Streaming: a rank computes its tiles one after the other, so that its memory is that of one tile."""
