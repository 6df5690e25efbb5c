"""Plain literals: what parameters of tables, arguments of cases and keys of what is shared are made of."""

import dataclasses
import hashlib
import json

from vqkv.errors import DataError


def plain(value, what: str):
    """Return ``value`` as JSON would give it back: tuples are lists, a dataclass is a dict of its arguments. Raises
    ``DataError`` for what JSON cannot hold."""
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=_arguments))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what}: {error}. They are stored as JSON: "
            "use finite numbers, strings, booleans, None, and lists or mappings of these."
        ) from error


def digest(value) -> str:
    """Ten hex digits that name a set of parameters."""
    return hashlib.sha256(json.dumps(plain(value, "parameters"), sort_keys=True).encode()).hexdigest()[:10]


def _arguments(value) -> dict:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not JSON serializable")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
