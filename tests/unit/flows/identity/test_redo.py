"""The redo counter: read, raised, and what it does to an identity."""

from flows.identity.redo import RedoCounter, find_redo, raise_redo
from tests.support.flows.rows import identity_of
from tests.support.reliability.memory_store import MemoryStore

RECIPE = identity_of("rows")


def test_without_a_number_an_identity_is_the_recipes():
    assert RECIPE.redo == 0
    assert RECIPE.redone(0) == RECIPE
    again = RECIPE.redone(2)
    assert (again.redo, again.stage) == (2, "rows")
    assert len({RECIPE.fingerprint, again.fingerprint, RECIPE.redone(1).fingerprint}) == 3
    assert again.redone(0) == RECIPE


def test_a_counter_is_written_if_it_is_the_one_that_was_read():
    store = MemoryStore()
    none = RedoCounter()
    assert find_redo(store, RECIPE.ref) == none
    first = RedoCounter(number=1, runs=("a",))
    second = RedoCounter(number=2, before=1, runs=("a", "b"))
    late = RedoCounter(number=1, runs=("c",))
    for known, wanted, stored in (
        (none, first, first),
        (none, late, first),
        (first, second, second),
        (first, late, second),
    ):
        raise_redo(store, RECIPE.ref, known, wanted)
        assert find_redo(store, RECIPE.ref) == stored


def test_of_two_that_raise_it_at_once_one_is_first():
    class Late(MemoryStore):
        """Another process writes between the read and the write."""

        is_late = True

        def put_if_absent(self, key: str, data: bytes) -> bool:
            if self.is_late:
                self.is_late = False
                raise_redo(self, RECIPE.ref, RedoCounter(), other)
            return super().put_if_absent(key, data)

    store, other = Late(), RedoCounter(number=1, runs=("other",))
    raise_redo(store, RECIPE.ref, RedoCounter(), RedoCounter(number=1, runs=("mine",)))
    assert find_redo(store, RECIPE.ref) == other
