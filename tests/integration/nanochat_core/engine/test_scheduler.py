"""Whatever comes, goes and makes room: answers are the reference's, and nothing is lost."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nanochat_core.engine.requests import SamplingParams
from tests.support.nanochat_core.engine.scheduler_case import CONTEXT, Case, prompt_of

pytestmark = pytest.mark.torch

# The prompts' and the limits' sizes make pages scarce in the smaller pools.
SHAPES = {
    "ample": Case,
    "scarce": lambda: Case(num_pages=(9, 22)),
    "one_window": lambda: Case(windows=(64,), num_pages=24, num_slots=3),
    "three_windows": lambda: Case(windows=(3, 9, 64), num_pages=(9, 11, 30), page_size=4),
    "large_pages": lambda: Case(page_size=16, num_pages=(6, 9), num_slots=6),
    "asynchronous": lambda: Case(is_asynchronous=True, num_pages=(12, 22)),
    "single_steps": lambda: Case(settings={"max_steps": 1, "prefill_tokens": 5}),
}


class Machine(RuleBasedStateMachine):
    """Submit, cancel and continue requests in any order."""

    handles = Bundle("tickets")
    make = staticmethod(Case)

    def __init__(self):
        super().__init__()
        self.case = self.make()
        self.asked = []

    @rule(
        target=handles,
        seed=st.integers(0, 2**31),
        num_samples=st.sampled_from((1, 1, 1, 2, 5, 9)),
        max_tokens=st.sampled_from((None, 0, 1, 2, 7, 30)),
        priority=st.integers(-1, 1),
        penalty=st.sampled_from((1.0, 1.0, 1.5)),
    )
    def submit(self, seed, num_samples, max_tokens, priority, penalty):
        asked = self.case.ask(
            prompt_of(random.Random(seed)),
            seed=seed % 7,
            num_samples=num_samples,
            max_tokens=max_tokens,
            priority=priority,
            params=SamplingParams(repetition_penalty=penalty),
        )
        self.asked.append(asked)
        return asked

    @rule(asked=handles)
    def go_on_from_an_answer(self, asked):
        """The next turn of a conversation."""
        tokens = [*asked.handle.request.prompt, *(event.token for event in asked.tokens())]
        if len(tokens) < CONTEXT - 8:
            self.asked.append(self.case.ask([*tokens, 1, 2, 3], max_tokens=9))

    @rule(asked=handles)
    def cancel(self, asked):
        asked.handle.cancel()

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        self.case.steps(count)

    @rule()
    def all_make_room(self):
        self.case.scheduler.forget()

    @invariant()
    def slots_and_pages_add_up(self):
        slots = self.case.scheduler.slots
        assert len(slots.running) + len(slots.free) == self.case.num_slots
        for index, group in enumerate(slots.groups):
            holders = [0] * (group.num_pages + 1)
            tables = [sample.held for sample in slots.running]
            tables += [handle.prefix.tables for handle in slots.prefixes]
            for table in tables:
                for page in table.pages[index][table.firsts[index] :]:
                    holders[page] += 1
            assert holders == group._holders
            for table in tables[: len(slots.running)]:
                output = self.case.runner.tables[table.slot][index]
                assert [output.get(i, 0) for i in range(len(table.pages[index]))] == table.pages[
                    index
                ]
                assert not any(page for i, page in output.items() if i >= len(table.pages[index]))
            assert holders[0] == 0
            free = [*group._free, *group._idle]
            assert sorted(free) == [i for i, n in enumerate(holders) if not n and i]

    def teardown(self):
        self.case.work()
        for asked in self.asked:
            assert asked.is_over
            if not asked.handle.is_cancelled:
                self.case.check(asked)
        self.case.check_empty()


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_comes_and_goes_answers_are_the_references(shape):
    machine = type("Machine", (Machine,), {"make": staticmethod(SHAPES[shape])})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_crowd_is_answered_as_each_alone(shape):
    rng = random.Random(shape)
    case = SHAPES[shape]()
    asked = [case.ask(prompt_of(rng), seed=i, num_samples=rng.choice((1, 4))) for i in range(60)]
    case.finish(*asked)
    if shape in ("scarce", "asynchronous"):
        assert case.scheduler.slots.counts.preemptions > 0
