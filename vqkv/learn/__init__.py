"""Codebooks from streams of vectors: accumulate statistics (on many processes, if need be), add them up, solve."""

from vqkv.learn.ema import Ema, check_decay
from vqkv.learn.kmeans import KMeans, Statistics

__all__ = ["Ema", "KMeans", "Statistics", "check_decay"]
