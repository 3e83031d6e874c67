"""`nanochat fetch`: an artifact's files in a directory of your own."""

import hashlib
import shutil
import uuid
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.cache import fetch as fetch_artifact
from flows.commands.options import Place
from flows.commands.terminal import screen
from flows.fingerprint import short
from flows.manifest import Manifest
from flows.references import open_artifact
from nanochat_core.errors import ArtifactError, ConfigError


def fetch(
    reference: Annotated[
        str, Parameter(help="STAGE@PROFILE, or a profile for its newest chat model.")
    ],
    directory: Annotated[
        Path | None,
        Parameter(help="Where the files go; it must not exist yet. Default STAGE-FINGERPRINT."),
    ] = None,
    /,
    *,
    place: Place = Place(),  # noqa: B008 - frozen
) -> int:
    """Copy an artifact's files to a directory, every byte verified. Never overwrites."""
    store = place.open_store()
    manifest = open_artifact(store, reference)
    target = directory or Path(f"{manifest.stage}-{short(manifest.fingerprint)}")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists already", hint="name another directory")
    source = fetch_artifact(store, manifest, place.cache) / "files"
    copy_verified(source, target, manifest)
    size = sum(file.size for file in manifest.files)
    screen().print(f"{target}: {len(manifest.files)} files, {size:,} bytes, of {manifest.name}")
    return 0


def copy_verified(source: Path, target: Path, manifest: Manifest) -> None:
    """Copy the artifact's files so that `target` appears with all of them, checked, or not at all.

    Raises ArtifactError when the copy differs from the manifest.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}.new")
    try:
        for file in manifest.files:
            path = fresh / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / file.path, path)
            with path.open("rb") as copied:
                if hashlib.file_digest(copied, "sha256").hexdigest() != file.sha256:
                    raise ArtifactError(
                        f"{path} came out different from {manifest.name}",
                        hint="check that disk, then run the command again",
                    )
        fresh.rename(target)  # fails on a directory that is not empty
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
