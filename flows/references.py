"""What a person calls an artifact or a model, and where it lies on this machine.

tiny         rl@tiny if there is one, else sft@tiny, else midtrain@tiny
sft@tiny     what stage sft made in the latest run called tiny
./some/dir   a model directory
"""

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from flows.artifacts import fetch, find_manifest
from flows.manifest import Manifest
from flows.profiles import PROFILES
from flows.runs import Run, find_run, newest_runs, resolve
from flows.stages import MIDTRAIN, PRETRAIN, RL, SFT, STAGES
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError, ModelError

CHAT_MODELS = (RL.name, SFT.name, MIDTRAIN.name)  # best first
MODELS = (*CHAT_MODELS, PRETRAIN.name)


def find_directory(name: str) -> Path | None:
    """The directory that `name` is the path of, or None when it is no path.

    Raises ModelError for a path to nothing.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.exists() or "/" in name or name.startswith(("~", ".")):
        what = "it is not a directory" if path.exists() else "there is no such directory"
        raise ModelError(
            f"{name} is not a model: {what}",
            hint="give a model directory, a profile (`tiny`) or a stage of one (`sft@tiny`)",
        )
    return None


def open_artifact(store: Store, name: str) -> Manifest:
    """The artifact called `name`. Raises ArtifactError or ConfigError, saying what there is."""
    stage, at, run = name.partition("@")
    if not at:
        return _newest_chat_model(store, name)
    if stage not in (known := [s.name for s in STAGES]):
        raise ConfigError(f"there is no stage '{stage}'", hint=suggest(stage, known))
    if not run:
        raise ConfigError(f"'{name}' names no run", hint=f"for example {stage}@tiny")
    return resolve(store, name)


def open_model(store: Store, name: str, *, cache: Path) -> Path:
    """A verified local directory with the model called `name`. Raises ModelError if it is none."""
    if directory := find_directory(name):
        return directory
    manifest = open_artifact(store, name)
    if manifest.stage not in MODELS:
        raise ModelError(
            f"{name} is not a model", hint=f"stages that make one: {', '.join(MODELS)}"
        )
    return fetch(store, manifest, cache) / "files"


def suggest(word: str, known: list[str]) -> str:
    """A hint: the closest of `known`, or all of them."""
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"one of: {', '.join(known)}"


def all_runs(store: Store) -> list[Run]:
    """Every run of the store, the latest started first."""
    keys = [entry.key for entry in store.list("runs/")]
    found = [find_run(store, k.removeprefix("runs/").removesuffix(".json")) for k in keys]
    return sorted(filter(None, found), key=lambda run: run.started, reverse=True)


def runs_called(store: Store, name: str) -> Iterator[Run]:
    """The run whose id is `name`, or every run called so, latest first."""
    if run := find_run(store, name):
        yield run
    else:
        yield from newest_runs(store, name)


def _newest_chat_model(store: Store, name: str) -> Manifest:
    runs = list(runs_called(store, name))
    for stage in CHAT_MODELS:
        for run in runs:
            if stage in run.stages and (m := find_manifest(store, stage, run.stages[stage])):
                return m
    if name in PROFILES:
        what = "no run of it has made one yet" if runs else "it was never run"
        raise ArtifactError(
            f"{name} has no chat model in {store.url}: {what}", hint=f"nanochat run {name}"
        )
    known = sorted({*PROFILES, *(run.name for run in all_runs(store))})
    raise ConfigError(f"there is no profile, run or model '{name}'", hint=suggest(name, known))
