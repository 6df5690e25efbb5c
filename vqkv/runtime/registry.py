"""Functions called by name, with arguments that are checked before: what the command line and saved notes give."""

import contextlib
import inspect
import math
from collections.abc import Callable
from typing import get_args

import yaml

from vqkv.errors import DataError, FormatError, UnknownNameError


def call(what: str, functions: dict[str, Callable], name: str, arguments: dict):
    """Call ``functions[name](**arguments)``; ``what`` the functions make stands in messages.

    Raises ``UnknownNameError`` for an unknown name or argument. A function with ``**settings`` names unknown ones
    itself.
    """
    if not isinstance(name, str) or name not in functions:
        raise UnknownNameError(what, name, functions)
    parameters = inspect.signature(functions[name]).parameters
    takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument in arguments:
        if argument not in parameters and not takes_others:
            raise UnknownNameError(f"argument of {what} {name!r}", argument, parameters)
    return functions[name](**arguments)


def check_type(label: str, value, parameter: inspect.Parameter) -> None:
    """Raise ``DataError`` for another type than ``parameter`` is annotated with, NaN and infinity."""
    if parameter.kind is parameter.VAR_KEYWORD:
        return
    kinds = get_args(parameter.annotation) or (parameter.annotation,)  # of a union, its members
    fits = isinstance(value, (*kinds, int) if float in kinds else kinds) and (type(value) is not bool or bool in kinds)
    if not fits or (type(value) is float and not math.isfinite(value)):
        raise DataError(f"{label} must be {' or '.join(kind.__name__ for kind in kinds)}, not {value!r}")


def parse_assignments(assignments: list[str]) -> dict:
    """Read ``["seeds=[0, 1]", "model=gpt2"]`` as values by name, each in YAML. Raises ``FormatError`` for others."""
    values = {}
    for assignment in assignments:
        name, equals, literal = assignment.partition("=")
        if not equals or not name.strip():
            raise FormatError(f"-p {assignment}: write it as name=value")
        try:
            value = yaml.safe_load(literal)
        except yaml.YAMLError as error:
            raise FormatError(f"-p {assignment}: the value is not a YAML literal ({error})") from error
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # 1e-3 is a word to YAML
                value = float(value)
        values[name.strip()] = value
    return values
