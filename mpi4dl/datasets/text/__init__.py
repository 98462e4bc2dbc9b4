"""Text of which every rank reads its own tokens: find documents, encode them once, split them, cut samples."""
