"""JSON records in the store that tell for themselves whether they are whole.

Manifests, run records, names, leases: each carries a format number and a checksum of all the rest,
because a store may hand out other bytes than were put, and what is no file of an artifact is
covered by no manifest.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

from flows.identity.fingerprint import fingerprint_of
from infra.storage.base import BadObject, ObjectNotFound, Store, VersionedObject
from nanochat_core.errors import ArtifactError

# Formats that are read too, each with the names of the fields that today's has not.
Earlier: TypeAlias = Mapping[int, tuple[str, ...]]
NO_OTHER: Earlier = {}

_T = TypeVar("_T")
_TOO_DEEP = "it is nested too deeply"
_LARGEST = 1e300
_MAX_SHOWN = 40  # characters of a value in an error
_DEEPEST = 64  # groups and lists in each other; readers and writers of JSON recurse
_READS = 3  # a damaged answer may be the network's fault; a damaged object stays damaged


class OtherFormat(ArtifactError):
    """A record that another version of nanochat-flows has written."""


def encode_record(tree: Mapping[str, Any], *, format: int) -> bytes:
    """A record as an object of the store. `tree` is plain JSON values under plain names."""
    assert "check" not in tree, "the checksum's own name"
    whole = {"format": format, **tree}
    # Through JSON and back: tuples become lists, as the reader will see them.
    check = fingerprint_of(json.loads(json.dumps(whole, allow_nan=False)))
    return (json.dumps({**whole, "check": check}, indent=1, allow_nan=False) + "\n").encode()


def decode_record(
    data: bytes, *, format: int, earlier: Earlier = NO_OTHER, where: str
) -> dict[str, Any]:
    """Return the record's tree without format and checksum. `where` is what errors call it.

    A record of an `earlier` format comes without what only that one has; what it lacks is missing.
    Raises ArtifactError if the record is damaged, OtherFormat if it is of another format.
    """
    try:
        tree: Any = json.loads(data, object_pairs_hook=_once)
        _check_values(tree)
    except RecursionError as error:
        raise _damaged(where, _TOO_DEEP) from error
    except ValueError as error:  # a wrong encoding is one too
        raise _damaged(where, f"it is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise _damaged(where, "it is not a record")
    fields = cast("dict[str, Any]", tree)
    written = fields.get("format")
    if type(written) is not int or written not in (format, *earlier):
        is_newer = type(written) is int and written > format
        raise OtherFormat(
            f"{where} is of format {shorten(written)}, "
            f"this version reads {', '.join(map(str, (*earlier, format)))}",
            hint="a newer version of nanochat-flows wrote it: update this one"
            if is_newer
            else "it was written by another version of nanochat-flows, or is damaged",
        )
    check = fields.pop("check", None)
    if check != fingerprint_of(fields):
        raise _damaged(where, "its checksum does not fit")
    del fields["format"]
    for name in earlier.get(written, ()):
        fields.pop(name, None)
    return fields


def shorten(value: object) -> str:
    """Return a value from a record as an error shows it."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a group of JSON. Of two values of one name, readers differ in which they take."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shorten(twice)} is there twice")
    return tree


def _check_values(tree: Any) -> None:
    """Raise ValueError for what Python reads from JSON and cannot write, print or count with."""
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
                raise ValueError(f"the number {shorten(value)} is none or too large")
        if not below:
            return
        level = below
    raise ValueError(_TOO_DEEP)


def find_document(
    store: Store, key: str, *, format: int, earlier: Earlier = NO_OTHER
) -> dict[str, Any] | None:
    """The record at `key`, or None only when the store says there is none.

    Raises StoreError when the store cannot be asked, ArtifactError when the record is damaged.
    """
    where = f"{store.url}/{key}"
    return _read_whole(
        lambda: decode_record(store.get(key), format=format, earlier=earlier, where=where)
    )


def find_stored(
    store: Store, key: str, *, format: int, earlier: Earlier = NO_OTHER
) -> tuple[dict[str, Any], VersionedObject] | None:
    """Like `find_document`, with the object's version and age."""

    def read() -> tuple[dict[str, Any], VersionedObject]:
        stored, where = store.get_stored(key), f"{store.url}/{key}"
        return decode_record(stored.data, format=format, earlier=earlier, where=where), stored

    return _read_whole(read)


def _read_whole(read: Callable[[], _T]) -> _T | None:
    """What `read` gives, None when there is nothing; a damaged answer is asked for again."""
    for left in reversed(range(_READS)):
        try:
            return read()
        except ObjectNotFound:
            return None
        except BadObject as error:
            raise ArtifactError(str(error), hint=error.hint) from error
        except ArtifactError:
            if not left:
                raise
    raise AssertionError("unreachable")


def repair_hint(then: str) -> str:
    """What to do about an answer that cannot be right; `then` when the object itself is wrong.

    However often one machine reads, all of it may come through one proxy that damages it.
    """
    return (
        "it may be damaged on the way here only: run the command on another machine, by another "
        f"network, first; if it is the same there, {then}"
    )


def _damaged(where: str, what: str) -> ArtifactError:
    return ArtifactError(
        f"{where} is damaged: {what}", hint=repair_hint("delete it and run the command again")
    )
