"""Download an artifact's files to a person's own directory: verified, resumable, never overwriting.

A directory that does not exist yet appears with all files at once. One that exists gets the files
it lacks, each in one step.
"""

import contextlib
import os
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path

from flows.artifacts.transfer import (
    Place,
    Watch,
    fetch_verified,
    files_below,
    find_missing,
    watch_nothing,
)
from flows.identity.manifest import File, Manifest
from flows.render.text import listed
from infra.storage.base import Store
from infra.storage.files import try_flock, writing
from nanochat_core.errors import ArtifactError, ConfigError

_SCRATCH = ".nanochat-fetch"  # inside an existing directory: it may be a mount point
_SHOWN = 12  # names in an error
_OF_TRAINING = "optimizer.safetensors"  # a chat model answers without it


def choose_files(
    manifest: Manifest, path: str | None, *, model_only: bool = False
) -> tuple[File, ...]:
    """Return the files of an artifact at `path`, a file or a folder in it. None means all.

    `model_only` leaves out the state of the optimizer. Raises ArtifactError, which lists what
    exists, if there are none.
    """
    files = tuple(f for f in manifest.files if not (model_only and f.path == _OF_TRAINING))
    if path is None:
        return files
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    chosen = tuple(f for f in files if tuple(f.path.split("/"))[: len(parts)] == parts)
    if chosen:
        return chosen
    # The first part of each path; a folder ends in '/'.
    names = list(dict.fromkeys("".join(file.path.partition("/")[:2]) for file in files))
    raise ArtifactError(
        f"there is no '{path}' in {manifest.name}",
        hint=f"in it: {listed(names, _SHOWN)}",
    )


def copy_files(
    store: Store,
    manifest: Manifest,
    files: Sequence[File],
    target: Path,
    *,
    watch: Watch = watch_nothing,
) -> list[File]:
    """Download these files of an artifact to `target`, under the names they have in it.

    Returns those that were fetched; the others were there, and are whole. `watch` gets the number
    of bytes to come. Raises ConfigError if a file of the person's is in the way, ArtifactError if
    the store's own bytes are damaged or gone.
    """
    if os.path.lexists(target) and not target.is_dir():
        raise ConfigError(f"{target} exists already", hint="name another directory")
    target = target.resolve()
    exists = target.is_dir()
    missing = find_missing([(file, target / file.path) for file in files])
    if exists:  # before any transfer: a refusal must not cost a download
        _check_free(manifest, missing, target)
    if missing:
        with _scratch_of(target) as scratch:
            if not exists:
                missing = _unfinished(files, scratch / "whole")
            with watch(sum(file.size for file, _ in missing)) as on_bytes:
                fetch_verified(
                    store,
                    manifest,
                    missing,
                    scratch=scratch / "parts",
                    private=True,
                    on_bytes=on_bytes,
                )
            if not exists:
                (scratch / "whole").rename(target)
    return [file for file, _ in missing]


def _unfinished(files: Sequence[File], directory: Path) -> list[Place]:
    """Return the files that an interrupted download lacks; remove files that are not part of it."""
    places = [(file, directory / file.path) for file in files]
    if directory.is_dir():
        for stranger in set(files_below(directory)) - {path for _, path in places}:
            stranger.unlink()
    return find_missing(places)


def _check_free(manifest: Manifest, missing: Sequence[Place], target: Path) -> None:
    """Raise ConfigError if a file would overwrite a person's file or be led astray by a link."""
    for file, path in missing:
        if os.path.lexists(path):
            raise ConfigError(
                f"{path} exists already and differs from {manifest.name}",
                hint="name another directory with --to, or move that file away",
            )
        folder = path.parent
        while folder != target:
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                raise ConfigError(
                    f"{folder} is not a directory of its own, so {file.path} cannot go there",
                    hint="name another directory with --to",
                )
            folder = folder.parent


@contextlib.contextmanager
def _scratch_of(target: Path) -> Generator[Path]:
    """Yield the scratch directory of a download to `target`, locked for this process alone.

    After an error its contents stay, and the next download resumes from them.
    """
    if not target.name:
        raise ConfigError(f"{target} cannot be a copy's directory", hint="name one with --to")
    # Next to the target, so on the same disk: the final rename is one step.
    sibling = target.with_name(f".{target.name}.new")
    scratch = target / _SCRATCH if target.is_dir() else sibling
    with writing(target, ConfigError, hint="name another directory with --to"):
        scratch.mkdir(parents=True, exist_ok=True)
        # The lock is on the directory itself, so no lock file appears in a person's directory.
        descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not try_flock(descriptor):
            raise ConfigError(
                f"another process is fetching into {target}", hint="wait until it has ended"
            )
        yield scratch
        shutil.rmtree(scratch)  # not in `finally`: after an error it is resumed
    finally:
        os.close(descriptor)
