"""Resolve the names that people use for artifacts, models and runs.

sft@tiny     the artifact of stage sft in the newest finished run called tiny that has one; of the
             unfinished runs if none has finished; also sft@<tag>, sft@<run id>
sft/1a2b3c   the artifact whose fingerprint begins so; at least four digits, and unambiguous
tiny         of a tag or of runs: rl@tiny if it exists, else sft@tiny, else midtrain@tiny
./some/dir   a model directory

Every name is checked before it becomes part of a key of the store.
"""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.publish import find_manifest
from flows.artifacts.revocations import check_not_revoked, find_revoked
from flows.artifacts.runs import (
    Run,
    check_name,
    find_run,
    known_names,
    newest_runs,
    runs_called,
    start_hint,
    tag_names,
)
from flows.artifacts.transfer import Watch, watch_nothing
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef, short
from flows.profiles import PROFILES, setting_types
from flows.render.text import listed
from flows.stages import CHAT_MODELS, MODELS, STAGES
from infra.near import suggest
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError, ModelError

STAGE_NAMES = [stage.name for stage in STAGES]
_BEST_FIRST = [stage.name for stage in reversed(CHAT_MODELS)]
_DIGITS = re.compile(r"[0-9a-f]{4,64}")
_MANIFEST = re.compile(r"[^/]+/([0-9a-f]{64})/manifest\.json")
_WHOLE = 64  # digits of a fingerprint
_SHOWN_CANDIDATES = 5
# What to do with a word that is of the first kind where the second is wanted.
_USES = {
    ("a setting", "profile"): "give it like --set {word}",
    ("a setting", "stage"): "give it like --set {word}",
    ("an artifact", "profile"): "a profile is one word, such as tiny",
    ("an artifact", "stage"): "its stage is {stage}",
    ("a profile", "tag"): "a tag has another name, such as main",
    ("a stage", "profile"): "the profile comes first: tiny {word}",
    ("a stage", "run"): "for the artifact of a run: {word}@tiny",
    ("a stage", "tag"): "for the artifact of a run: {word}@tiny",
    ("a profile", "run"): "run it: nanochat run {word}{others}",
    ("a run", "run"): "`nanochat ls {word}` shows what it has made",
    ("a tag", "run"): "`nanochat ls {word}` shows what it has made",
    ("a run", "tag"): "give it a tag: nanochat tag NAME {word}",
}


def is_artifact(name: str) -> bool:
    """Return whether `name` has the form of an artifact's: sft@tiny or sft/1a2b3c."""
    return "@" in name or "/" in name


def find_directory(name: str) -> Path | None:
    """Return the directory at path `name`. None means that `name` is not a path.

    Raises ModelError if it is a path, but not of a directory.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    # sft/1a2b3c looks like a path: a directory of that name wins, else it is an artifact.
    is_path = "/" in name and name.partition("/")[0] not in STAGE_NAMES
    if path.exists() or is_path or name.startswith(("~", ".")):
        what = "it is not a directory" if path.exists() else "there is no such directory"
        raise ModelError(
            f"{name} is not a model: {what}",
            hint="give a model directory, a profile (`tiny`), a stage of one (`sft@tiny`) or a "
            "fingerprint (`sft/1a2b3c`)",
        )
    return None


def open_artifact(store: Store, name: str) -> Manifest:
    """Return the artifact called `name`, revoked or not.

    Raises ArtifactError or ConfigError, with the names that exist, or the record that is damaged.
    """
    if "/" in name and "@" not in name:
        return _by_fingerprint(store, name)
    return _made_by(store, name)[1]


def open_run(store: Store, name: str) -> Run:
    """Return the run that `name` stands for: the newest finished one called so, else the newest.

    For sft@tiny it is the run in which the artifact is found, for sft/1a2b3c the one that built it.
    """
    if "@" in name:
        return _made_by(store, name)[0]
    if "/" in name:
        return _builder(store, _by_fingerprint(store, name))
    run = next(runs_called(store, name), None)
    if run is None:
        hint = hint_for(name, "run", store)
        raise ConfigError(f"there is no run '{name}' in {store.url}", hint=hint)
    return run


def open_newest_run(store: Store, name: str) -> Run:
    """Return the run that `name` stands for; of several called so the newest, finished or not."""
    run = open_run(store, name)
    # A tag, an id and an artifact stand for one run. A run is refused the name of a tag
    # (`flows.overrides.open_name`), and a tag that of a run.
    return next(newest_runs(store, name)) if run.name == name != run.run else run


def open_usable(store: Store, name: str, *, warn: Callable[[str], None]) -> Manifest:
    """Return the artifact called `name`. Raises ArtifactError if it was revoked.

    One that is named by its fingerprint is returned with a warning instead. Revoked artifacts that
    it was made from are warned of too.
    """
    manifest = open_artifact(store, name)
    # A person who types a fingerprint means these very bytes, perhaps to see what is wrong.
    if "/" in name and (revoked := find_revoked(store, manifest)):
        warn(str(revoked))
        return manifest
    for ancestor in check_not_revoked(store, manifest):
        warn(f"{manifest.name} was made from {ancestor}")
    return manifest


def open_model(
    store: Store,
    name: str,
    *,
    cache: Cache,
    warn: Callable[[str], None],
    watch: Watch = watch_nothing,
) -> Path:
    """Return a verified local directory with the model called `name`; else as `open_usable`.

    Files that are not cached are fetched, with their progress reported to `watch`. Raises
    ModelError if it is not a model.
    """
    if directory := find_directory(name):
        return directory
    manifest = open_usable(store, name, warn=warn)
    check_model(manifest, name)
    if manifest.architecture is not None:
        raise ModelError(
            f"{name} is a model of architecture {manifest.architecture!a}, which only transformers "
            "can run",
            hint="nanochat evals can evaluate it, with the questions of a profile: --profile d12",
        )
    total = sum(file.size for file in (*manifest.files, *manifest.logs))
    with watch(total) as on_bytes:
        return fetch(store, manifest, cache, on_bytes=on_bytes) / "files"


def check_model(manifest: Manifest, name: str) -> None:
    """Raise ModelError unless the artifact called `name` is a model."""
    models = [stage.name for stage in MODELS]
    if manifest.stage not in models:
        raise ModelError(
            f"{name} is not a model", hint=f"stages that make one: {', '.join(models)}"
        )


def check_stage(stage: str) -> str:
    """Return `stage` if a stage is called so. Raises ConfigError."""
    if stage not in STAGE_NAMES:
        raise ConfigError(f"there is no stage '{stage}'", hint=hint_for(stage, "stage"))
    return stage


def kind_of(word: str, store: Store | None = None) -> str | None:
    """Return what `word` names, such as "a stage"; None if nothing is called so.

    Without a store, tags and runs are not looked up. Raises ArtifactError for a damaged run.
    """
    if word in PROFILES:
        return "a profile"
    if word in STAGE_NAMES:
        return "a stage"
    if is_artifact(word) and re.split("[@/]", word)[0] in STAGE_NAMES:
        return "an artifact"
    if word.partition("=")[0].strip() in setting_types() and "=" in word:
        return "a setting"
    if store is None:
        return None
    if word in tag_names(store):  # also if its record is damaged
        return "a tag"
    with contextlib.suppress(ConfigError):  # it cannot be a name
        check_name(word)
        if find_run(store, word) or next(newest_runs(store, word), None):
            return "a run"
    return None


def hint_for(word: str, wanted: str, store: Store | None = None) -> str:
    """Return a hint for a word that names no `wanted`: what it names instead, else a near name.

    `wanted` is a profile, stage, run or tag. Without a store, tags and runs are not looked up.
    """
    names = {"tag": [], "run": [], "profile": [*PROFILES], "stage": STAGE_NAMES}
    if store is not None:
        # A run whose record was deleted is still known by its name.
        runs = [name for name in known_names(store) if (name, wanted) != (word, "run")]
        names |= {"tag": tag_names(store), "run": runs}
    known = names.pop(wanted)
    kind = kind_of(word, store)
    if use := _USES.get((kind or "", wanted)):
        experiments = [name for name in known if name.startswith(f"{word}-")]
        others = f"; with other settings it was run as {listed(experiments, _SHOWN_CANDIDATES)}"
        stage = re.split("[@/]", word)[0]
        hint = use.format(word=word, stage=stage, others=others if experiments else "")
    else:
        hint = suggest(word, known, *(() if kind else names.items()))
        if not hint and store is not None:  # there are always profiles and stages
            make = f"make it: nanochat tag {word} RUN"
            hint = make if wanted == "tag" else start_hint(store)
    return f"{word} is {kind}; {hint}" if kind else hint


def _made_by(store: Store, reference: str) -> tuple[Run, Manifest]:
    """Return the artifact STAGE@NAME and the latest run called NAME that has it.

    For NAME alone it is the furthest trained chat model of these runs.
    """
    stage, at, name = reference.partition("@")
    if not at:
        name = reference
    if at and name in STAGE_NAMES and stage not in STAGE_NAMES:
        raise ConfigError(
            f"'{reference}' does not name an artifact: the stage comes first",
            hint=f"did you mean '{name}@{stage}'?",
        )
    better = [check_stage(stage)] if at else _BEST_FIRST
    if at and not name:
        raise ConfigError(f"'{reference}' names no run", hint=f"for example {stage}@tiny")
    best: tuple[Run, ArtifactRef] | None = None
    for run in runs_called(store, name):
        # Only a model of a later stage replaces it: the runs come newest first.
        if ref := next(filter(None, map(run.find_ref, better)), None):
            best, better = (run, ref), better[: better.index(ref.stage)]
        if not better:
            break
    if best is not None:
        return best[0], _open_of(store, *best)
    if not at and name not in PROFILES:
        open_run(store, name)  # raises if nothing is called so
    what = f"there is no {reference}" if at else f"{name} has no chat model"
    raise ArtifactError(f"{what} in {store.url}", hint=hint_for(name, "run", store))


def _open_of(store: Store, run: Run, ref: ArtifactRef) -> Manifest:
    """Return an artifact that a run names. Raises ArtifactError if it is gone."""
    # Never another one instead: a user would take it for the model that the name stands for.
    if (manifest := find_manifest(store, ref)) is not None:
        return manifest
    raise ArtifactError(
        f"{ref.name} of run {run.run} is not in {store.url}: it was deleted",
        hint=f"build it again: `nanochat status {run.run}` shows how; or name another run",
    )


def _by_fingerprint(store: Store, reference: str) -> Manifest:
    stage, _, digits = reference.partition("/")
    check_stage(stage)
    if not _DIGITS.fullmatch(digits):
        raise ConfigError(
            f"{digits!a} is not the beginning of a fingerprint",
            hint="4 digits or more of 0-9 and a-f, as `nanochat ls` shows them: sft/1a2b3c",
        )
    found = _fingerprints(store, stage, digits)
    if len(found) > 1:
        raise ConfigError(
            f"{reference} is ambiguous: the fingerprints of {len(found)} artifacts begin so",
            hint=_candidates(stage, found),
        )
    manifest = find_manifest(store, ArtifactRef(stage, found[0])) if found else None
    if manifest is None:
        raise ArtifactError(
            f"there is no artifact {reference} in {store.url}",
            hint=f"`nanochat ls --stage {stage}` lists the artifacts that exist",
        )
    return manifest


def _fingerprints(store: Store, stage: str, digits: str) -> list[str]:
    """Return the fingerprints of a stage's artifacts that begin with these digits, sorted."""
    if len(digits) == _WHOLE:
        return [digits]
    # Not from the index, which may lack an artifact whose builder died, and grows with the store.
    # Four digits match the files of one artifact, seldom of two: one LIST request to S3.
    matches = (_MANIFEST.fullmatch(entry.key) for entry in store.list(f"{stage}/{digits}"))
    return sorted({match[1] for match in matches if match})


def _candidates(stage: str, fingerprints: list[str]) -> str:
    """Return a hint that lists a few artifacts."""
    names = [f"{stage}/{short(fingerprint)}" for fingerprint in fingerprints]
    return f"{listed(names, _SHOWN_CANDIDATES)}; `nanochat ls NAME` shows each"


def _builder(store: Store, manifest: Manifest) -> Run:
    """Return the run that built an artifact. Raises ArtifactError if its record lacks it."""
    run = find_run(store, manifest.provenance.run)
    if run is None or run.stages.get(manifest.stage) != manifest.fingerprint:
        raise ArtifactError(
            f"{manifest.name} was made by run {manifest.provenance.run}, whose record is gone from "
            f"{store.url} or lacks it",
            hint="name a run instead: `nanochat status` lists them",
        )
    return run
