"""Codebooks from streams of vectors, regressions, and how weights are rounded."""
