import hashlib
import json

import pytest

from nanochat_core.config import DatasetConfig
from nanochat_core.data.conversations.custom_jsonl import (
    REFUSED_KEYS,
    TEST_PERCENT,
    WEIGHT_KEYS,
    read_own_file,
)
from nanochat_core.data.conversations.disk_shuffle import Spool
from nanochat_core.errors import DataError
from tests.support.nanochat_core.data.fixtures import refused


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
    with Spool(scratch / "lines") as spool:
        splits = zip(("train", "test"), read_own_file(dataset, spool), strict=True)
        messages = {name: [spool.read(int(i))["messages"] for i in s.order] for name, s in splits}
        return {name: [first["content"] for first, *_ in messages[name]] for name in messages}


def test_a_line_is_a_list_or_an_object_that_may_say_who_is_tested(tmp_path):
    lines = [talk("a"), {"messages": talk("b"), "source": "me"}, "", "  ", talk("\u00e9")]
    asked = read(tmp_path, lines)
    assert sorted(asked["train"] + asked["test"]) == ["a", "b", "\u00e9"]
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
    few = read(tmp_path, [talk(str(i)) for i in reversed(range(1000))])  # more lines move none
    for split in ("train", "test"):
        assert set(few[split]) <= set(asked[split])


def test_a_small_file_keeps_a_question_for_testing(tmp_path):
    asked = read(tmp_path, [talk(q, a) for q in ("2", "3", "5", "7") for a in "ab"])
    assert len(asked["test"]) == 2
    assert len(set(asked["test"])) == 1
    assert read(tmp_path, [talk("1")] * 3) == {"train": ["1"] * 3, "test": []}
    said = [{"messages": talk(str(i)), "split": "train"} for i in range(10)]
    assert len(read(tmp_path, said)["train"]) == 10


BAD_LINES = [
    *('{"messages": NaN}', "7", [], {"conversation": []}, talk("a")[::-1]),
    *(talk("a")[:1], talk("a", 7), talk("a", None), talk(["a"])),
    {"messages": talk("a"), "split": "dev"},
]


def test_a_bad_line_is_named_with_what_is_wrong_and_what_a_line_is(tmp_path, transcript):
    for line in BAD_LINES:
        lines = [talk("a"), "", line, talk("b")]
        transcript.refused(str(line)[:70], DataError, read, tmp_path, lines)
    for line in ("[{", "[" * 100_000):
        refused(r"letters\.jsonl:1 is not JSON: ", read, tmp_path, [line], hint='[{"role": "user"')


def test_a_file_without_conversations_one_that_is_gone_and_one_that_changed(tmp_path):
    path = tmp_path / "letters.jsonl"
    path.write_text("\n \n")
    refused(r"letters\.jsonl has no conversation", read_dataset, dataset_of(path), tmp_path)
    dataset = dataset_of(path)
    path.write_text(json.dumps(talk("a")))
    hint = "it has changed since: run again"
    refused("the run was planned with", read_dataset, dataset, tmp_path, hint=hint)
    path.unlink()
    refused(r"letters\.jsonl cannot be read: no such file", read_dataset, dataset, tmp_path)


def kept(tmp_path, lines, log=lambda text: None):
    """Lines of a file -> the messages of all conversations."""
    path = tmp_path / "letters.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with Spool(tmp_path / "lines") as spool:
        read_own_file(dataset_of(path), spool, log)
        return [spool.read(number)["messages"] for number in range(len(spool))]


@pytest.mark.parametrize("key", WEIGHT_KEYS)
@pytest.mark.parametrize(("value", "weight"), [(0, 0), (False, 0), (0.0, 0), (1, 1), (True, 1)])
def test_a_weight_is_obeyed_under_the_names_of_other_trainers(tmp_path, key, value, weight):
    user, assistant = talk("a")
    lines = [[user, {**assistant, key: value}, user, assistant]]
    assert kept(tmp_path, lines) == [[user, {**assistant, "weight": weight}, user, assistant]]


def test_a_weight_may_stand_at_what_is_never_learnt_and_empty_keys_are_those_of_an_export(tmp_path):
    (user, assistant), system = talk("a", ""), {"role": "system", "content": "s"}
    exported = {**assistant, "tool_calls": None, "loss": None, "annotations": [], "name": ""}
    messages = [{**system, "train": False}, {**user, "weight": 0}, exported]
    expected = [{**system, "weight": 0}, {**user, "weight": 0}, assistant]
    assert kept(tmp_path, [{"messages": messages, "tools": []}]) == [expected]


CALLS = [{"id": "1"}]
NOT_OBEYED = [
    *({"tool_calls": CALLS}, {"content": None, "tool_calls": CALLS}, {"reasoning_content": "hm"}),
    *({"name": "Ann"}, {"weight": 0.5}, {"loss_mask": [0, 1]}, {"train": "false"}, {"weight": 0}),
    *({"train": True, "weight": 0}, {"weight": 10**400}, {"loss": "x" * 999}),
    {"content": [{"type": "text", "text": "a", "mask": 1}]},
]


def test_a_key_of_a_message_that_is_not_obeyed_is_refused(tmp_path, transcript):
    user, assistant = talk("a")
    for more in NOT_OBEYED:
        lines = [talk("b"), [user, {**assistant, **more}]]
        transcript.refused(str(more)[:70], DataError, kept, tmp_path, lines)


@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize(("key", "value"), [("train", True), ("weight", 1), ("loss_mask", 1.0)])
def test_only_an_assistant_is_learnt(tmp_path, role, key, value):
    lines = [[{"role": role, "content": "a", key: value}, *talk("a")]]
    refused(f"{key} is {value}, but only an assistant's", kept, tmp_path, lines)


@pytest.mark.parametrize(
    "key", sorted({*REFUSED_KEYS, "weights", "mask", "train_on_inputs", "label"})
)
def test_a_key_of_a_line_that_others_obey_is_refused(tmp_path, key):
    lines = [{"messages": talk("a"), key: 0}]
    complaint = f"letters.jsonl:1: '{key}' of a line cannot be obeyed"
    refused(complaint, kept, tmp_path, lines, hint="leave it out")


def test_other_keys_of_lines_are_ignored_with_a_line_in_the_log(tmp_path):
    log = []
    lines = [{"messages": talk(str(i)), "id": i, "source": "me" if i else None} for i in range(5)]
    kept(tmp_path, lines, log.append)
    assert log == ["letters: keys that lines have and training ignores: id (5), source (4)"]
    kept(tmp_path, [talk("a"), {"messages": talk("b"), "split": "train", "tags": []}], log.append)
    assert len(log) == 1
