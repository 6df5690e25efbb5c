"""Load, describe, capture keys and values; inject phenomena into them."""

from vqkv.models.injection import inject

__all__ = ["inject"]
