"""Which tasks there are, and what the registry hands to each."""

import pytest

from tasks import registry
from tasks.base import TaskError
from tasks.kinds.sources import Grader, HubTask
from tasks.names import TASKS

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_grading_goes_to_the_task():
    assert registry.grader_of("arithmetic").is_correct({"answer": "12"}, "#### 12")
    assert registry.grader_of("spelling").is_correct({"kind": "spell", "word": "cat"}, "cat: c,a,t")
    ungraded = {n for n in TASKS if not registry.is_gradable(n)}
    assert ungraded == {"identity", "smoltalk"}


@pytest.mark.parametrize("name", ["identity", "smoltalk"])
def test_answers_without_right_or_wrong_are_not_graded(name):
    with pytest.raises(TaskError, match=f"answers of task '{name}' cannot be graded"):
        registry.grader_of(name).is_correct(GOOD, "I am a tiny model.")


def test_what_guessing_scores_is_said_by_each_task_with_choices():
    graded = [name for name in TASKS if registry.is_gradable(name)]
    baselines = {n: b for n in graded if (b := registry.grader_of(n).baseline)}
    assert baselines == {"arc_easy": 0.25, "arc_challenge": 0.25, "mmlu": 0.25}


CHOICE_TASK = """
from tasks.kinds import multiple_choice
from tasks.kinds.sources import GeneratedTask
TASK = GeneratedTask(name="new", generate=list, grader=multiple_choice.grader({baseline}))
"""


@pytest.mark.parametrize(("baseline", "error"), [("", TypeError), ("baseline=0.0", TaskError)])
def test_a_task_with_choices_cannot_be_imported_without_a_baseline(baseline, error):
    with pytest.raises(error, match="baseline"):
        exec(CHOICE_TASK.format(baseline=baseline))
    exec(CHOICE_TASK.format(baseline="baseline=0.2"))


def test_no_grader_goes_without_a_baseline():
    with pytest.raises(TypeError, match="baseline"):
        Grader(is_correct=lambda conversation, answer: True)


def test_a_dataset_of_a_person_has_no_grading():
    assert not registry.is_gradable("my-letters")


@pytest.mark.parametrize(
    "call",
    [
        lambda: registry.generate("gsm9k", "train", 1, grade=1, seed=0),
        lambda: registry.grader_of("gsm9k").is_correct(GOOD, ""),
    ],
)
def test_an_unknown_task_is_refused_with_those_there_are(call):
    with pytest.raises(TaskError, match=r"no task 'gsm9k' \(one of: arc_challenge, arc_easy, ari"):
        call()


def test_an_unknown_split_is_refused():
    with pytest.raises(TaskError, match="no split 'valid'"):
        registry.generate("spelling", "valid", 1, grade=1, seed=0)


def test_a_dataset_of_the_hub_is_not_made():
    with pytest.raises(TaskError, match="gsm8k are not made but downloaded"):
        registry.generate("gsm8k", "train", 1, grade=1, seed=0)


@pytest.mark.parametrize(
    "task", [t for t in map(registry.task_named, TASKS) if isinstance(t, HubTask)]
)
def test_datasets_name_splits_there_are_and_a_revision(task):
    assert task.dataset.repository.count("/") == 1
    assert task.dataset.files.keys() <= {"train", "test"}
    assert task.dataset.revision == "main" or len(task.dataset.revision) == 40
