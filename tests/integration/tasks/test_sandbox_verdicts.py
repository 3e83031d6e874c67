"""Which programs pass: right ones, and no others, whatever they do to be counted as right.

The whole corpus, a run for each thing in it, is the campaign of tests.campaigns.security.sandbox.
"""

import re

import pytest

from tasks.sandbox.process import Check, run_in
from tasks.sandbox.run import run_untrusted
from tests.campaigns.security.sandbox import CHECK, WRONG, gone_wrong
from tests.integration.tasks.test_sandbox import needs_a_sandbox
from tests.support.tasks.sandbox_forgeries import DECEIVED, FORGED, HONEST, RIGHT
from tests.support.tasks.sandbox_together import LIMITS, WALLS, backend_of, refused

__all__ = ["needs_a_sandbox"]

# The others use up the same second, or the same limits, in another way.
EXHAUSTING = ("a power of ten as a fraction", "many small answers", "a line without end")
# These depend on how the source is handed over, or change what a program beside them needs.
ALONE = ("is the main program", "changes builtins", "names beyond ASCII", "tabs and returns")


@pytest.mark.parametrize(
    "name",
    [
        *(f"forged/{name}" for name in FORGED),
        *(f"deceived/{name}" for name in DECEIVED),
        *(f"exhausting/{name}" for name in EXHAUSTING),
        *(f"honest/{name}" for name in ALONE),
    ],
)
def test_a_program_passes_only_by_being_right(name):
    assert gone_wrong(name, str) == ""


@pytest.mark.parametrize("kind", WALLS)
def test_right_programs_pass_without_seeing_their_tests_behind_each_wall(kind):
    assert refused(backend_of(kind), HONEST.keys() - set(ALONE)) == ""


@pytest.mark.parametrize("kind", WALLS)
def test_behind_each_wall_only_what_is_right_passes(kind):
    forged = (FORGED[name] for name in ("write to every file", "print and exit"))
    programs = [RIGHT, WRONG, *(f"{how}\n{WRONG}" for how in forged)]
    verdicts = [run_in(backend_of(kind), program, CHECK, **LIMITS) for program in programs]
    assert [verdict.passed for verdict in verdicts] == [True, False, False, False]


SETUP = "import math\ndef double(x): return 2 * x\ndef half(x):\n    '''x / 2'''\n"
DOUBLED = "def check(f): assert f(double(3)) == 3 and half(2) == 1 and math.pi > 3"
DIVIDED = (
    "def check(f):\n    try: f(0)\n    except ZeroDivisionError as error: e = error\n"
    "    assert 'division' in str(e)\n"
)
VALUES = (
    "[None, True, 0, -1, 10 ** 50, 0.1, -0.0, 1e308 * 10, 2j, 'caf\\u00e9\\ud800\\n', b'\\xff',"
    " bytearray(b'x'), [], (), {}, set(), frozenset({1}), (1, [2, {3: {4}}]),"
    " {(1, 2): [3], None: {'a': 'dict'}, 'dict': 1}, range(1, 9, 2)]"
)
CROSSED = (
    f"def check(f):\n    for v in {VALUES}:\n        w = f(v)\n"
    "        assert w == v and type(w) is type(v) and repr(w) == repr(v), (v, w)\n"
    "        assert repr(f(x=v)) == repr(v)\n        nan = f(float('nan'))\n"
    "        assert nan != nan\n"
)
ITERATED = (
    "from fractions import Fraction\ndef check(f):\n    assert list(f(0)) == [0, 1, 2]\n"
    "    assert tuple(f(1)) == (1, 2)\n    assert f(2) == {1, 2}\n"
    "    assert sorted(f(3)) == [1, 4]\n    assert f(4)[0] == 5 and len(f(4)) == 2\n"
    "    assert f(5) == Fraction(1, 3) and f(6) == 10 ** 5000\n"
)
ITERABLES = (
    "from collections import deque\nfrom fractions import Fraction\n"
    "def f(n): return [(i for i in range(3)), map(int, '12'), {1: 0, 2: 0}.keys(),"
    " {0: 4, 1: 1}.values(), deque([5, 6]), Fraction(1, 3), 10 ** 5000][n]"
)


@pytest.mark.parametrize(
    ("setup", "test", "program", "reason"),
    [
        ("", CROSSED, "def f(x): return x", "passed"),
        ("", ITERATED, ITERABLES, "passed"),  # answers that can only be gone through
        ("", DIVIDED, "def f(x): return 1 // x", "passed"),  # built-in exceptions are seen
        ("", DIVIDED, "def f(x): return 1", "UnboundLocalError: .*"),
        # Functions given with the question are there when the program has them too.
        (SETUP, DOUBLED, "double = 0\ndef half(x): return x / 2", "passed"),
        (SETUP, DOUBLED, "def half(x): return x / 2", "NameError: name 'double' is not defined"),
        (
            *("", "def check(f): f()", "def f(): return object()"),
            "TypeError: a value of type object cannot be handed over",
        ),
    ],
)
def test_values_cross_as_what_they_are_or_the_reason_is_given(setup, test, program, reason):
    check = Check(setup=setup, test=test, entry_point="half" if setup else "f")
    verdict = run_untrusted(program, check)
    assert re.fullmatch(reason, verdict.reason), verdict
    assert verdict.passed == (reason == "passed")


def test_a_candidate_holds_no_nonce():
    program = (
        "import os, select\nfound = []\nfor fd in range(60):\n"
        "    try: found += [os.read(fd, 99)] if select.select([fd], [], [], 0)[0] else []\n"
        "    except OSError: pass\nassert not any(found), found\ndef add(a, b): return a + b"
    )
    assert run_untrusted(program, CHECK).passed
