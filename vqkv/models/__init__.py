"""Load, describe, capture keys and values."""

import vqkv.models.hqq_later  # noqa: F401
