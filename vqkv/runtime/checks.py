"""Checks of what codecs are given, and of functions called by name with the arguments of a command line or a file."""

import contextlib
import inspect
import math
from collections.abc import Callable
from typing import get_args

import torch
import yaml
from torch import Tensor

from vqkv.errors import DataError, FormatError, UnknownNameError

MAX_HEAD_DIM = 32768
MAX_SEED = 2**63 - 1
FP16_MAX = 65504.0
MANY = 1 << 62  # tokens, sequences or bytes


def check_values(x: Tensor, head_dim: int | None = None, block_tokens: int = 1, most: float = math.inf) -> Tensor:
    """Return ``x`` as finite float32 (batch, num_kv_heads, seq_len, head_dim); all checks of codecs' input are here.
    Raises ``DataError`` for other shapes, no tokens, another ``head_dim``, a broken block, NaN or too large values."""
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise DataError(f"expected a floating tensor (batch, num_kv_heads, seq_len, head_dim), got {got}")
    if x.numel() == 0:
        raise DataError(f"empty input of shape {tuple(x.shape)}: encode at least one token")
    if head_dim is not None and x.shape[-1] != head_dim:
        raise DataError(f"head_dim is {x.shape[-1]}, but this codec was made for {head_dim}: fit one for this model")
    if x.shape[2] % block_tokens:
        raise DataError(f"seq_len {x.shape[2]} is no multiple of the codec's block of {block_tokens} tokens")
    values = x.detach().float()
    largest = max(abs(float(end)) for end in torch.aminmax(values))  # one pass, and NaN is passed on
    if not math.isfinite(largest):
        bad = (~values.isfinite()).nonzero()
        first = tuple(bad[0].tolist())
        raise DataError(
            f"{len(bad)} of {values.numel()} values are NaN or infinite, the first ({values[first]}) at (batch, head, "
            f"token, channel) = {first}: check the model's dtype (fp16 overflows) and its inputs"
        )
    if largest > most:
        raise DataError(f"the largest magnitude {largest:g} overflows fp16 ({most:g}): scale the values first")
    return values


def check_whole(name: str, value, least: int, most: int = MANY) -> None:
    """Raise ``DataError`` unless ``value``, a setting called ``name``, is an integer from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise DataError(f"{name} {value!r} must be an integer from {least} to {most}")


def whole_blocks(x: Tensor, block_tokens: int) -> Tensor:
    """Drop the tokens after the last complete block. Raises ``DataError`` if there is none."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        return x  # check_values says what is wrong
    if 0 < x.shape[2] < block_tokens:
        raise DataError(f"{x.shape[2]} tokens are shorter than the codec's block of {block_tokens}: use longer ones")
    return x[:, :, : x.shape[2] - x.shape[2] % block_tokens]


def call(what: str, functions: dict[str, Callable], name: str, arguments: dict):
    """Call ``functions[name](**arguments)``; ``what`` the functions make stands in messages. Raises
    ``UnknownNameError`` for an unknown name or argument, unless a function with ``**settings`` names unknown ones."""
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
