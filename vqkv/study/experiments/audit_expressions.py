"""Expressions of ``claims.csv``: Python's numbers, strings, lists, names, operators, comparisons and calls, no more.

``table.column`` is a column of a table and never an attribute, so that nothing but the names of ``names`` can be
reached. ``and``, ``or`` and comparisons of columns choose rows: ``kl[tier == 'lossless' and size > 1]``.
"""

import ast
import inspect
import math
import operator
import string
from collections.abc import Mapping
from functools import cache, partial, reduce
from typing import NamedTuple

import numpy as np
import pandas as pd

from vqkv import presets
from vqkv.codecs.grid import gaussian_grids
from vqkv.study.experiments import audit_algorithms as algorithms
from vqkv.study.experiments import audit_shapes as shapes
from vqkv.study.experiments.residual_vq import gaps
from vqkv.study.experiments.thresholds import modes
from vqkv.study.tables import published, repository_root

TASKS = ("arc_25", "hellaswag_10", "mmlu_5", "truthfulqa_0", "winogrande_5", "gsm8k_5")  # of residual VQ's tables
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.And: operator.and_, ast.Or: operator.or_, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def evaluate(expression: str, names: Mapping):
    """Return the value of an expression of these names: a number, an array or a column; lists are joined to one array.

    Raises ``KeyError`` for a name, column or row that is not there, ``SyntaxError`` for what is not an expression here.
    """
    return _value(ast.parse(expression, mode="eval").body, names)


def filled(text: str, names: Mapping) -> str:
    """Replace each ``{expression}`` or ``{expression:format}`` of a text by its value."""
    return _Filler().vformat(text, (), names)


class _Filler(string.Formatter):
    def get_field(self, field_name, args, kwargs):
        return evaluate(field_name, kwargs), field_name


def _value(node: ast.expr, names: Mapping):
    value = partial(_value, names=names)
    match node:
        case ast.Constant(value=int() | float() | str() as constant):
            return constant
        case ast.Name(id=name):
            return names[name]
        case ast.Attribute(value=table, attr=column):
            return value(table)[column]
        case ast.Subscript(value=column, slice=rows):
            return value(column)[value(rows)]
        case ast.List(elts=items):
            return np.hstack([value(item) for item in items])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.BoolOp(op=op, values=values):
            return reduce(OPERATORS[type(op)], map(value, values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return names[name](*map(value, args), **{word.arg: value(word.value) for word in keywords if word.arg})
    raise SyntaxError(f"{ast.unparse(node)!r} cannot stand in an expression of claims.csv")


class Between(NamedTuple):
    """Least and most that a figure can be where a source leaves that open."""

    low: float | np.ndarray
    high: float | np.ndarray


def by(column: pd.Series, *keys: pd.Series) -> pd.Series:
    """Return the mean of a column for each combination of keys; operators then pair equal keys."""
    return column.groupby([key.reindex(column.index) for key in keys]).mean()


def scores(rows: pd.DataFrame, *tasks: str) -> np.ndarray:
    """Return accuracies (rows, tasks) of a table of residual VQ."""
    return rows[list(tasks or TASKS)].to_numpy(float)


def every_fp32(files: pd.DataFrame) -> Between:
    """Return the ratio to all snapshots in fp32 of streams of 512 steps, as written, and of 4,096."""
    return Between(files["ratio_every_fp32"].to_numpy(), algorithms.longer_ratio(files).to_numpy())


def _functions(module) -> dict:
    return {name: f for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}


def names(rows: pd.DataFrame) -> dict:
    """Return what an expression may name whose table has these rows; a column hides another thing of its name."""
    return VOCABULARY | _figures() | dict(rows.items()) | {"table": rows}


@cache
def _figures() -> dict:
    """Return the figures in the sources' text by key, and their tables by name."""
    tables = {path.stem: published(path.stem) for path in (repository_root() / "results/published").glob("*.csv")}
    return tables | dict(zip(tables["stated_figures"]["key"], tables["stated_figures"]["value"], strict=True))


VOCABULARY = {
    "pi": math.pi, "nan": math.nan, "uncompressed": None, "mean": np.mean, "sum": np.sum, "count": len, "abs": np.abs,
    "min": partial(np.nanmin, axis=-1), "max": partial(np.nanmax, axis=-1), "by": by, "between": Between,
    "missing": pd.isna, "scores": scores, "modes": modes, "gaps": gaps, "every_fp32": every_fp32,
    "gaussian_grids": gaussian_grids, **presets.PRESETS, **_functions(algorithms),
    **{name: np.vectorize(size, otypes=[float]) for name, size in _functions(shapes).items()},  # of each of a list
}  # fmt: skip
