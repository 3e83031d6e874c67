"""`@frozen`: a frozen, keyword-only dataclass whose class is made in a fifth of the time.

`@dataclass(frozen=True, kw_only=True)` compiles six methods for each class; for the classes that
`nanochat plan` loads this took a fifth of its time. Here `__init__` alone is compiled, and all
classes share the other methods. Classes of one hierarchy are all made in the same way.
"""

import functools
import reprlib
from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

_T = TypeVar("_T")


class _Frozen:
    """The methods that all classes share, each unless the class has its own."""

    def __setattr__(self, name: str, value: object) -> None:
        # `__init__` sets each field once.
        if name in self.__dict__ or name not in _names(type(self)):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return _values(self) == _values(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(_values(self))

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        shown = ", ".join(
            f"{n}={v!r}" for n, v in zip(_names(type(self)), _values(self), strict=True)
        )
        return f"{type(self).__qualname__}({shown})"


_METHODS = ("__setattr__", "__delattr__", "__eq__", "__hash__", "__repr__")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(kind: type[_T]) -> type[_T]:
    """Make a frozen, keyword-only dataclass of a class; all its fields are compared and shown."""
    made = dataclass(kw_only=True, repr=False, eq=False)(kind)
    for name in _METHODS:
        if name not in kind.__dict__:
            setattr(made, name, _Frozen.__dict__[name])
    return made


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def _values(item: Any) -> tuple[Any, ...]:
    return tuple(getattr(item, name) for name in _names(item.__class__))
