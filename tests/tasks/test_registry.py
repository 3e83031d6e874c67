import json

import pytest

from tasks import registry
from tasks.base import TaskError

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("name", sorted(registry.TASKS))
def test_what_is_written_is_read_back(name, tmp_path):
    (tmp_path / name).mkdir()
    examples = list(registry.generate(name, "test", 10, grade=1, seed=3))
    assert registry.write_examples(tmp_path / name / "test.jsonl", examples) == 10
    task = registry.open_task(name, tmp_path, "test")
    assert (task.name, task.split, list(task)) == (name, "test", examples)


def test_letters_of_any_language_are_read_back(tmp_path):
    (tmp_path / "spelling").mkdir()
    odd = {"messages": [{"role": "user", "content": "\u2028 e\u0301 \U0001f600 \x85 \r\n"}]}
    registry.write_examples(tmp_path / "spelling" / "test.jsonl", [odd, odd])
    assert list(registry.open_task("spelling", tmp_path, "test")) == [odd, odd]


def test_grading_goes_to_the_task():
    assert registry.is_correct("arithmetic", {"answer": "12"}, "#### 12")
    assert registry.reward("arithmetic", {"answer": "12"}, "#### 12") == 1.0
    assert registry.reward("arithmetic", {"answer": "12"}, "#### 13") == 0.0
    assert registry.is_correct("spelling", {"kind": "spell", "word": "cat"}, "cat: c,a,t")
    assert {n for n in registry.TASKS if not registry.is_gradable(n)} == {"identity"}


@pytest.mark.parametrize(
    "call",
    [
        lambda path: registry.generate("gsm9k", "train", 1, grade=1, seed=0),
        lambda path: registry.is_correct("gsm9k", GOOD, ""),
        lambda path: registry.open_task("gsm9k", path, "train"),
    ],
)
def test_an_unknown_task_is_refused_with_those_there_are(call, tmp_path):
    with pytest.raises(TaskError, match=r"no task 'gsm9k' \(one of: arithmetic, identity, spell"):
        call(tmp_path)


def test_an_unknown_split_is_refused(tmp_path):
    with pytest.raises(TaskError, match="no split 'valid'"):
        registry.generate("spelling", "valid", 1, grade=1, seed=0)
    with pytest.raises(TaskError, match="no split 'valid'"):
        registry.open_task("spelling", tmp_path, "valid")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"messages": [', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1, 2]", "a conversation needs a list of 'messages'"),
        (b'{"messages": [{"role": "user", "content": "a"}] * 2}', "not JSON"),
        (
            json.dumps({"messages": [GOOD["messages"][0]] * 2}).encode(),
            "message 1 is of role 'user', expected 'assistant'",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(line, message, tmp_path):
    path = tmp_path / "spelling" / "train.jsonl"
    path.parent.mkdir()
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(TaskError) as error:
        registry.open_task("spelling", tmp_path, "train")
    assert str(error.value).startswith(f"{path}:3: {message}")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"spelling/train\.jsonl cannot be read: No such file"):
        registry.open_task("spelling", tmp_path, "train")
