import hashlib
import json

import pytest

from nanochat_core.config import DatasetConfig
from nanochat_core.data.conversations.custom_jsonl import TEST_PERCENT, read_own_file
from nanochat_core.data.conversations.disk_shuffle import Spool
from nanochat_core.errors import DataError
from tasks.kinds.files import JsonLines


def talk(question, answer="yes"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def dataset_of(path, **changes):
    snapshot = hashlib.sha256(path.read_bytes()).hexdigest()
    tree = {"name": "letters", "grade": 1, "num_train": None, "num_test": None} | {
        "path": str(path),
        "snapshot": snapshot,
        **changes,
    }
    return DatasetConfig.from_tree(tree)


def read(tmp_path, lines):
    """Lines, or values that become lines -> what each split asks."""
    path = tmp_path / "letters.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return read_dataset(dataset_of(path), tmp_path)


def read_dataset(dataset, scratch):
    asked = {}
    with Spool(scratch / "lines") as spool:
        splits = read_own_file(dataset, spool)
        for name, split in zip(("train", "test"), splits, strict=True):
            split.write(scratch / f"{name}.out", scratch=scratch)
            asked[name] = [c["messages"][0]["content"] for c in JsonLines(scratch / f"{name}.out")]
    return asked


def test_a_line_is_a_list_of_messages_or_an_object_with_them(tmp_path):
    lines = [talk("a"), {"messages": talk("b"), "source": "me"}, "", "  ", talk("\u00e9")]
    asked = read(tmp_path, lines)
    assert sorted(asked["train"] + asked["test"]) == ["a", "b", "\u00e9"]


def test_a_file_may_say_who_is_tested(tmp_path):
    lines = [{"messages": talk(str(i)), "split": "test" if i % 2 else "train"} for i in range(40)]
    asked = read(tmp_path, lines)
    assert asked["train"] == [str(i) for i in range(0, 40, 2)]
    assert asked["test"] == [str(i) for i in range(1, 40, 2)]


def test_else_a_hash_of_the_question_decides_and_keeps_the_order(tmp_path):
    asked = read(tmp_path, [talk(str(i)) for i in range(2000)])
    assert len(asked["test"]) == pytest.approx(2000 * TEST_PERCENT / 100, rel=0.3)
    assert asked["train"] == sorted(asked["train"], key=int)
    twice = read(tmp_path, [talk(str(i), answer) for i in range(2000) for answer in "ab"])
    assert twice["test"] == [q for q in asked["test"] for _ in "ab"]


def test_more_lines_move_none_of_the_others(tmp_path):
    few = read(tmp_path, [talk(str(i)) for i in range(1000)])
    more = read(tmp_path, [talk(str(i)) for i in reversed(range(1500))])
    assert set(few["test"]) <= set(more["test"])
    assert set(few["train"]) <= set(more["train"])


def test_a_small_file_keeps_a_question_for_testing(tmp_path):
    asked = read(tmp_path, [talk(q, a) for q in ("2", "3", "5", "7") for a in "ab"])
    assert len(asked["test"]) == 2
    assert len(set(asked["test"])) == 1
    assert read(tmp_path, [talk("1")] * 3) == {"train": ["1"] * 3, "test": []}
    said = [{"messages": talk(str(i)), "split": "train"} for i in range(10)]
    assert len(read(tmp_path, said)["train"]) == 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[{", "not JSON: "),
        pytest.param("[" * 100_000, "not JSON: ", id="deep"),
        ('{"messages": NaN}', "not JSON: NaN is no number"),
        ("7", "a conversation needs a list of 'messages'"),
        ([], "a conversation needs a list of 'messages'"),
        ({"conversation": []}, "a conversation needs a list of 'messages'"),
        (talk("a")[::-1], "message 0 is of role 'assistant', expected 'user'"),
        (talk("a")[:1], "the conversation has no answer"),
        (talk("a", 7), "message 1: content is neither text nor a list of parts"),
        ({"messages": talk("a"), "split": "dev"}, "split is 'dev', expected one of: train, test"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong_and_what_a_line_is(line, message, tmp_path):
    with pytest.raises(DataError) as error:
        read(tmp_path, [talk("a"), "", line, talk("b")])
    assert str(error.value).startswith(f"{tmp_path}/letters.jsonl:3: {message}")
    assert "\n" not in str(error.value)
    assert '[{"role": "user"' in (error.value.hint or "")


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "letters.jsonl"
    path.write_bytes(b"\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"letters\.jsonl:2: not JSON: 'utf-8' codec"):
        read_dataset(dataset_of(path), tmp_path)


def test_a_file_without_conversations_one_that_is_gone_and_one_that_changed(tmp_path):
    path = tmp_path / "letters.jsonl"
    path.write_text("\n \n")
    with pytest.raises(DataError, match=r"letters\.jsonl has no conversation"):
        read_dataset(dataset_of(path), tmp_path)
    dataset = dataset_of(path)
    path.write_text(json.dumps(talk("a")))
    with pytest.raises(DataError, match="the run was planned with") as error:
        read_dataset(dataset, tmp_path)
    assert error.value.hint == "it has changed since: run again"
    path.unlink()
    with pytest.raises(DataError, match=r"letters\.jsonl cannot be read: no such file"):
        read_dataset(dataset, tmp_path)
