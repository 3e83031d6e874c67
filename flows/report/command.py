"""The command that reproduces a run's artifacts, derived from their manifests alone.

A pre-image holds the settings that decided an artifact, not the command that the user typed. So the
derived command names the profile that differs in the fewest settings at the model's depth, and sets
each that differs. It gives exactly the same settings, however the run was started. Placement (GPUs,
batch per device, store) decides no artifact and is left out.
"""

import hashlib
import inspect
import json
import shlex
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# `flows.profiles` uses these through a module that fingerprints do not follow. Imported here, their
# code is part of the report's fingerprint.
import nanochat_core.model.shape  # noqa: F401  # pyright: ignore[reportUnusedImport]
import tasks.mixtures.mixture_files  # noqa: F401  # pyright: ignore[reportUnusedImport]
from flows.identity.fingerprint import canonical_json, single_settings
from flows.identity.manifest import Manifest
from flows.profiles import PROFILES
from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError
from nanochat_core.section import Tree, types_of

SNAPSHOT = "shards.snapshot"  # identity of the text that was read; cannot be set by a command
FILE = "FILE"  # stands for the path of a dataset of the user's own
_SECTIONS = types_of(RunConfig)

Settings: TypeAlias = dict[str, Tree]  # section.name -> canonical value


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The command that makes a run's artifacts again."""

    command: str | None  # for a shell, a line for each setting; None: there is none, see `notes`
    notes: tuple[str, ...]  # what else is needed, a sentence each without its full stop
    digest: str  # 64 hex digits over all settings, in canonical form


def reproduction_of(manifests: Sequence[Manifest]) -> Reproduction:
    """Return the command for the artifacts of one run, one of every stage."""
    sections, odd = _gather(manifests)
    digest = hashlib.sha256(canonical_json(sections)).hexdigest()
    notes = [f"{name} was set in more than one way among the artifacts" for name in odd]
    notes += [
        f"{manifest.stage} was taken over from elsewhere; nothing says how it came about"
        for manifest in manifests
        if "imported" in _config(manifest)
    ]
    wanted: Settings = {}
    try:
        wanted = dict(single_settings(RunConfig.from_tree(sections).tree()))
    except ConfigError as error:
        # One reason is enough: an imported artifact, for example, also has settings missing.
        notes = notes or [f"this version does not read the settings: {error}"]
    if notes:
        return Reproduction(command=None, notes=tuple(notes), digest=digest)
    words, changed = _nearest(wanted)
    sets = [shlex.join(["--set", f"{name}={_text(wanted[name])}"]) for name in changed]
    return Reproduction(
        command=" \\\n    ".join([shlex.join(["nanochat", "run", *words]), *sets]),
        notes=tuple(_needs(wanted)),
        digest=digest,
    )


def _gather(manifests: Sequence[Manifest]) -> tuple[dict[str, Tree], list[str]]:
    """Return all sections of the configuration, and the names of those that differ by stage."""
    sections: dict[str, Tree] = {}
    odd: dict[str, None] = {}
    for manifest in manifests:
        for name, tree in _config(manifest).items():
            if name in _SECTIONS and sections.setdefault(name, tree) != tree:
                odd[name] = None
    return sections, list(odd)


def _config(manifest: Manifest) -> dict[str, Tree]:
    return typing.cast("dict[str, Tree]", manifest.preimage["config"])


def _nearest(wanted: Settings) -> tuple[list[str], list[str]]:
    """Return the words of the profile nearest to `wanted`, and the settings that still differ."""
    # At equal distance the profile that needs no --depth wins.
    return min(_candidates(wanted), key=lambda found: (len(found[1]), len(found[0])))


def _candidates(wanted: Settings) -> Iterator[tuple[list[str], list[str]]]:
    depth = wanted["model.depth"]
    for name, make in PROFILES.items():
        try:
            run = make(depth).run
        except (ConfigError, ArithmeticError, ValueError):
            continue  # this profile has no model of this depth
        there = dict(single_settings(run.tree()))
        usual = inspect.signature(make).parameters["depth"].default
        words = [name] if depth == usual else [name, "--depth", str(depth)]
        yield words, [n for n in wanted if n != SNAPSHOT and wanted[n] != there[n]]


def _text(value: Tree) -> str:
    """Return a value as `--set` reads it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        value = [_with_path(item) if isinstance(item, dict) else item for item in value]
    return json.dumps(value, separators=(",", ":"))


def _with_path(item: dict[str, Tree]) -> Tree:
    """Return a dataset of the user's own with a placeholder path: only its sha256 is recorded."""
    return {**item, "path": FILE} if item.get("snapshot") is not None else item


def _needs(wanted: Settings) -> Iterator[str]:
    """Yield what the command needs besides itself: the text, and files of datasets."""
    snapshot = typing.cast("list[str]", wanted.get(SNAPSHOT) or [])
    match wanted["shards.source"]:
        case "pydocs":
            version = " ".join(snapshot).replace("python==", "Python ") or "the Python that runs it"
            yield f"trained on the docs of {version}; other versions give other data"
        case "local":
            yield f"the text is the folder as it was then: {' '.join(snapshot)}"
        case "s3":
            state = " ".join(snapshot)
            yield f"the text is s3://{wanted['shards.path']} as it was then: {state}"
        case "hub":
            yield f"the text is {wanted['shards.path']} of the Hub at {wanted['shards.revision']}"
        case _:
            pass
    for item in typing.cast("list[Any]", wanted["task_data.datasets"]):
        if item.get("snapshot") is not None:
            yield f"{FILE} of the dataset {item['name']} has sha256 {item['snapshot']}"
