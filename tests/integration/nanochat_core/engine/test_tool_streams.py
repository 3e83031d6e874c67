"""Scripted answers through the scheduler are what the reference's rules of the tool say."""

import random

import pytest

from nanochat_core.engine.requests import Request
from nanochat_core.engine.runner import PageGroup
from nanochat_core.engine.sampling import row_key
from nanochat_core.engine.scheduler import Scheduler
from tests.support.nanochat_core.engine.fake_runner import FakeRunner, Speaker, reference_answer
from tests.support.nanochat_core.engine.scheduler_case import ENDS, TOKENIZER, TOOLS, Asked

pytestmark = pytest.mark.torch

CONTEXT = 128
EXPRESSIONS = (
    *("1+2", "12 * 12", "2*(3+4)-1", "7/2", "'aXbX'.count('X')", "10 - 25", "9999999*9999999"),
    *("1/0", "", "import os", "2 +", "x"),
)


class ScriptedRunner(FakeRunner):
    """Samples what the request's script says; the seed is the script's number."""

    def __init__(self, scripts):
        groups = (PageGroup(window=16, layers=(0,), num_pages=60),)
        stop = ENDS | {TOOLS.python_end}
        super().__init__(Speaker(TOKENIZER), groups, num_slots=5, stop_tokens=stop)
        self.scripts = scripts
        self.numbers = {row_key(seed, 0): seed for seed in range(len(scripts))}
        self.sampled = {}

    def _say(self, state, value):
        seed = self.numbers[state.key]
        at = self.sampled.get(seed, 0)
        self.sampled[seed] = at + 1
        return self.scripts[seed][at]


class Scripted:
    """A speaker that writes a script, token after token."""

    def __init__(self, script):
        self.left = iter(script)

    def say(self, value, token):
        return next(self.left)


def expected(script, limit):
    """Return the answer's tokens, which of them are sampled, and whether it ended by itself."""
    settings = {"limit": limit, "ends": ENDS, "seed": 0, "sample": 0}
    return reference_answer(Scripted(script), TOOLS, (16,), [7], **settings)


def script_of(rng):
    """Text, calls in all states of disrepair, and an end."""
    special = TOKENIZER.special
    tokens = []
    for _ in range(rng.randint(1, 6)):
        expression = rng.choice(EXPRESSIONS)
        call = TOKENIZER.encode(expression)
        start, end = special("<|python_start|>"), special("<|python_end|>")
        tokens += rng.choice(
            [
                [start, *call, end],
                [start, *call, end],
                [start, *TOKENIZER.encode("5*"), start, *call, end],  # begun twice
                [start, *call],  # not ended: what follows belongs to it
                [*call, end],  # not begun
                [start, end],
                [start, *call, end, end],
                [start, *call, special("<|output_start|>"), end],
                [special("<|output_start|>"), *call, special("<|output_end|>")],
                TOKENIZER.encode(" and so "),
            ]
        )
    return [*tokens, rng.choice(sorted(ENDS)), *([7] * CONTEXT)]


def test_a_thousand_scripted_answers_are_what_the_rules_say():
    rng = random.Random(11)
    scripts = [script_of(rng) for _ in range(1000)]
    limits = [rng.choice((1, 3, 8, 12, 15, 20, 30, 100)) for _ in scripts]
    runner = ScriptedRunner(scripts)
    scheduler = Scheduler(runner, TOOLS, ends=ENDS, context=CONTEXT, prefill_tokens=24)
    asked = [Asked() for _ in scripts]
    for number, (one, limit) in enumerate(zip(asked, limits, strict=True)):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        one.handle = scheduler.submit(
            Request(prompt=prompt, sink=one.take, max_tokens=limit, seed=number)
        )
    while scheduler.step():
        pass
    seen = {"forced": 0, "cut": 0, "length": 0, "stop": 0}
    for one, script, limit in zip(asked, scripts, limits, strict=True):
        tokens, mask, finished = expected(script, limit)
        events = one.tokens()
        assert not finished or events.pop().token in ENDS
        assert [(event.token, event.sampled) for event in events] == [
            *zip(tokens, mask, strict=True)
        ]
        assert one.ends[0].reason == ("stop" if finished else "length")
        seen["forced"] += 0 in mask
        seen["cut"] += expected(script, CONTEXT)[0][: len(tokens)] != tokens
        seen[one.ends[0].reason] += 1
    # Else the scripts would show little.
    assert min(seen.values()) > 25, seen
