"""Codebooks from streams of vectors: accumulate statistics (on many processes, if need be), add them up, solve."""

from vqkv.learn.ema import Ema
from vqkv.learn.kmeans import KMeans, Statistics

__all__ = ["Ema", "KMeans", "Statistics"]
