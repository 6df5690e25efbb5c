"""Compressed caches for transformers, on disk and under the byte meter."""

import vqkv.models.hqq_later  # noqa: F401
