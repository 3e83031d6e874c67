import math
import re
import threading
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.engine.tools.calculator import MAX_CHARS, MAX_TOKENS, calculate
from tests.support.nanochat_core.engine.hostile_expressions import HOSTILE

VALUES = [
    *(("12 + 30", "42"), ("1,234,567 * 2", "2469134"), ("48/2", "24"), ("7/2", "3.5")),
    *(("0.1 + 0.2", "0.3"), ("1/3", "0.333333333333"), ("10 % 3", "1"), ("-7 // 2", "-4")),
    *(("-(2 + 3) * +4", "-20"), (".5 * 4.", "2"), ("0 * -1.5", "0"), ("1e3 + 1", "1001")),
    *(("  3*4\n", "12"), ("'strawberry'.count('r')", "3"), ('"a,b,c".count(",")', "2")),
    *(("'aaa' . count( 'a' ) + 1", "4"), ("2 * 9,999,999,999,999,999", "19999999999999998")),
]


@pytest.mark.parametrize(("expression", "value"), VALUES)
def test_the_grammar_has_these_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize("kind", HOSTILE)
def test_everything_else_has_none_at_once(kind):
    for expression in HOSTILE[kind]:
        started = time.thread_time()
        value = calculate(expression)
        assert time.thread_time() - started < 0.05, expression[:80]
        assert value is None, expression[:80]


def test_no_expression_takes_memory():
    tracemalloc.start()
    try:
        for expression in (expression for kind in HOSTILE.values() for expression in kind):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            calculate(expression)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 1 << 20, expression[:80]
    finally:
        tracemalloc.stop()


def test_it_works_in_any_thread_however_small_its_stack():
    deep = [
        "(" * 63 + "1" + ")" * 63,
        "-" * 126 + "1",
        "1" + "+1" * 63,
        "(1+" * 30 + "1" + ")" * 30,
    ]
    given = [*deep, *(expression for kind in HOSTILE.values() for expression in kind)]
    found = []
    old = threading.stack_size(256 << 10)
    try:
        work = [
            threading.Thread(target=lambda: found.append([calculate(x) for x in given]))
            for _ in range(4)
        ]
        for thread in work:
            thread.start()
    finally:
        threading.stack_size(old)
    for thread in work:
        thread.join()
    assert found == [["1", "1", "64", "31", *[None] * (len(given) - len(deep))]] * 4


_numbers = st.one_of(
    st.integers(0, 10**9).map(str),
    st.integers(0, 10**9).map("{:,}".format),
    st.floats(0, 1e6, allow_nan=False).map("{:.4f}".format),
)
_operators = st.sampled_from(["+", " + ", "-", "*", " * ", "/", "//", " // ", "%"])
EXPRESSIONS = st.recursive(
    _numbers,
    lambda inner: st.one_of(
        st.tuples(inner, _operators, inner).map("".join),
        st.tuples(inner, _operators, inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        inner.map("-{}".format),
    ),
    max_leaves=16,
)


@settings(max_examples=100, deadline=None)
@given(EXPRESSIONS)
def test_arithmetic_is_pythons(expression):
    source = expression.replace(",", "")
    try:
        expected = eval(source)
    except ZeroDivisionError:
        expected = None
    num_tokens = len(re.findall(r"[0-9.]+|//|[-+*/%()]", source))
    result = calculate(expression)
    if expected is None or len(expression) > MAX_CHARS or num_tokens > MAX_TOKENS:
        assert result is None
    elif isinstance(expected, int):
        assert result == str(expected)
    else:
        assert result == f"{expected + 0.0:.12g}"
        assert math.isclose(float(result), expected, rel_tol=1e-11, abs_tol=1e-300)


@settings(max_examples=2000, deadline=None)
@given(st.text(max_size=40) | st.text("0123456789+-*/%().,'\"counte ", max_size=40))
def test_no_text_makes_it_raise(text):
    result = calculate(text)
    assert result is None or math.isfinite(float(result))
