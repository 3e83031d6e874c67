import random

import pytest

from tasks.base import Task
from tasks.mixtures.mixture import mixture, sequence


def task(name, num_examples):
    examples = [{"messages": [], "id": f"{name}{i}"} for i in range(num_examples)]
    return Task(name=name, split="train", examples=examples)


def ids(conversations):
    return [c["id"] for c in conversations]


TASKS = [(task("a", 30), 1), (task("b", 10), 3), (task("c", 5), 0), (task("d", 0), 2)]


@pytest.mark.parametrize("seed", [1, 7])
def test_the_order_is_that_of_pythons_shuffle(seed):
    listed = ids(sequence(TASKS))
    random.Random(seed).shuffle(listed)
    assert ids(mixture(TASKS, seed=seed)) == listed


def test_a_sequence_goes_through_task_after_task():
    expected = [f"a{i}" for i in range(30)] + [f"b{i}" for i in range(10)] * 3
    found = sequence(TASKS)
    assert ids(found) == expected
    assert (found[0]["id"], found[-1]["id"], found[30]["id"]) == ("a0", "b9", "b0")
    assert ids(found[28:32]) == expected[28:32]
    assert ids(found[::-7]) == expected[::-7]
    for index in (60, -61):
        with pytest.raises(IndexError):
            found[index]


def test_a_part_of_a_mixture_reads_nothing_else():
    class Counted(list):
        read = 0

        def __getitem__(self, index):
            assert isinstance(index, int)
            self.read += 1
            return super().__getitem__(index)

    examples = Counted({"messages": [], "id": str(i)} for i in range(1000))
    part = mixture([(Task(name="t", split="train", examples=examples), 2)], seed=1)[5:1500:3][:4]
    assert (len(part), examples.read) == (4, 0)
    assert len(ids(part)) == examples.read == 4
