"""Model, text and preset -> Compressor."""

import vqkv.runtime.hqq_later  # noqa: F401
