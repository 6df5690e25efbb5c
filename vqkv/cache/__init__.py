"""Compressed caches for transformers, on disk and under the byte meter."""

import vqkv.runtime.hqq_later  # noqa: F401
