from collections import Counter

from tasks.base import Task
from tasks.mixture import mixture


def task(name, num_examples):
    examples = [{"messages": [], "id": f"{name}{i}"} for i in range(num_examples)]
    return Task(name=name, split="train", examples=examples)


def ids(conversations):
    return [c["id"] for c in conversations]


def test_every_example_comes_once_an_epoch():
    mixed = ids(mixture([(task("a", 30), 1), (task("b", 10), 3), (task("c", 5), 0)], seed=1))
    assert Counter(mixed) == {f"a{i}": 1 for i in range(30)} | {f"b{i}": 3 for i in range(10)}


def test_the_order_is_mixed_and_depends_on_the_seed_alone():
    tasks = [(task("a", 50), 1), (task("b", 50), 1)]
    mixed = ids(mixture(tasks, seed=1))
    assert mixed == ids(mixture(tasks, seed=1))
    assert mixed != ids(mixture(tasks, seed=2))
    assert 10 < sum(name.startswith("a") for name in mixed[:50]) < 40


def test_a_mixture_of_nothing_is_empty():
    assert mixture([], seed=1) == []
