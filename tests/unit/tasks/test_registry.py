"""Which tasks there are, and what the registry hands to each."""

import sys

import pytest

from tasks import registry
from tasks.base import TaskError
from tasks.kinds import multiple_choice
from tasks.names import GROUP, TASKS, all_names, modules_of

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_grading_goes_to_the_task():
    assert registry.grader_of("arithmetic").is_correct({"answer": "12"}, "#### 12")
    assert registry.grader_of("spelling").is_correct({"kind": "spell", "word": "cat"}, "cat: c,a,t")
    ungraded = {n for n in TASKS if not registry.is_gradable(n)}
    assert ungraded == {"identity", "smoltalk"}
    for name in ungraded:
        with pytest.raises(TaskError, match=f"answers of task '{name}' cannot be graded"):
            registry.grader_of(name).is_correct(GOOD, "I am a tiny model.")


def test_what_guessing_scores_is_said_by_each_task_with_choices():
    graded = [name for name in TASKS if registry.is_gradable(name)]
    baselines = {n: b for n in graded if (b := registry.grader_of(n).baseline)}
    assert baselines == {"arc_easy": 0.25, "arc_challenge": 0.25, "mmlu": 0.25}


def test_a_task_with_choices_has_a_baseline():
    with pytest.raises(TaskError, match="baseline"):
        multiple_choice.grader(baseline=0.0)
    assert multiple_choice.grader(baseline=0.2).baseline == 0.2


def test_an_answer_to_a_file_of_a_person_is_right_if_it_is_the_expected_one():
    assert registry.is_gradable("my-letters")
    graded = [(GOOD, answer) for answer in ("b", " B\n", "bb", "")]
    assert registry.are_correct("my-letters", graded) == [True, True, False, False]
    parts = [{"type": "python", "text": "1+1"}, {"type": "python_output", "text": "2"}]
    messages = [GOOD["messages"][0], {"role": "assistant", "content": parts}]
    assert registry.grader_of("my-letters").is_correct({"messages": messages}, "<<1+1=2>>")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("gsm9k", r"no task 'gsm9k' \(one of: arc_challenge, arc_easy, ari"),
        ("gsm8k", "gsm8k are not made but downloaded"),
    ],
)
def test_what_no_task_makes_is_refused(name, complaint):
    with pytest.raises(TaskError, match=complaint):
        registry.generate(name, "train", 1, grade=1, seed=0)


def install(folder, package, task, module):
    """Install a package with one module and one task, as pip leaves it in `folder`."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{task} = {package}:TASK\n")
    (folder / f"{package}.py").write_text(module)


RIDDLES = """
from tasks.kinds.sources import GeneratedTask
def generate(*_, **__):
    yield {"messages": []}
TASK = GeneratedTask(name="riddles", generate=generate, grader=None)
"""


def test_a_task_of_an_installed_package_is_used_by_its_name(tmp_path, monkeypatch):
    install(tmp_path, "riddles_one", "riddles", RIDDLES)
    install(tmp_path, "takes_a_name", "spelling", RIDDLES)  # of a built-in task: has no effect
    monkeypatch.syspath_prepend(tmp_path)
    assert "riddles" in all_names()
    assert list(registry.generate("riddles", "train", 1, grade=1, seed=0)) == [{"messages": []}]
    assert not registry.is_gradable("riddles")
    assert modules_of("riddles", grades=True) == ("riddles_one",)
    assert modules_of("spelling", grades=False) == ("tasks.generated.spelling",)
    assert registry.task_named("spelling").name == "spelling"


# Packages that have the task, and what is said of them.
UNUSABLE = [
    ({"other": "import no_such_module"}, "loaded from other:TASK: ModuleNotFoundError: No module"),
    ({"other": "TASK = 1"}, "task 'riddles': other:TASK is of type int"),
    ({"other": RIDDLES.replace('"riddles"', '"poems"')}, "is task 'poems', its package calls it"),
    (
        dict.fromkeys(("riddles_one", "riddles_two"), RIDDLES),
        "more than one task 'riddles': riddles_one:TASK, ridd",
    ),
]


@pytest.mark.parametrize(("packages", "message"), UNUSABLE)
def test_a_package_whose_task_cannot_be_used_is_refused(packages, message, tmp_path, monkeypatch):
    for package, module in packages.items():
        install(tmp_path, package, "riddles", module)
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match=message):
        registry.task_named("riddles")
