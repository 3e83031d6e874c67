"""Parse a record, a tree of JSON values, into a dataclass, and check the type of every field.

Any program that may write to the store may have written a record, so nothing of it is used before
this check. Annotated fields check more than a type: `Annotated[str, check]` has a function that
returns what was expected, or None if the value is right; `Annotated[Facts, Known]` has a TypedDict
of the names that are read from a group which may have others too.
"""

import datetime
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from flows.identity.records import OtherFormat, decode_record, repair_hint, shorten
from infra.retry import TRIES, RetryPolicy, until_answered
from infra.storage.base import BadObject, ObjectNotFound, Store, VersionedObject, check_key
from nanochat_core.errors import ArtifactError, StoreError

_R = TypeVar("_R")
_AT_ONCE = RetryPolicy(tries=TRIES, first_wait=0.0)  # the network may have damaged an answer
_MAX_INTEGER = 2**63  # programs that read our JSON, and tables, have no larger integers
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)


def _no_count(value: int) -> str | None:
    return None if value >= 0 else "a count of 0 or more"


def _no_digest(value: str) -> str | None:
    return None if _DIGEST.fullmatch(value) else "64 hex digits"


def _no_key(value: str) -> str | None:
    try:
        check_key(value)
    except StoreError:
        return "a name in the store"
    return None


def _no_name(value: str) -> str | None:
    return _no_key(value) or ("one name" if "/" in value else None)


def _no_time(value: str) -> str | None:
    try:
        # The pattern too: fromisoformat takes many other forms, which sort and print differently.
        if _TIME.fullmatch(value):
            datetime.datetime.fromisoformat(value)
            return None
    except ValueError:
        pass
    return "a time like 2026-11-21T05:53:38Z"


Count: TypeAlias = Annotated[int, _no_count]
Digest: TypeAlias = Annotated[str, _no_digest]  # part of a key
Key: TypeAlias = Annotated[str, _no_key]  # stays in its store, as a path in its directory
Name: TypeAlias = Annotated[str, _no_name]  # part of a key, without '/'
Time: TypeAlias = Annotated[str, _no_time]


def find_record(
    store: Store, key: str, kind: type[_R], *, format: int, what: str, mend: str | None = None
) -> _R | None:
    """Return the record at `key`. None means that the store has answered: no such object.

    Raises StoreError if the store cannot be reached, ArtifactError if the record is damaged; `what`
    and `mend` are those of `read_record`.
    """
    found = find_versioned(store, key, kind, format=format, what=what, mend=mend)
    return found and found[0]


def find_versioned(
    store: Store, key: str, kind: type[_R], *, format: int, what: str, mend: str | None = None
) -> tuple[_R, VersionedObject] | None:
    """Return the record at `key` as `find_record` does, with the object's version and age."""
    where = f"{store.url}/{key}"

    def read() -> tuple[dict[str, Any], VersionedObject]:
        stored = store.get_stored(key)
        return decode_record(stored.data, format=format, where=where), stored

    try:
        tree, stored = until_answered(read, ArtifactError, policy=_AT_ONCE)
    except ObjectNotFound:
        return None
    except BadObject as error:
        raise ArtifactError(str(error), hint=error.hint) from error
    except OtherFormat:
        raise
    except ArtifactError as error:
        error.hint = repair_hint(mend) if mend else error.hint
        raise
    return read_record(kind, tree, where=where, what=what, mend=mend), stored


def read_record(
    kind: type[_R], tree: Mapping[str, Any], *, where: str, what: str, mend: str | None = None
) -> _R:
    """Return a record's tree as the dataclass `kind`, every field checked against its type.

    Raises ArtifactError, which names the record `where` and its kind `what`; `mend` is the hint if
    it is the same on another machine.
    """
    try:
        return cast("_R", _as_dataclass(kind, tree, ""))
    except _Wrong as error:
        raise ArtifactError(
            f"{where} is not {what}: {error}",
            hint=repair_hint(mend or "delete it and run the command again"),
        ) from error


class _Wrong(Exception):
    """A value does not have its field's type. Caught in `read_record`."""


@lru_cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _as_dataclass(kind: type[Any], tree: Any, at: str) -> Any:
    group = _group(tree, at)
    known = {field.name: field for field in fields(kind)}
    if unknown := group.keys() - known.keys():
        raise _Wrong(f"{at}{shorten(min(unknown))} is not known")
    for name, field in known.items():
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if is_needed and name not in group:
            raise _Wrong(f"{at}{name} is missing")
    hints = _hints(kind)
    return kind(**{name: _value(hints[name], group[name], f"{at}{name}") for name in group})


def _group(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(at.removesuffix("."), value, "a group")
    return cast("dict[str, Any]", value)


def _value(expected: Any, value: Any, at: str) -> Any:
    """Return `value` as the type `expected`: lists as tuples, groups as dataclasses."""
    if expected is str is type(value):  # most values by far, and the rest is slow
        return value
    origin, options = get_origin(expected), get_args(expected)
    if origin is Annotated:
        return _annotated(options[0], options[1:], value, at)
    if origin in (Union, types.UnionType):
        return _optional(options, value, at)
    if origin is Literal:
        # `True == 1` in Python, so the types are compared too.
        if not any(type(value) is type(option) and value == option for option in options):
            raise _wrong(at, value, f"one of {', '.join(map(str, options))}")
        return value
    if origin is tuple:
        return _tuple(options, value, at)
    if origin is dict:
        group = _group(value, at)
        return {
            _value(options[0], name, f"a name in {at}"): _value(options[1], item, f"{at}.{name}")
            for name, item in group.items()
        }
    if is_dataclass(expected):
        return _as_dataclass(cast("type[Any]", expected), value, f"{at}.")
    if expected is Any or not isinstance(expected, type):  # the name of a recursive type
        return value
    return _plain(expected, value, at)


def _plain(expected: type[Any], value: Any, at: str) -> Any:
    # JSON writes 1.0 as 1 in other languages, so an int is a float; a bool is no int.
    fits = (int, float) if expected is float else (expected,)
    if type(value) not in fits:
        raise _wrong(at, value, expected.__name__)
    if expected is int and not -_MAX_INTEGER <= value < _MAX_INTEGER:
        raise _wrong(at, value, "an integer of 64 bits")
    return value


def _annotated(expected: Any, more: tuple[Any, ...], value: Any, at: str) -> Any:
    value = _value(expected, value, at)
    # A parameter of runs is annotated with its declaration too, which is no check.
    checks: list[Any] = [] if value is None else [item for item in more if callable(item)]
    for check in checks:
        if is_typeddict(check):
            _check_known(check, value, at)
        elif (what := check(value)) is not None:
            raise _wrong(at, value, what)
    return value


def _check_known(known: Any, value: Any, at: str) -> None:
    """Raise _Wrong unless the names that are read from a group exist and have their types."""
    group = _group(value, at)
    if missing := known.__required_keys__ - group.keys():
        raise _Wrong(f"{at}.{min(missing)} is missing")
    for name, expected in _hints(known).items():
        if name in group:
            _value(expected, group[name], f"{at}.{name}")


def _optional(options: tuple[Any, ...], value: Any, at: str) -> Any:
    """Return `value` as the one type other than None; a union of several accepts any value."""
    if value is None and types.NoneType in options:
        return None
    some = [option for option in options if option is not types.NoneType]
    return _value(some[0], value, at) if len(some) == 1 else value


def _tuple(options: tuple[Any, ...], value: Any, at: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(at, value, "a list")
    items = cast("list[Any]", value)
    if len(options) == 2 and options[1] is Ellipsis:
        options = (options[0],) * len(items)
    if len(items) != len(options):
        raise _wrong(at, items, f"a list of {len(options)}")
    pairs = enumerate(zip(options, items, strict=True))
    return tuple(_value(option, item, f"{at}[{i}]") for i, (option, item) in pairs)


def _wrong(at: str, value: object, expected: str) -> _Wrong:
    return _Wrong(f"{at or 'it'} is {shorten(value)}, expected {expected}")
