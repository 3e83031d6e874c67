"""The name of an artifact, the keys of its objects in a store, and the name in a run's id."""

import re
from typing import NamedTuple

RUN_ID = re.compile(r"(.+)-(\d{8}t\d{6}z)-[0-9a-f]{4}")  # as `new_run_id` makes them


class ArtifactRef(NamedTuple):
    """An artifact, existing or not: the stage that makes it and its fingerprint."""

    stage: str
    fingerprint: str  # 64 hex digits

    @classmethod
    def parse(cls, text: str) -> "ArtifactRef":
        """Return the artifact that "stage/fingerprint", or a key below it, belongs to."""
        stage, _, rest = text.partition("/")
        return cls(stage, rest.partition("/")[0])

    @property
    def name(self) -> str:
        """Return its name as people see it: the stage and 12 digits."""
        return f"{self.stage}/{short(self.fingerprint)}"

    @property
    def prefix(self) -> str:
        """Return the prefix of all its objects, without the last '/'."""
        return f"{self.stage}/{self.fingerprint}"

    @property
    def manifest_key(self) -> str:
        """Return the key of its manifest: the artifact exists once this object does."""
        return f"{self.prefix}/manifest.json"

    @property
    def lease_key(self) -> str:
        """Return the key of the lease under which it is built."""
        return f"{self.prefix}/lease.json"

    @property
    def revocation_key(self) -> str:
        """Return the key of its revocation."""
        return f"{self.prefix}/revoked.json"

    @property
    def checkpoints_prefix(self) -> str:
        """Return the prefix of the checkpoints of its unfinished job, without the last '/'."""
        return f"{self.prefix}/checkpoints"

    @property
    def redo_key(self) -> str:
        """Return the key of a recipe's redo counter (flows/identity/redo.py)."""
        return f"{self.prefix}/redo.json"

    @property
    def divergences_prefix(self) -> str:
        """Return the prefix of the manifests of attempts that came second and differed."""
        return f"{self.prefix}/divergences"

    def checkpoint_prefix(self, step: int) -> str:
        """Return the prefix of its checkpoints of `step`, without the last '/'."""
        return f"{self.checkpoints_prefix}/step-{step:07d}"

    def files_prefix(self, attempt: str) -> str:
        """Return the prefix of the files that an attempt to publish uploads."""
        return f"{self.prefix}/files/{attempt}"

    def logs_prefix(self, attempt: str) -> str:
        """Return the prefix of the logs that an attempt to publish uploads."""
        return f"{self.prefix}/logs/{attempt}"


def name_in(run: str) -> str | None:
    """Return the name in a run's id. None means that a person chose the id."""
    match = RUN_ID.fullmatch(run)
    return match[1] if match else None


def stamp(time: str) -> str:
    """Return a time as it stands in keys: 20261121t055338z of 2026-11-21T05:53:38Z."""
    return "".join(character for character in time.lower() if character.isalnum())


def short(digest: str) -> str:
    """Return the first 12 digits, as people see a digest."""
    return digest[:12]
