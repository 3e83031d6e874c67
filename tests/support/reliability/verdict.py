"""What a reader finds of an artifact in a store: nothing, all of it, or a part.

Decided by the store's objects alone, without the code that fetches: every file that the manifest
names is read and hashed here.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

from flows.identity.manifest import Manifest
from infra.storage.base import ObjectNotFound, Store
from nanochat_core.errors import ArtifactError


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is there."""

    state: Literal["none", "whole", "torn"]
    digest: str | None = None  # of the artifact's files, by its manifest
    why: str = ""


def find_artifact(store: Store, stage: str, fingerprint: str) -> Verdict:
    """An artifact is torn when it can be seen and is not all there."""
    key = f"{stage}/{fingerprint}/manifest.json"
    try:
        data = store.get(key)
    except ObjectNotFound:
        return Verdict(state="none")
    try:
        manifest = Manifest.from_json(data, where=key)
    except ArtifactError as error:
        return Verdict(state="torn", why=str(error))
    for file in (*manifest.files, *manifest.logs):
        try:
            content = store.get(file.key)
        except ObjectNotFound:
            return Verdict(state="torn", why=f"{file.key} is gone")
        if (len(content), hashlib.sha256(content).hexdigest()) != (file.size, file.sha256):
            return Verdict(state="torn", why=f"{file.key} has other bytes")
    return Verdict(state="whole", digest=manifest.digest)
