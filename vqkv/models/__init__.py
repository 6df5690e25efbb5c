"""Load, describe, capture keys and values; inject phenomena into them."""

import vqkv.models.hqq_later  # noqa: F401
from vqkv.models.injection import inject

__all__ = ["inject"]
