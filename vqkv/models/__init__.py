"""Load, describe, capture keys and values."""
