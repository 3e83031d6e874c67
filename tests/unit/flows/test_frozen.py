"""`@frozen` classes behave as frozen, keyword-only dataclasses do."""

import copy
import dataclasses
import pickle

import pytest

from flows.frozen import frozen


@frozen
class Base:
    depth: int
    names: tuple[str, ...] = ()


@frozen
class Derived(Base):
    rules: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    def __str__(self) -> str:
        return f"depth {self.depth}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twin:
    depth: int
    names: tuple[str, ...] = ()


def test_a_field_can_neither_be_set_again_nor_deleted_nor_added() -> None:
    item = Derived(depth=3)
    for name in ("depth", "rules", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(item, name, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del item.depth
    assert (item.depth, item.rules) == (3, {})


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        Base(3)  # type: ignore[misc]
    with pytest.raises(TypeError, match="depth"):
        Base()  # type: ignore[call-arg]


def test_equal_are_items_of_one_class_with_equal_fields() -> None:
    assert Base(depth=3, names=("a",)) == Base(depth=3, names=("a",))
    assert Base(depth=3) != Base(depth=4)
    assert Base(depth=3) != Derived(depth=3)
    assert len({Base(depth=3), Base(depth=3), Base(depth=4)}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Derived(depth=3))


def test_it_is_shown_copied_and_converted_like_a_dataclass() -> None:
    item, twin = Base(depth=3, names=("a",)), Twin(depth=3, names=("a",))
    assert repr(item) == repr(twin).replace("Twin", "Base")
    assert str(Derived(depth=3)) == "depth 3"
    assert dataclasses.asdict(item) == dataclasses.asdict(twin)
    assert dataclasses.replace(item, depth=4) == Base(depth=4, names=("a",))
    for other in (copy.deepcopy(item), pickle.loads(pickle.dumps(item))):
        assert other == item
        with pytest.raises(dataclasses.FrozenInstanceError):
            other.depth = 4
