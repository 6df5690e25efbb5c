"""Expressions of ``claims.csv``: Python's numbers, strings, lists, names, operators, comparisons and calls, no more.

``table.column`` is a column of a table and never an attribute, so that nothing but the given names can be reached.
``and``, ``or`` and comparisons of columns choose rows: ``kl[tier == 'lossless' and size > 1]``.
"""

import ast
import operator
import string
from collections.abc import Mapping
from functools import partial, reduce

import numpy as np

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
