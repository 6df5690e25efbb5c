"""Compressed caches for transformers, on disk and under the byte meter."""
