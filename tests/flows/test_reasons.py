"""Differences between pre-images: each named once, with both values."""

from typing import Any

import pytest

from flows.reasons import compare


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
        ({"m": []}, {"m": [entry("a", 1)]}, ['s.m [] -> [{"epochs": 1, "task": "a"}]']),
    ],
)
def test_settings(old: dict[str, Any], new: dict[str, Any], expected: list[str]):
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
