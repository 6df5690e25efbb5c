"""Model, compressor and text -> one row."""

import vqkv.runtime.hqq_later  # noqa: F401
