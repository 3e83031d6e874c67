"""The calculator that a model may call: arithmetic, and counting letters in a string literal.

A model writes the expression, so it is untrusted data: cut into the few tokens of the grammar,
parsed, and walked. No name is ever looked up or called. Any thread may call it.

    numbers      12  1,234.5  .5  1e3       (commas between digits are dropped)
    operators    + - * / // % and unary + -, parentheses
    counting     'strawberry'.count('r')    (string literals without backslashes)

Whatever lies outside the grammar or the bounds has no value (None). The bounds hold time to well
under a millisecond and memory to kilobytes, whatever the expression is: numbers have at most 1024
bits, there is nothing that repeats or grows a string, and an expression is short.
"""

import ast
import math
import operator
import re
import threading
from collections.abc import Callable
from typing import TypeAlias

MAX_CHARS = 512  # blanks count
MAX_TOKENS = 128  # bounds how deep the parser goes, which is on the stack of the caller's thread
MAX_INT_BITS = 1024
SIGNIFICANT_DIGITS = 12  # of a float: 0.1 + 0.2 is 0.3, as in the text that models learn from

Number: TypeAlias = int | float

_TOKEN = re.compile(
    r"""[ \t]*(?:
        (?P<text>'[^'\\\r\n]*'|"[^"\\\r\n]*")
      | (?P<number>(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)
      | (?P<other>//|[-+*/%()]|\.[ \t]*count\b)
    )""",
    re.VERBOSE,
)
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# CPython 3.11 counts the depth of trees in one variable for all threads: two that parse at once may
# get a SystemError.
_PARSING = threading.Lock()
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str | None:
    """Return the value of `expression` as text, or None if it has none. Never raises.

    Integers are exact; a float has at most 12 significant digits and no trailing ".0".
    """
    source = _clean(expression)
    if source is None:
        return None
    try:
        with _PARSING:
            tree = ast.parse(source, mode="eval")
        value = _evaluate(tree.body)
    # All that the parser and the arithmetic raise for what has no value: nesting, 1/0, overflow.
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    return None if value is None else _format(value)


def _clean(expression: str) -> str | None:
    """Return the expression's tokens, separated by blanks and without commas in numbers; None if
    one is not of the grammar."""
    if len(expression) > MAX_CHARS:
        return None
    text = expression.strip(" \t\r\n")
    tokens: list[str] = []
    position, last = 0, None
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(tokens) == MAX_TOKENS:
            return None
        if match.lastgroup == last == "text":  # Python would join adjacent literals
            return None
        last = match.lastgroup
        token = match[last or 0]
        tokens.append(token.replace(",", "") if last == "number" else token)
        position = match.end()
    return " ".join(tokens)


def _evaluate(node: ast.expr) -> Number | None:
    # Only nodes listed here have a value; each result is bounded before it is used again.
    match node:
        case ast.Constant(value=int() | float() as value):
            result = value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            inner = _evaluate(operand)
            result = None if inner is None else _UNARY[type(op)](inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _evaluate(left), _evaluate(right)
            result = None if a is None or b is None else _BINARY[type(op)](a, b)
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
            args=[ast.Constant(value=str() as part)],
            keywords=[],
        ):
            result = text.count(part)
        case _:
            result = None
    return result if result is not None and _in_bounds(result) else None


def _in_bounds(value: Number) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= MAX_INT_BITS
    return math.isfinite(value)


def _format(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value + 0.0:.{SIGNIFICANT_DIGITS}g}"  # + 0.0: no "-0"
