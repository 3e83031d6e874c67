"""Arithmetic is Python's, ten thousand times."""

from hypothesis import given, settings

from tests.unit.nanochat_core.engine.tools.test_calculator import EXPRESSIONS, check_arithmetic


@settings(max_examples=10_000, deadline=None)
@given(EXPRESSIONS)
def test_arithmetic_is_pythons_ten_thousand_times(expression):
    check_arithmetic(expression)
