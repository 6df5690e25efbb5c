"""Parameters of pages from outside: profiles, ``-p name=value``, and whether a value fits where it is to go."""

import contextlib
from pathlib import Path

import yaml

from vqkv.errors import DataError, FormatError, UnknownNameError

PROFILES = Path(__file__).parent / "profiles"


def load_profile(name: str) -> dict[str, dict]:
    """{notebook or "*": {parameter: value}}; what a profile leaves out it has from the one that it is ``like``. Raises
    ``UnknownNameError`` for an unknown profile."""
    known = [path.stem for path in PROFILES.glob("*.yaml")]
    if name not in known:
        raise UnknownNameError("profile", name, known)
    own = yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8")) or {}
    base = load_profile(own.pop("like")) if "like" in own else {}
    return base | {page: base.get(page, {}) | parameters for page, parameters in own.items()}


def parse_assignments(assignments: list[str]) -> dict:
    """``["seeds=[0, 1]", "model=gpt2"]`` -> parameters; values are YAML literals. Raises ``FormatError`` for others."""
    parameters = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        try:
            parameters[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise FormatError(f"-p {assignment}: the value is not a YAML literal ({error})") from error
        if not equals or not name.strip():
            raise FormatError(f"-p {assignment}: write it as name=value")
    return parameters


def fit(value, default, what: str):
    """``value`` if it has the default's type. An int also serves as a float, and so does 1e-3, a string in YAML."""
    if isinstance(default, float) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    if isinstance(default, list) and isinstance(value, list):
        return [fit(entry, default[0], f"{what}[{i}]") if default else entry for i, entry in enumerate(value)]
    if default is None or type(value) is type(default):
        return value
    raise DataError(
        f"{what} = {value!r} is {type(value).__name__}; the notebook has {default!r} ({type(default).__name__})"
    )
