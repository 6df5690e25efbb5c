"""Compressed caches for transformers, on disk and under the byte meter."""

import vqkv.models  # noqa: F401
