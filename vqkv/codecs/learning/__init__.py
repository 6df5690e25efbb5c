"""Codebooks from streams of vectors, regressions, and how weights are rounded."""

from vqkv.codecs.learning.ema import Ema
from vqkv.codecs.learning.kmeans import KMeans, Statistics

__all__ = ["Ema", "KMeans", "Statistics"]
