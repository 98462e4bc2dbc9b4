"""Streaming: tiles of one rank that are computed one after the other, so that its memory is that of one tile."""
