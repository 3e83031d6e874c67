"""What a client may rely on: bounds, order, cancellation, failures."""

import math

import pytest

from nanochat_core.engine.requests import Request, SamplingParams
from nanochat_core.errors import DataError
from tests.support.nanochat_core.engine.scheduler_case import CONTEXT, Asked, Case

pytestmark = pytest.mark.torch


def test_a_prompt_is_read_once_whatever_the_number_of_samples():
    case = Case(num_slots=4, settings={"prefill_tokens": 64}, calls=0.0)
    asked = case.ask([1] * 30, num_samples=11, max_tokens=6)
    case.finish(asked)
    assert case.runner.tokens_read == [30]


def test_a_conversation_continues_from_the_pages_of_its_earlier_turns():
    case = Case(settings={"prefill_tokens": 64}, ends=0.0, calls=0.0)
    first = case.ask([1] * 21, max_tokens=20)
    case.work()
    answer = [event.token for event in first.tokens()]
    second = case.ask([*[1] * 21, *answer, 2, 3], max_tokens=8)
    case.finish(second)
    # 40 of 43 tokens are read and fill whole pages of 4.
    assert case.runner.tokens_read == [21, 3]
    assert case.scheduler.slots.counts.prefix_tokens == 40


def test_requests_of_another_salt_share_no_pages_and_do_not_wait_for_each_other():
    case = Case(num_slots=4, settings={"prefill_tokens": 64}, ends=0.0, calls=0.0)
    for salt in (0, 1):
        case.ask([1] * 21, max_tokens=4, cache_salt=salt)
        case.work()
    together = [case.ask([2] * 21, max_tokens=4, cache_salt=salt) for salt in (0, 1)]
    case.work()
    assert case.scheduler.slots.counts.prefix_tokens == 0
    case.ask([1] * 21, max_tokens=4, cache_salt=1)
    case.work()
    assert case.scheduler.slots.counts.prefix_tokens == 20
    for asked in together:
        case.check(asked)


def test_an_answer_that_fills_the_first_page_is_not_shared_with_another_salt():
    case = Case(settings={"prefill_tokens": 64}, ends=0.0, calls=0.0)
    first = case.ask([1] * 3, max_tokens=10, cache_salt=1)
    case.work()
    case.ask([*[1] * 3, *(event.token for event in first.tokens())], max_tokens=1)
    case.work()
    assert case.scheduler.slots.counts.prefix_tokens == 0


def test_prompts_that_come_together_read_what_they_share_once():
    case = Case(num_slots=8, settings={"prefill_tokens": 64})
    asked = [case.ask([*[1] * 40, i], max_tokens=3) for i in range(8)]
    case.finish(*asked)
    assert sum(case.runner.tokens_read) == 41 + 7


def test_nothing_that_other_weights_read_is_used_after_a_refresh():
    case = Case(ends=0.0)
    before = case.ask([1] * 30)
    case.finish(before)
    cut = case.ask([1] * 30, seed=1)
    case.steps(3)
    assert not cut.is_over
    written = len(cut.tokens())
    case.scheduler.refresh()
    read = case.runner.tokens_read
    read.clear()
    case.work()
    assert sum(read) >= 30 + written  # from the beginning
    after = case.ask([1] * 30)
    case.finish(after)
    assert before.tokens() != after.tokens()


def test_a_long_prompt_delays_no_other_request():
    case = Case(ends=0.0, settings={"prefill_tokens": 4, "max_steps": 1})
    short = case.ask([1, 2, 3], max_tokens=30)
    case.scheduler.step()
    case.ask([1] * 50, max_tokens=2)
    for count in range(3, 15):
        case.scheduler.step()
        assert len(short.tokens()) == count
    assert max(case.runner.tokens_read) <= 4


def test_a_short_prompt_does_not_wait_for_a_long_one_to_be_read():
    case = Case(ends=0.0, settings={"prefill_tokens": 8, "max_steps": 1})
    long = case.ask([1] * 55, max_tokens=2)
    case.scheduler.step()
    short = case.ask([2, 3, 4], max_tokens=2)
    case.scheduler.step()
    assert short.tokens()
    while not long.tokens():
        case.scheduler.step()
    assert max(case.runner.tokens_read) == 8
    assert len(case.runner.tokens_read) == 8  # 58 tokens: no pass was wasted


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_short_answer_does_not_wait_for_long_ones(is_asynchronous):
    case = Case(ends=0.0, calls=0.0, is_asynchronous=is_asynchronous, settings={"max_steps": 2})
    long = case.ask([1], max_tokens=60)
    case.steps(5)
    short = [case.ask([2], max_tokens=n) for n in (1, 2, 3)]
    case.steps(5)
    assert not long.is_over
    for one in short:
        case.check(one)


def test_who_comes_first_goes_first_and_priority_goes_before():
    case = Case(num_slots=1, ends=0.0)
    order = []

    def ask(name, **changes):
        def sink(event):
            if name not in order:
                order.append(name)

        case.scheduler.submit(Request(prompt=[1, 2], sink=sink, max_tokens=3, **changes))

    for name in "ab":
        ask(name)
    ask("late", priority=1)
    ask("urgent", priority=-1)
    ask("c")
    case.work()
    assert order == ["urgent", "a", "b", "c", "late"]


def test_no_request_waits_for_ever_behind_better_priorities():
    case = Case(num_slots=1, ends=0.0)
    late = case.ask([1], max_tokens=1, priority=1)
    count = 0
    while not late.is_over:
        case.ask([2], max_tokens=1)
        case.ask([2], max_tokens=1)
        case.scheduler.step()
        count += 1
    assert 20 < count < 100


def test_many_samples_of_one_request_take_turns_with_others():
    case = Case(num_slots=1, ends=0.0)
    many = case.ask([1], num_samples=50, max_tokens=2)
    one = case.ask([2], max_tokens=2)
    while not one.is_over:
        case.scheduler.step()
    assert len(many.ends) < 5
    case.finish(many)


def test_calling_off_frees_slot_and_pages_at_the_next_step():
    case = Case(num_slots=1, ends=0.0, calls=0.0, settings={"max_steps": 1})
    long = case.ask([1] * 20)
    waiting = case.ask([2] * 20, max_tokens=1)
    case.steps(6)
    assert len(case.scheduler.slots.running) == 1
    assert not waiting.tokens()
    output = len(long.tokens())
    long.handle.cancel()
    case.scheduler.step()
    assert long.ends[0].reason == "cancelled"
    assert len(long.tokens()) == output
    case.finish(waiting)
    for late in (long, waiting):
        late.handle.cancel()  # too late: it does nothing
    case.work()
    assert case.scheduler.slots.counts.cancellations == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * CONTEXT, "the prompt is 64 tokens long, the model reads 64"),
        ([1, 265], "the prompt has tokens from 1 to 265, the model knows those from 0 to 264"),
        ([-1], "the prompt has tokens from -1 to -1"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(prompt, message):
    with pytest.raises(DataError, match=message):
        Case().ask(prompt)


def test_what_never_fits_the_pages_is_refused_and_what_just_fits_is_answered():
    case = Case(windows=(64,), num_pages=7, ends=0.0)  # 6 pages of 4 tokens
    with pytest.raises(DataError, match="prompt and answer are up to 26 tokens long, more than"):
        case.ask([1] * 20, max_tokens=6)
    asked = [case.ask([i] * 20, max_tokens=5) for i in range(3)]
    case.finish(*asked)


WRONG = {
    **{"temperature": (-1.0, math.nan, math.inf, 1e300), "top_p": (-0.1, 1.1, math.nan)},
    **{"seed": (2**63, -(2**63) - 1), "num_log_probs": (-1, 21), "num_samples": (-1, 200_000)},
}


@pytest.mark.parametrize(("name", "value"), [(n, value) for n in WRONG for value in WRONG[n]])
def test_numbers_that_no_runner_can_draw_with_are_refused_at_once(name, value):
    case, wrong = Case(), {name: value}
    if name in vars(SamplingParams()):
        wrong = {"params": SamplingParams(**wrong)}
    with pytest.raises(DataError, match=r"is .*, expected .* to ") as refused:
        case.ask([1, 2], **wrong)
    assert refused.value.hint
    case.check_empty()


def test_a_failing_runner_fails_the_requests_concerned_and_no_other():
    case = Case(num_slots=2, ends=0.0, calls=0.0, settings={"max_steps": 1})
    first, second = case.ask([1, 2]), case.ask([1, 3], num_samples=3)
    case.scheduler.step()
    case.runner.fail_next = RuntimeError("no more memory")
    case.scheduler.step()
    assert first.ends[0].reason == "failed"
    assert first.ends[0].error == "the engine failed"  # the rest is for the log
    assert str(first.ends[0].cause) == "no more memory"
    case.work()
    third = case.ask([4, 5])
    case.finish(third)
    assert {sample: end.reason for sample, end in second.ends.items()} == {
        0: "failed", 1: "length", 2: "length"
    }  # fmt: skip
    case.check_empty()
    assert isinstance(first.ends[0].cause, RuntimeError)
    assert case.scheduler.slots.counts.failures == 2


@pytest.mark.parametrize("at", range(1, 12))
def test_a_runner_may_fail_at_any_pass(at):
    case = Case(num_slots=2)
    asked = [case.ask([1] * 20 + [i], num_samples=2) for i in range(4)]
    case.steps(at)
    case.runner.fail_next = ValueError("once")
    case.work()
    case.check_empty()
    assert all(one.is_over for one in asked)
    after = case.ask([1] * 20)
    case.finish(after)


def test_a_sink_that_raises_loses_its_own_request_alone():
    case, events = Case(num_slots=2, ends=0.0), []

    def sink(event):
        events.append(event)
        raise ValueError("I am of no use")

    case.scheduler.submit(Request(prompt=[1], sink=sink, num_samples=4))
    other = case.ask([2], num_samples=2)
    case.work()
    assert len(events) == 1
    case.check(other)
    case.check_empty()


def test_a_sink_may_call_its_request_off_and_hears_no_further_token():
    case = Case(ends=0.0)
    asked = Asked()

    def sink(event):
        asked.take(event)
        if len(asked.tokens()) == 3:
            asked.handle.cancel()

    asked.handle = case.scheduler.submit(Request(prompt=[1], sink=sink))
    case.work()
    assert len(asked.tokens()) == 3
    assert asked.ends[0].reason == "cancelled"


def test_what_is_cut_off_in_the_middle_of_a_step_leaves_nothing_behind():
    case = Case(num_slots=2, ends=0.0)
    asked = [case.ask([1] * 20, num_samples=3), case.ask([2]), case.ask([3])]
    case.scheduler.step()
    case.runner.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        case.scheduler.step()
    case.scheduler.fail_all("interrupted")
    assert {end.reason for one in asked for end in one.ends.values()} == {"failed"}
    assert all(one.is_over for one in asked)
    case.check_empty()
    after = case.ask([1] * 20, num_samples=3)
    case.finish(after)


def test_log_probs_come_with_drawn_tokens_of_those_who_want_them():
    case = Case(calls=0.1)
    wants = case.ask([1], num_log_probs=0, num_samples=4, max_tokens=40)
    others = case.ask([2], max_tokens=40)
    case.finish(wants)
    events = [event for sample in range(4) for event in wants.tokens(sample)]
    assert {event.sampled for event in events} == {True, False}
    for event in events:
        assert (event.log_probs is not None) is event.sampled
        if event.log_probs is not None:
            assert event.log_probs.chosen == -event.token
    assert all(event.log_probs is None for event in others.tokens())
