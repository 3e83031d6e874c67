"""Differences between pre-images: each named once, with both values."""

from dataclasses import replace
from typing import Any

import pytest

from flows.identity.diff import compare, differ
from flows.identity.manifest import Manifest
from tests.support.flows.shelf import make_manifest


def words(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences between two configurations of a section s."""
    return [str(change) for change in compare({"config": {"s": old}}, {"config": {"s": new}})]


def entry(task: str, epochs: int) -> dict[str, Any]:
    return {"task": task, "epochs": epochs}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["s.a 1 -> 2"]),
        ({"a": 1}, {"a": 1.0}, ["s.a 1 -> 1.0"]),
        ({"a": True}, {"a": 1}, ["s.a true -> 1"]),
        ({"a": 0.1 + 0.2}, {"a": 0.7 * 0.1}, ["s.a 0.3 -> 0.07"]),
        ({"a": [0.1 + 0.2, 1e-05]}, {"a": [1e22]}, ["s.a [0.3, 1e-05] -> [1e+22]"]),
        ({"a": 0.3}, {"a": 0.1 + 0.2}, ["s.a 0.3 -> 0.30000000000000004"]),
        ({"a": 1}, {"a": 1.1 * 3}, ["s.a 1 -> 3.3"]),
        ({"a": None}, {"a": "x"}, ['s.a null -> "x"']),
        ({}, {"a": None}, ["s.a unset -> null"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}}, ["s.a.b 1 -> 3"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["s.a [1, 2] -> [1, 3]"]),
        ({"a": [1]}, {"a": [1.0]}, ["s.a [1] -> [1.0]"]),
        ({"a": "x" * 99}, {"a": ""}, [f's.a "{"x" * 36}... -> ""']),
        ({"m": [entry("a", 1)]}, {"m": [entry("a", 2)]}, ["s.m[a].epochs 1 -> 2"]),
        ({"m": [entry("a", 1)]}, {"m": [entry("a", 1), entry("b", 1)]}, ["s.m[b] added"]),
        ({"m": [entry("a", 1), entry("b", 1)]}, {"m": [entry("b", 1)]}, ["s.m[a] removed"]),
        ({"m": [entry("a", 1), entry("a", 2)]}, {"m": [entry("a", 1)]}, ["s.m[1] removed"]),
        (
            {"m": [entry("a", 1), entry("b", 1)]},
            {"m": [entry("b", 1), entry("a", 1)]},
            ['s.m ["a", "b"] -> ["b", "a"]'],
        ),
        ({"a": {"b": 1}}, {"a": None}, ["s.a changed"]),
        ({"a": None}, {"a": {"b": 1}}, ['s.a null -> {"b": 1}']),
        ({"a": {}}, {"a": 3}, ["s.a changed"]),
        ({"a": 3}, {"a": {}}, ["s.a 3 -> {}"]),
        ({}, {"a": {"b": 1}}, ["s.a added"]),
        ({"a": {"b": 1}}, {}, ["s.a removed"]),
        ({"m": []}, {"m": [entry("a", 1)]}, ['s.m [] -> [{"epochs": 1, "task": "a"}]']),
    ],
)
def test_settings(old, new, expected):
    assert words(old, new) == expected


def test_code_inputs_and_format_root_causes_first():
    old = {"format": 1, "code": {"m": "1", "n": "1"}, "inputs": {"rows": "1", "tokens": "1"}}
    new = {"format": 2, "code": {"m": "2", "o": "1"}, "inputs": {"rows": "2", "tokens": "1"}}
    changes = compare(old, new)
    assert [str(change) for change in changes] == [
        "file format 1 -> 2",
        "code m changed",
        "code n removed",
        "code o added",
        "input rows changed",
    ]
    assert [change.kind for change in changes] == ["format", "code", "code", "code", "input"]
    assert [c.kind for c in compare(old, new, with_inputs=False)] == ["format", *["code"] * 3]


# What two artifacts hold.


def artifact(seed: int, **facts: Any) -> Manifest:
    return make_manifest("sft", config={"seed": seed}, **facts)


def test_the_same_artifact_differs_in_nothing():
    one = artifact(1, files={"a": "1"})
    assert differ(one, one) == {"changes": [], "inputs": [], "files": []}


def test_files_differ_by_their_bytes_and_are_reported_by_their_sizes():
    old = artifact(1, files={"same": "x", "changed": "abc", "longer": "a", "gone": "1"})
    new = artifact(2, files={"same": "x", "changed": "abd", "longer": "aa", "new": "22"})
    assert [tuple(change.values()) for change in differ(old, new)["files"]] == [
        ("changed", 3, 3),
        ("gone", 1, None),
        ("longer", 1, 2),
        ("new", None, 2),
    ]


def test_files_of_the_same_text_are_the_same_whatever_encoded_it():
    old, new = (
        replace(made, files=(replace(made.files[0], content="0" * 64),))
        for made in (artifact(1, files={"a.parquet": data}) for data in "xy")
    )
    assert differ(old, new)["files"] == []


def test_inputs_differ_by_their_contents_alone():
    rows = [make_manifest("rows", config={"n": n}, files={"a": str(n % 2)}) for n in range(3)]
    same = make_manifest("task_data")
    old = artifact(1, inputs={"rows": rows[0], "task_data": same})
    rebuilt = artifact(1, inputs={"rows": rows[2], "task_data": same})  # the same bytes
    other = artifact(1, inputs={"rows": rows[1], "tokenizer": same})
    assert differ(old, rebuilt)["inputs"] == []
    changes = {change.pop("stage"): change for change in differ(old, other)["inputs"]}
    assert list(changes) == ["rows", "task_data", "tokenizer"]
    sides = [changes["rows"][side]["fingerprint"] for side in ("old", "new")]
    assert sides == [rows[0].fingerprint, rows[1].fingerprint]
    assert changes["task_data"]["new"] is None
    assert changes["tokenizer"]["old"] is None


def test_two_stages_are_not_compared():
    with pytest.raises(AssertionError):
        differ(make_manifest("sft"), make_manifest("rl"))
