"""Encode and decode JSON records, each with a format number and a checksum of its own.

Manifests, run records, tags and leases are records. A store may return other bytes than were put,
and a record, unlike a file of an artifact, is covered by no manifest: so it carries its checksum.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from flows.identity.fingerprint import fingerprint_of
from nanochat_core.errors import ArtifactError

_T = TypeVar("_T")
_TOO_DEEP = "it is nested too deeply"
_LARGEST = 1e300
_MAX_SHOWN = 40  # characters of a value in an error
_DEEPEST = 64  # levels of nesting; readers and writers of JSON recurse


class OtherFormat(ArtifactError):
    """A record in a format that this version of nanochat-flows does not read."""


def encode_record(tree: Mapping[str, Any], *, format: int) -> bytes:
    """Return a record as an object's bytes. `tree` has plain JSON values under plain names."""
    assert "check" not in tree, "the checksum's own name"
    whole = {"format": format, **tree}
    # Through JSON and back: the checksum is over what a reader gets, in which tuples are lists.
    check = fingerprint_of(json.loads(json.dumps(whole, allow_nan=False)))
    return (json.dumps({**whole, "check": check}, indent=1, allow_nan=False) + "\n").encode()


def decode_record(data: bytes, *, format: int, where: str) -> dict[str, Any]:
    """Return the record's tree without format and checksum. `where` names it in errors.

    Raises ArtifactError if the record is damaged, OtherFormat if it is of another format.
    """
    try:
        tree: Any = json.loads(data, object_pairs_hook=_once)
        _check_values(tree)
    except RecursionError as error:
        raise _damaged(where, _TOO_DEEP) from error
    except ValueError as error:  # UnicodeDecodeError is one too
        raise _damaged(where, f"it is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise _damaged(where, "it is not a record")
    fields = cast("dict[str, Any]", tree)
    # The format before the checksum: another format may compute it otherwise, and a later version's
    # record must not be reported as damaged.
    written = fields.get("format")
    if type(written) is not int or written != format:
        is_newer = type(written) is int and written > format
        raise OtherFormat(
            f"{where} is of format {shorten(written)}, this version reads {format}",
            hint="a newer version of nanochat-flows wrote it: update this one"
            if is_newer
            else "it was written by another version of nanochat-flows, or is damaged",
        )
    check = fields.pop("check", None)
    if check != fingerprint_of(fields):
        raise _damaged(where, "its checksum does not fit")
    del fields["format"]
    return fields


def unless_damaged(
    read: Callable[[], _T], note: Callable[[str], object] = lambda problem: None
) -> _T | None:
    """Return what `read` returns, or None for a damaged record: then `note` is called with why."""
    try:
        return read()
    except ArtifactError as error:
        note(str(error))
        return None


def shorten(value: object) -> str:
    """Return a value from a record for an error message: ASCII, 40 characters at most."""
    text = ascii(value)
    end = text[-1] if isinstance(value, str) else ""  # its quote
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...{end}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError for a name that occurs twice."""
    # JSON readers differ in which of the two values they take.
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shorten(twice)} occurs twice")
    return tree


def _check_values(tree: Any) -> None:
    """Raise ValueError for values read from JSON that Python cannot write, print or add up."""
    # Level by level, not recursive: the depth is what is being limited.
    level = [tree]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                group = cast("dict[str, Any]", value)
                below += (*group, *group.values())
            elif isinstance(value, list):
                below += cast("list[Any]", value)
            elif isinstance(value, str):
                value.encode()  # fails for half of a surrogate pair
            elif isinstance(value, int | float) and not abs(value) < _LARGEST:
                raise ValueError(f"the number {shorten(value)} is not a number or too large")
        if not below:
            return
        level = below
    raise ValueError(_TOO_DEEP)


def repair_hint(then: str) -> str:
    """Return a hint for a record that is wrong; `then` is the repair if the object itself is."""
    # Retries on one machine do not show which it is: one proxy may damage every answer.
    return (
        "the network may have damaged a whole record: first run the command on another machine or "
        f"network; if the error is the same there, {then}"
    )


def _damaged(where: str, what: str) -> ArtifactError:
    return ArtifactError(
        f"{where} is damaged: {what}", hint=repair_hint("delete it and run the command again")
    )
