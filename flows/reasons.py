"""Why two artifacts of a stage are not the same one: their pre-images compared, leaf by leaf."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flows.manifest import Manifest
from nanochat_core.config import Tree

Kind: TypeAlias = Literal["format", "config", "code", "input"]
_MAX_TEXT = 40  # characters of a value that are shown


@dataclass(frozen=True, kw_only=True)
class Change:
    """One leaf that differs. An input's change is propagation; the others are root causes."""

    kind: Kind
    name: str  # pretrain.num_steps; nanochat_core.optim.muon or tasks/words.txt; rows
    old: str | None  # None: not there
    new: str | None

    def __str__(self) -> str:
        if self.kind == "config":
            return f"{self.name} {_shown(self.old)} -> {_shown(self.new)}"
        if self.kind == "format":
            return f"file format {self.old} -> {self.new}"
        verb = "added" if self.old is None else "removed" if self.new is None else "changed"
        return f"{self.kind} {self.name} {verb}"


def compare(
    old: Mapping[str, Tree], new: Mapping[str, Tree], *, with_inputs: bool = True
) -> list[Change]:
    """Every difference between two pre-images of one stage, root causes first."""
    changes: list[Change] = []
    changes += _differences("format", {"": old.get("format")}, {"": new.get("format")})
    changes += _differences("config", old.get("config"), new.get("config"))
    changes += _differences("code", old.get("code"), new.get("code"))
    if with_inputs:
        changes += _differences("input", old.get("inputs"), new.get("inputs"))
    return changes


def nearest(
    manifests: Iterable[Manifest], preimage: Mapping[str, Tree], *, with_inputs: bool = True
) -> Manifest | None:
    """The artifact that differs in the fewest leaves; of several such the first."""
    return min(
        manifests,
        key=lambda manifest: len(compare(manifest.preimage, preimage, with_inputs=with_inputs)),
        default=None,
    )


def _differences(kind: Kind, old: Tree, new: Tree) -> Iterator[Change]:
    before, after = dict(_leaves(old, "")), dict(_leaves(new, ""))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield Change(kind=kind, name=name, old=before.get(name), new=after.get(name))


def _leaves(tree: Tree, name: str) -> Iterator[tuple[str, str]]:
    """(dotted name, JSON text) of every leaf; only a list of groups is taken apart."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    elif isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        for label, item in zip(_labels(tree), tree, strict=True):
            yield from _leaves(item, f"{name}[{label}]")
    else:
        yield name, json.dumps(tree)


def _labels(items: list[Tree]) -> list[str]:
    """The entries of a list by what they are called, or all by their place."""
    groups = [item for item in items if isinstance(item, dict)]
    labels = [str(item.get("name") or item.get("task") or "") for item in groups]
    if "" in labels or len(set(labels)) < len(items):
        return [str(index) for index in range(len(items))]
    return labels


def _shown(text: str | None) -> str:
    if text is None:
        return "unset"
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
