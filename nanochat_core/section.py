"""Groups of settings: conversion to JSON trees, strict parsing, and a canonical form."""

import dataclasses
import functools
import math
import reprlib
import sys
import types
import typing
from typing import Any, Self, TypeAlias

from nanochat_core.errors import ConfigError

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"
_NO_ENTRY = object()


# The value of each field that was added later which reproduces the behaviour from before the field
# existed. Append only: with a changed entry, results of other settings get an old fingerprint. The
# default of a field may change; its entry may not.
NEUTRAL: dict[str, "Tree"] = {
    "NumericsConfig.fp8_scales": "amax",
    "NumericsConfig.fp8_sums": "exact",
    "NumericsConfig.init_embedding_std": 0.8,
    "NumericsConfig.init_c_fc_bound": 0.4,
    "NumericsConfig.init_resid_first": 1.15,
    "NumericsConfig.init_resid_last": 1.05,
    "NumericsConfig.init_x0_first": 0.2,
    "NumericsConfig.init_x0_last": 0.05,
    "ModelConfig.residual_scalars": True,
    "ModelConfig.value_embeds": True,
    "ModelConfig.smear": True,
    "ModelConfig.backout": True,
    "ShardsConfig.column": None,
    "DatasetConfig.path": None,
    "DatasetConfig.snapshot": None,
    "DatasetConfig.revision": None,
    "TaskDataConfig.core_bundle": None,
    "TaskDataConfig.core_bundle_sha256": None,
    "OptimizerConfig.muon": "polar_express",
    "OptimizerConfig.grad_clip": None,
    "OptimizerConfig.lm_head_beta2": 0.96,
    "OptimizerConfig.lm_head_weight_decay": 0.01,
    "OptimizerConfig.embedding_beta2": 0.995,
    "OptimizerConfig.embedding_weight_decay": 0.001,
    "PretrainConfig.lr_fraction": 1.0,
    "BaseEvalConfig.core_max_per_task": None,
    "RLConfig.updates_per_batch": 1,
    "RLConfig.clip": None,
    "RLConfig.kl_weight": 0.0,
    "RLConfig.baseline": "group_mean",
    "RLConfig.drop_equal_groups": False,
    "RLConfig.eval_samples": 1,
    "RLConfig.rollout_precision": "model",
    "ShardsConfig.separator": None,
    "MixtureEntry.skip": 0,
    "TokenizerConfig.pattern": "nanochat",
}


class Section:
    """A group of settings. Subclasses are frozen, keyword-only dataclasses.

    A field has no default, unless it was added later. A field at its `NEUTRAL` value is left out of
    the canonical form, so old artifacts stay valid, and a tree that lacks the field means that
    value. A field without an entry always counts. `metadata={"identity": False}`: the field is a
    location whose content another field identifies, and is in no canonical form.
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
            tree = _to_tree(value, canonical=True)
            # So that adding a field keeps the identity of artifacts from before it.
            if tree != NEUTRAL.get(neutral_key(type(self), field.name), _NO_ENTRY):
                result[field.name] = tree
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
            if field.name in tree:
                continue
            if (key := neutral_key(cls, field.name)) in NEUTRAL:
                tree = {**tree, field.name: NEUTRAL[key]}
            elif field.default is dataclasses.MISSING:
                raise ConfigError(f"{where} needs a value for '{field.name}'")
        return cls(**{n: from_json(types_by_name[n], tree[n], where=f"{where}.{n}") for n in tree})


@functools.cache
def types_of(section: type[Any]) -> dict[str, Any]:
    """Return the type of each field."""
    return typing.get_type_hints(section)


def shown(value: object) -> str:
    """Return a value for an error message: on one line, truncated if long."""
    return reprlib.repr(value)


def unescaped(text: str) -> str:
    r"""Return a text with newlines and tabs for their escapes, every newline as "\n".

    A command line and a form have a backslash and an n; both spellings must have one identity.
    """
    text = text.replace(r"\n", "\n").replace(r"\r", "\r").replace(r"\t", "\t")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def neutral_key(section: type[Any], name: str) -> str:
    """Return the key in `NEUTRAL` of the field `name` of a section."""
    return f"{section.__name__}.{name}"


def within(least: float, most: float, *, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field whose numbers are from `least` to `most`, see `check_bounds`."""
    return dataclasses.field(default=default, metadata={"bounds": (least, most)})


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


def check_choices(where: str, section: Section, **choices: tuple[str, ...]) -> None:
    """Raise ConfigError for a field, by its name, that has none of its possible values."""
    for name, known in choices.items():
        if (value := getattr(section, name)) not in known:
            raise ConfigError(
                f"{where}.{name} is {shown(value)}", hint=f"one of: {', '.join(known)}"
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
    if expected is float and type(value) in (int, float):
        if not -sys.float_info.max <= value <= sys.float_info.max:  # an int may be larger, too
            raise ConfigError(f"{where} is {shown(value)}, expected a finite number")
        return float(value)
    # Not isinstance: True is an int, but not a number of steps.
    if type(value) is not expected:
        raise ConfigError(f"{where} is {shown(value)}, expected {expected.__name__}")
    return value
