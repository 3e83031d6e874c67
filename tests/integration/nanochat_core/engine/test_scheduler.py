"""Whatever comes, goes and makes room: answers are the reference's, nothing is lost or grows."""

import gc
import random
import sys
import threading
import types
from collections import deque

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

from nanochat_core.engine.kv_cache.pages import Pages, first_seen
from nanochat_core.engine.kv_cache.prefix_cache import extend_keys, find_prefix
from nanochat_core.engine.requests import EndEvent, Request
from nanochat_core.engine.runner import PageGroup
from nanochat_core.engine.sequences import RequestHandle
from tests.support.nanochat_core.engine.scheduler_case import CONTEXT, Asked, Case, prompt_of

pytestmark = pytest.mark.torch
SHARED = (type, types.BuiltinFunctionType, types.FunctionType, types.ModuleType)

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
    )
    def submit(self, seed, num_samples, max_tokens, priority):
        asked = self.case.ask(
            prompt_of(random.Random(seed)),
            seed=seed % 7,
            num_samples=num_samples,
            max_tokens=max_tokens,
            priority=priority,
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


def test_what_is_asked_and_called_off_while_others_are_called_off_ends():
    """As another thread may between the two queues, here from a sink."""
    case, inner = Case(num_slots=2, ends=0.0, calls=0.0), Asked()

    def ask_and_go(event):
        if isinstance(event, EndEvent):
            inner.handle = case.scheduler.submit(Request(prompt=[1, 2, 3], sink=inner.take))
            inner.handle.cancel()

    outer = case.scheduler.submit(Request(prompt=[5, 6], sink=ask_and_go))
    case.scheduler.step()
    outer.cancel()
    case.work(most=100)
    assert inner.ends[0].reason == "cancelled"
    case.check_empty()


def test_a_request_cancelled_between_the_two_queues_ends():
    """As another thread may, here when the queue of arrivals is found empty."""
    case, late = Case(ends=0.0, calls=0.0), Asked()

    class Arrivals(deque[RequestHandle]):
        def __len__(self):
            found = super().__len__()
            if not found and not hasattr(late, "handle"):
                late.handle = case.scheduler.submit(Request(prompt=[1, 2, 3], sink=late.take))
                late.handle.cancel()
            return found

    case.scheduler._arrived = Arrivals()
    case.work(most=100)
    assert late.ends[0].reason == "cancelled"
    case.check_empty()


def test_those_called_off_while_all_slots_are_busy_do_not_pile_up():
    case = Case(num_slots=1, ends=0.0, calls=0.0, settings={"max_steps": 1})
    busy = [case.ask([1, 2, 3]), case.ask([4, 5])]
    for _ in range(40):
        case.scheduler.step()
        for _ in range(2):
            case.ask([7] * 40, num_samples=50).handle.cancel()
    assert len(case.scheduler._waiting) < 10
    case.finish(*busy)


def test_samples_that_wait_share_their_prompt():
    case = Case(num_slots=1)
    asked = case.ask([7] * 40, num_samples=50)
    case.scheduler.step()
    waiting = [s for s in asked.handle.seqs if s.tables is None and s.is_fresh]
    assert len(waiting) > 40
    assert {id(sample.tokens) for sample in waiting} == {id(asked.handle.prompt)}
    case.finish(asked)


class Counting(Pages):
    asked = 0

    def find(self, key):
        self.asked += 1
        return super().find(key)


def test_a_beginning_is_looked_up_in_time_that_grows_with_its_length_only():
    """All pages of the group that sees the farthest are there, of a short window none or few."""
    for kept in ((), (100, 399), [i for i in range(400) if i % 15]):
        wide = Counting(PageGroup(window=10**6, layers=(0,), num_pages=402))
        short = Counting(PageGroup(window=64, layers=(1,), num_pages=402))
        keys = []
        extend_keys(keys, list(range(1600)), 400, 4)
        for i, key in enumerate(keys):
            wide.name(wide.take(), key)
            if i in kept:
                short.name(short.take(), key)
        find_prefix([wide, short], keys, 4)
        assert wide.asked + short.asked < 3 * len(keys)


def test_the_longest_beginning_that_all_groups_know_is_found():
    rng = random.Random(3)
    lengths = set()
    for _ in range(300):
        groups = [Pages(PageGroup(window=w, layers=(0,), num_pages=30)) for w in (3, 9, 10**6)]
        keys = []
        extend_keys(keys, list(range(80)), 20, 4)
        for group in groups:
            for key in keys:
                if rng.random() < 0.8 or group.window > 9:
                    group.name(group.take(), key)
        known = [
            count
            for count in range(1, 21)
            if all(
                group.find(key) is not None
                for group in groups
                for key in keys[first_seen(count * 4, group.window, 4) : count]
            )
        ]
        found = find_prefix(groups, keys, 4)
        assert (len(found[0]) if found else 0) == max(known, default=0)
        lengths.add(max(known, default=0))
    assert len(lengths) > 5


def work_until(stop, case):
    """As the engine's thread does."""
    while not stop.is_set():
        if not case.scheduler.step():
            case.scheduler.wait(0.05)


def ask_and_call_off(case, asked, number):
    """As a server's thread does."""
    rng = random.Random(number)
    for _ in range(60):
        one = case.ask(prompt_of(rng), seed=number, num_samples=rng.choice((1, 2)))
        asked.append(one)
        if rng.random() < 0.4:
            one.handle.cancel()


def test_any_thread_may_ask_and_call_off_while_another_works():
    case = Case(num_slots=4, num_pages=(14, 40))
    asked = []
    stop = threading.Event()
    worker = threading.Thread(target=work_until, args=(stop, case))
    askers = [threading.Thread(target=ask_and_call_off, args=(case, asked, i)) for i in range(4)]
    for thread in (worker, *askers):
        thread.start()
    for thread in askers:
        thread.join()
    stop.set()
    case.scheduler.wake()
    worker.join()
    case.work()
    assert len(asked) == 240
    for one in asked:
        assert one.is_over
        if not one.handle.is_cancelled:
            case.check(one)
    case.check_empty()


def test_a_wake_up_that_comes_before_the_wait_ends_it(monkeypatch):
    case, slept = Case(), list[float]()
    monkeypatch.setattr(case.scheduler._changed, "wait", slept.append)
    case.scheduler.wake()
    for seconds in (1.0, 2.0):
        case.scheduler.wait(seconds)
    assert slept == [2.0]


def test_memory_does_not_grow_with_the_number_of_requests():
    """Eight hundred of random lengths leave less than a pointer each."""
    case = Case(num_slots=8, page_size=16, windows=(8, 64), num_pages=(12, 30), ends=0.4, calls=0)
    rng = random.Random(1)

    def run(count):
        for number in range(count):
            case.scheduler.submit(
                Request(
                    prompt=[rng.randrange(50) for _ in range(rng.randint(1, 20))],
                    sink=lambda event: None,
                    seed=number,
                    max_tokens=rng.randint(1, 12),
                )
            )
            if number % 16 == 15:
                case.work()
        case.work()
        case.check_empty()
        gc.collect()

    run(200)
    before = reachable_bytes(case)
    run(800)
    grown = reachable_bytes(case) - before
    assert before > 5_000
    assert grown < 4 * 800


def reachable_bytes(case):
    """All that scheduler and modules of the engine refer to; the fake runner keeps its calls."""
    engine = [vars(m) for name, m in sys.modules.items() if name.startswith("nanochat_core.engine")]
    seen, todo, total = {id(case.runner)}, [case.scheduler, *engine], 0
    while todo:
        one = todo.pop()
        if id(one) not in seen and not isinstance(one, SHARED):
            seen.add(id(one))
            total += sys.getsizeof(one)
            todo += gc.get_referents(one)
    return total
