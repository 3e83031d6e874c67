"""Groups of settings: conversion to JSON trees, strict parsing, and a canonical form."""

import dataclasses
import functools
import math
import reprlib
import types
import typing
from typing import Any, Self, TypeAlias

from nanochat_core.errors import ConfigError

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"


class Section:
    """A group of settings. Subclasses are frozen, keyword-only dataclasses.

    A field has no default, unless it was added later: then it is `neutral(v)`, where `v` reproduces
    behaviour from before the field existed. It is left out of the canonical form when equal to `v`,
    so old artifacts stay valid, and a tree that lacks it means `v`.
    """

    def tree(self) -> dict[str, Tree]:
        """Return all fields as JSON-ready values, in declaration order; tuples become lists."""
        fields = dataclasses.fields(typing.cast(Any, self))
        return {field.name: _to_tree(getattr(self, field.name)) for field in fields}

    def canonical(self) -> dict[str, Tree]:
        """Return the tree that identities use: without locations and neutral values."""
        result: dict[str, Tree] = {}
        for field in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, field.name)
            if not field.metadata.get("identity", True):
                continue
            # So that adding a field keeps the identity of artifacts from before it.
            if "neutral" in field.metadata and value == field.metadata["neutral"]:
                continue
            result[field.name] = _to_tree(value, canonical=True)
        return result

    @classmethod
    def from_tree(cls, tree: dict[str, Any], *, where: str = "") -> Self:
        """Parse JSON values. Raises ConfigError for unknown or missing names and wrong types."""
        types_by_name = types_of(cls)
        fields = dataclasses.fields(typing.cast(Any, cls))
        names = [field.name for field in fields]
        where = where or cls.__name__
        for name in tree:
            if name not in names:
                raise ConfigError(
                    f"{where} has no setting {shown(name)}", hint=f"one of: {', '.join(names)}"
                )
        for field in fields:
            if field.name not in tree and "neutral" not in field.metadata:
                raise ConfigError(f"{where} needs a value for '{field.name}'")
        return cls(**{n: from_json(types_by_name[n], tree[n], where=f"{where}.{n}") for n in tree})


@functools.cache
def types_of(section: type[Any]) -> dict[str, Any]:
    """Return the type of each field."""
    return typing.get_type_hints(section)


def shown(value: object) -> str:
    """Return a value for an error message: on one line, truncated if long."""
    return reprlib.repr(value)


def neutral(value: Any, **metadata: Any) -> Any:
    """Declare a field that was added later, with the value that changes nothing.

    `identity=False`: it is a location whose content another field identifies, and is in no
    canonical form.
    """
    return dataclasses.field(default=value, metadata={**metadata, "neutral": value})


def within(least: float, most: float, **metadata: Any) -> Any:
    """Declare a field whose numbers are from `least` to `most`, see `check_bounds`."""
    metadata["bounds"] = (least, most)
    if "neutral" in metadata:
        return neutral(metadata.pop("neutral"), **metadata)
    return dataclasses.field(metadata=metadata)


def check_bounds(where: str, section: Section) -> None:
    """Raise ConfigError for a number outside of the bounds that its field declares."""
    for item in dataclasses.fields(typing.cast(Any, section)):
        least, most = item.metadata.get("bounds", (-math.inf, math.inf))
        value = getattr(section, item.name)
        numbers = typing.cast(tuple[Any, ...], value if isinstance(value, tuple) else (value,))
        for number in numbers:
            if isinstance(number, int | float) and not least <= number <= most:
                raise ConfigError(
                    f"{where}.{item.name} is {shown(number)}, expected {least} to {most}"
                )


def check_counts(prefix: str, section: Section, *, may_be_zero: tuple[str, ...]) -> None:
    """Raise ConfigError for a count below 1, or below 0 where it may be zero; also in lists."""
    for item in dataclasses.fields(typing.cast(Any, section)):
        value = getattr(section, item.name)
        name = f"{prefix}{item.name}"
        if isinstance(value, Section):
            check_counts(f"{name}.", value, may_be_zero=may_be_zero)
        elif isinstance(value, tuple):
            for i, entry in enumerate(typing.cast(tuple[Any, ...], value)):
                if isinstance(entry, Section):
                    check_counts(f"{name}[{i}].", entry, may_be_zero=may_be_zero)
        elif type(value) is int:
            least = 0 if item.name in may_be_zero else 1
            if value < least:
                raise ConfigError(f"{name} is {value}, expected at least {least}")


def _to_tree(value: Any, *, canonical: bool = False) -> Tree:
    if isinstance(value, Section):
        return value.canonical() if canonical else value.tree()
    if isinstance(value, tuple):
        return [_to_tree(item, canonical=canonical) for item in typing.cast(tuple[Any, ...], value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{type(value).__name__} has no stable form in a config: {value!r}")


def from_json(expected: Any, value: Any, *, where: str) -> Any:
    """Return one JSON value as the annotated type `expected`; an int is accepted as a float."""
    if isinstance(expected, type) and issubclass(expected, Section):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {shown(value)}, expected a group of settings")
        return expected.from_tree(typing.cast(dict[str, Any], value), where=where)
    if typing.get_origin(expected) is tuple:
        item_type = typing.get_args(expected)[0]
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {shown(value)}, expected a list")
        items = typing.cast(list[Any], value)
        return tuple(
            from_json(item_type, item, where=f"{where}[{i}]") for i, item in enumerate(items)
        )
    # The only unions in a section are "X | None".
    if isinstance(expected, types.UnionType):
        if value is None:
            return None
        inner = [option for option in typing.get_args(expected) if option is not types.NoneType]
        return from_json(inner[0], value, where=where)
    if expected is float and type(value) is int:
        return float(value)
    if expected is float and type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{where} is {value}, expected a finite number")
    # Not isinstance: True is an int, but not a number of steps.
    if type(value) is not expected:
        raise ConfigError(f"{where} is {shown(value)}, expected {expected.__name__}")
    return value
