"""Why two artifacts of a stage are not the same one: their pre-images compared, leaf by leaf."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flows.manifest import Manifest
from nanochat_core.config import Tree

Kind: TypeAlias = Literal["format", "config", "code", "input"]
_PARTS: dict[Kind, str] = {  # of a pre-image, root causes first
    "format": "format",
    "config": "config",
    "code": "code",
    "input": "inputs",
}
_MAX_TEXT = 40  # characters of a value that are shown


class _Absent:
    """Where one side has nothing, not even null."""


_ABSENT = _Absent()


@dataclass(frozen=True, kw_only=True)
class Change:
    """One leaf that differs. An input's change is propagation; the others are root causes."""

    kind: Kind
    name: str  # pretrain.num_steps; nanochat_core.optim.muon or tasks/words.txt; rows
    old: str | None  # None: not there
    new: str | None

    def __str__(self) -> str:
        if self.kind == "config" and not (self.old or self.new or "").startswith("{"):
            return f"{self.name} {_shown(self.old)} -> {_shown(self.new)}"
        if self.kind == "format":
            return f"file format {self.old} -> {self.new}"
        verb = "added" if self.old is None else "removed" if self.new is None else "changed"
        return f"{self.name} {verb}" if self.kind == "config" else f"{self.kind} {self.name} {verb}"


def compare(
    old: Mapping[str, Tree], new: Mapping[str, Tree], *, with_inputs: bool = True
) -> list[Change]:
    """Every difference between two pre-images of one stage, root causes first."""
    return [
        Change(kind=kind, name=name, old=_text(before), new=_text(after))
        for kind, part in _PARTS.items()
        if with_inputs or kind != "input"
        for name, before, after in _differences("", old.get(part, _ABSENT), new.get(part, _ABSENT))
    ]


def nearest(
    manifests: Iterable[Manifest], preimage: Mapping[str, Tree], *, with_inputs: bool = True
) -> Manifest | None:
    """The artifact that differs in the fewest leaves; of several such the first."""
    return min(
        manifests,
        key=lambda manifest: len(compare(manifest.preimage, preimage, with_inputs=with_inputs)),
        default=None,
    )


def _differences(
    name: str, old: "Tree | _Absent", new: "Tree | _Absent"
) -> Iterator[tuple[str, "Tree | _Absent", "Tree | _Absent"]]:
    """(dotted name, old, new) of what differs; a list of groups is taken apart by its labels."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{name}.{key}" if name else key
            yield from _differences(inner, old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif (olds := _groups(old)) and (news := _groups(new)):
        before, after = _by_name(olds), _by_name(news)
        if before is None or after is None:
            before, after = _by_place(olds), _by_place(news)
        for label in dict.fromkeys([*before, *after]):
            inner = f"{name}[{label}]"
            yield from _differences(inner, before.get(label, _ABSENT), after.get(label, _ABSENT))
        if before.keys() == after.keys() and list(before) != list(after):
            yield name, list(before), list(after)
    elif not _is_same(old, new):
        yield name, old, new


def _groups(tree: "Tree | _Absent") -> list[dict[str, Tree]]:
    """The entries of a list of groups; none when it is something else."""
    groups = [item for item in tree if isinstance(item, dict)] if isinstance(tree, list) else []
    return groups if isinstance(tree, list) and len(groups) == len(tree) else []


def _by_name(groups: list[dict[str, Tree]]) -> dict[str, Tree] | None:
    """Groups by what they are called, None when that does not tell them apart."""
    named = {str(group.get("name") or group.get("task") or ""): group for group in groups}
    return dict(named) if "" not in named and len(named) == len(groups) else None


def _by_place(groups: list[dict[str, Tree]]) -> dict[str, Tree]:
    return {str(index): group for index, group in enumerate(groups)}


def _is_same(old: "Tree | _Absent", new: "Tree | _Absent") -> bool:
    """Whether two leaves are one in canonical JSON, where 1 is not 1.0."""
    return type(old) is type(new) and old == new and (type(old) is str or _text(old) == _text(new))


def _text(tree: "Tree | _Absent") -> str | None:
    return None if isinstance(tree, _Absent) else json.dumps(tree, sort_keys=True)


def _shown(text: str | None) -> str:
    if text is None:
        return "unset"
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
