import json

import pytest

from tasks.base import TaskError
from tasks.kinds.files import open_task
from tests.support.nanochat_core.data.fixtures import refused
from tests.support.tasks.example_files import write_examples

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def numbered(number):
    return {"messages": [{"role": "user", "content": str(number)}]}


def written(directory, examples, name="spelling", split="test"):
    path = directory / name / f"{split}.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_examples(path, examples)
    return open_task(name, directory, split)


def test_what_is_written_is_read_back_in_letters_of_any_language(tmp_path):
    odd = {"messages": [{"role": "user", "content": "\u2028 e\u0301 \U0001f600 \x85 \r\n"}]}
    task = written(tmp_path, [odd, odd])
    assert (task.name, task.split, list(task.examples)) == ("spelling", "test", [odd, odd])


def test_parts_are_read_at_their_places(tmp_path):
    task = written(tmp_path, [numbered(i) for i in range(100)])
    assert task[3] == numbered(3)
    assert task[-1] == numbered(99)
    assert list(task.examples[10:40:7]) == [numbered(i) for i in range(10, 40, 7)]
    with pytest.raises(IndexError):
        task[100]


def test_lines_without_anything_and_a_last_line_without_its_end_are_no_matter(tmp_path):
    path = tmp_path / "t" / "train.jsonl"
    path.parent.mkdir()
    first, second = (json.dumps(numbered(number)).encode() for number in (1, 2))
    path.write_bytes(b"\n" + first + b"\r\n \n\n" + second)
    assert list(open_task("t", tmp_path, "train").examples) == [numbered(1), numbered(2)]
    path.write_bytes(b"")
    assert list(open_task("t", tmp_path, "train").examples) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff\xfe", "not JSON"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep"),
        (json.dumps([GOOD]).encode(), "a conversation needs a list of 'messages'"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_when_it_is_read(line, message, tmp_path):
    path = tmp_path / "spelling" / "train.jsonl"
    path.parent.mkdir()
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    task = open_task("spelling", tmp_path, "train")
    assert (len(task), task[0]) == (2, GOOD)
    refused(f"^{path}:3: {message}", task.__getitem__, 1, kind=TaskError)


def test_a_missing_file_and_an_unknown_split_are_named(tmp_path):
    with pytest.raises(TaskError, match=r"spelling/train\.jsonl cannot be read: No such file"):
        open_task("spelling", tmp_path, "train")
    with pytest.raises(TaskError, match="no split 'valid'"):
        open_task("spelling", tmp_path, "valid")
