"""Compare two artifacts of a stage: pre-images leaf by leaf, inputs and files."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from flows.identity.manifest import Manifest
from nanochat_core.section import Tree

Kind: TypeAlias = Literal["format", "config", "code", "redo", "input", "record"]
_PARTS: dict[Kind, str] = {  # of a pre-image, root causes first
    "format": "format",
    "config": "config",
    "code": "code",
    "redo": "redo",
    "input": "inputs",
    "record": "records",
}
PASSED_ON: tuple[Kind, ...] = ("input", "record")  # consequences of changes in earlier stages
_MAX_TEXT = 40  # characters of a value that are shown


class _Absent:
    """The type of `_ABSENT`: a leaf that one side lacks, unlike one that is null."""


_ABSENT = _Absent()


@dataclass(frozen=True, kw_only=True)
class Change:
    """One leaf that differs. An input's or its record's is propagation, others are root causes."""

    kind: Kind
    name: str  # pretrain.num_steps; nanochat_core.optim.muon or tasks/generated/words.txt; rows
    old: str | None  # None: not there
    new: str | None

    def __str__(self) -> str:
        if self.kind == "config" and not (self.old or self.new or "").startswith("{"):
            old, new = _rounded(self.old), _rounded(self.new)
            if old == new:  # they differ in the last digits alone
                old, new = self.old, self.new
            return f"{self.name} {_shown(old)} -> {_shown(new)}"
        if self.kind == "format":
            return f"file format {self.old} -> {self.new}"
        if self.kind == "redo":
            return "asked for again"
        verb = "added" if self.old is None else "removed" if self.new is None else "changed"
        return f"{self.name} {verb}" if self.kind == "config" else f"{self.kind} {self.name} {verb}"


def differ(old: Manifest, new: Manifest) -> dict[str, list[dict[str, Any]]]:
    """Return the differences of two artifacts of a stage as JSON values.

    `changes` are of settings, code and file format, `inputs` are other artifacts, `files` have
    their sizes in bytes. In each `old` or `new` is None where that side lacks it.
    """
    assert old.stage == new.stage, (old.stage, new.stage)
    inputs = {stage: (old.inputs.get(stage), new.inputs.get(stage)) for stage in old.inputs}
    inputs |= {stage: (None, source) for stage, source in new.inputs.items() if stage not in inputs}
    return {
        "changes": [asdict(c) for c in compare(old.preimage, new.preimage, with_inputs=False)],
        "inputs": [
            {"stage": stage, "old": was and asdict(was), "new": now and asdict(now)}
            for stage, (was, now) in inputs.items()
            # By the content's digest, which is what the fingerprint is computed from.
            if was is None or now is None or was.digest != now.digest
        ],
        "files": list(_file_changes(old, new)),
    }


def compare(
    old: Mapping[str, Tree], new: Mapping[str, Tree], *, with_inputs: bool = True
) -> list[Change]:
    """Return every difference between two pre-images of one stage, root causes first."""
    changes = [
        Change(kind=kind, name=name, old=_text(before), new=_text(after))
        for kind, part in _PARTS.items()
        if with_inputs or kind not in PASSED_ON
        for name, before, after in _differences("", old.get(part, _ABSENT), new.get(part, _ABSENT))
    ]
    # An input that changed has another record too: one line is enough.
    others = {change.name for change in changes if change.kind == "input"}
    return [change for change in changes if change.kind != "record" or change.name not in others]


def nearest(
    manifests: Iterable[Manifest], preimage: Mapping[str, Tree], *, with_inputs: bool = True
) -> Manifest | None:
    """Return the artifact that differs in the fewest leaves, the first of several, or None."""
    return min(
        manifests,
        key=lambda manifest: len(compare(manifest.preimage, preimage, with_inputs=with_inputs)),
        default=None,
    )


def is_built(manifest: Manifest) -> bool:
    """Return whether an artifact was built by a stage. An imported one has no settings."""
    config = manifest.preimage.get("config")
    return not isinstance(config, dict) or list(config) != ["imported"]


def _file_changes(old: Manifest, new: Manifest) -> Iterator[dict[str, Any]]:
    before = {file.path: file for file in old.files}
    after = {file.path: file for file in new.files}
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        # By content where both have it: another pyarrow encodes the same documents otherwise.
        if was is None or now is None or (was.content or was.sha256) != (now.content or now.sha256):
            yield {"path": path, "old": was and was.size, "new": now and now.size}


def _differences(
    name: str, old: "Tree | _Absent", new: "Tree | _Absent"
) -> Iterator[tuple[str, "Tree | _Absent", "Tree | _Absent"]]:
    """Yield (dotted name, old, new) of each leaf that differs; lists of groups match by label."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{name}.{key}" if name else key
            yield from _differences(inner, old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif (olds := _groups(old)) and (news := _groups(new)):
        before, after = _by_name(olds), _by_name(news)
        # Both sides by index unless both have unique names, or an entry would match a wrong one.
        if before is None or after is None:
            before, after = _by_place(olds), _by_place(news)
        for label in dict.fromkeys([*before, *after]):
            inner = f"{name}[{label}]"
            yield from _differences(inner, before.get(label, _ABSENT), after.get(label, _ABSENT))
        # The same entries in another order give another fingerprint.
        if before.keys() == after.keys() and list(before) != list(after):
            yield name, list(before), list(after)
    elif not _is_same(old, new):
        yield name, old, new


def _groups(tree: "Tree | _Absent") -> list[dict[str, Tree]]:
    """Return the entries of a list of groups, or [] if `tree` is anything else."""
    groups = [item for item in tree if isinstance(item, dict)] if isinstance(tree, list) else []
    return groups if isinstance(tree, list) and len(groups) == len(tree) else []


def _by_name(groups: list[dict[str, Tree]]) -> dict[str, Tree] | None:
    """Return groups by their name or task. None means that some have none, or the same."""
    named = {str(group.get("name") or group.get("task") or ""): group for group in groups}
    return dict(named) if "" not in named and len(named) == len(groups) else None


def _by_place(groups: list[dict[str, Tree]]) -> dict[str, Tree]:
    return {str(index): group for index, group in enumerate(groups)}


def _is_same(old: "Tree | _Absent", new: "Tree | _Absent") -> bool:
    """Return whether two leaves are equal in canonical JSON, where 1 is not 1.0."""
    # Python finds [1] == [1.0], so lists are compared by their text too.
    return type(old) is type(new) and old == new and (type(old) is str or _text(old) == _text(new))


def _text(tree: "Tree | _Absent") -> str | None:
    return None if isinstance(tree, _Absent) else json.dumps(tree, sort_keys=True)


def _rounded(text: str | None) -> str | None:
    """Return JSON with its numbers as people write them: 0.3, not 0.30000000000000004."""
    if text is None:
        return None
    return json.dumps(json.loads(text, parse_float=lambda digits: float(f"{float(digits):.12g}")))


def _shown(text: str | None) -> str:
    if text is None:
        return "unset"
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
