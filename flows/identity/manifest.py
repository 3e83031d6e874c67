"""The manifest, the record of an artifact: its pre-image, inputs, files and provenance.

An artifact exists once its manifest does. A manifest is checked on reading: a digest that does not
follow from its parts, or a path that would leave its directory, is refused.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NotRequired, Self, TypeAlias, TypedDict, TypeVar

from flows.identity.fingerprint import Code, Identity, fingerprint_of, identify
from flows.identity.record_types import Count, Digest, Key, Name, Time, find_record, read_record
from flows.identity.records import decode_record, encode_record, repair_hint
from flows.identity.ref import ArtifactRef
from flows.identity.work import Work
from flows.stages import Stage
from infra.storage.base import Store
from nanochat_core.config import RunConfig
from nanochat_core.errors import ArtifactError
from nanochat_core.section import Tree

FORMAT = 4
EVENTS = "events.jsonl"  # the log with a job's steps and evaluations
Facts: TypeAlias = dict[str, Any]  # plain JSON values: numbers, short strings, lists, groups
_M = TypeVar("_M", bound="Manifest")
_ABOUT = {"what": "a manifest", "mend": "delete it and run the stage again"}  # in errors


def _no_processes(value: int) -> str | None:
    return None if value > 0 else "1 or more"


class Segment(TypedDict, total=False):
    """The fields that are read of one execution of a job."""

    started: float
    ended: float
    first_step: int
    last_step: int
    dollars: float
    processes: Annotated[int, _no_processes]
    threads: int
    device_batch_size: int
    device: str
    host: str
    torch: str


# The fields that are read of an acceptance. In this form because `from` is a Python keyword.
Accepted = TypedDict(
    "Accepted",
    {
        "from": Digest,
        "earlier": tuple[Digest, ...],
        "code": dict[str, str],
        "why": str,
        "when": str,
        "who": str,
        "proof": Facts | None,
    },
)


class Preimage(TypedDict):
    """The fields that are read of a pre-image."""

    stage: str
    format: int
    config: dict[str, Tree]
    inputs: dict[str, str]
    code: dict[str, str]
    redo: NotRequired[Count]


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of an artifact."""

    path: Key  # inside the artifact, with '/'
    size: Count  # bytes
    sha256: str
    key: Key  # of the object that holds the bytes; may belong to an older artifact
    # Digest of the contents, where another version of the writer may encode the same contents as
    # other bytes, as parquet does. None means that the bytes count.
    content: str | None = None


@dataclass(frozen=True, kw_only=True)
class Input:
    """An artifact that this one was made from."""

    fingerprint: Digest
    digest: str


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The history of an artifact: recorded, and never part of its fingerprint."""

    run: str  # the run that built it
    owner: str  # of the lease it was built under
    epoch: int  # fencing token of that lease, by its name in stored records
    created: Time  # UTC, 2026-11-21T05:53:38Z
    git_commit: str | None
    metrics: Facts  # the stage's own measurements of its result
    # Of the packages that the job loaded, its compiler and its runner, in its last execution.
    versions: dict[str, str] = field(default_factory=dict[str, str])
    # One group per execution: first_step, last_step, started and ended (unix seconds), host,
    # device ("cpu" or "cuda"), processes, device_batch_size, torch, ...
    segments: tuple[Annotated[Facts, Segment], ...]
    work: Work | None = None  # None: not known, as of an imported artifact

    @property
    def seconds(self) -> float:
        """Return the seconds of work of all executions of the job, stopped ones included."""
        return math.fsum(s.get("ended", 0.0) - s.get("started", 0.0) for s in self.segments)

    @property
    def dollars(self) -> float:
        """Return the price of these executions; 0 where no price was given."""
        return math.fsum(s.get("dollars", 0.0) for s in self.segments)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record of one artifact."""

    stage: Name
    fingerprint: Digest
    preimage: Annotated[dict[str, Tree], Preimage]  # everything the fingerprint was computed from
    files: tuple[File, ...]  # in order of path
    logs: tuple[File, ...]  # of the job; not part of the digest
    digest: str  # of the files' paths, sizes and contents
    inputs: dict[Name, Input]  # stage -> artifact
    provenance: Provenance
    divergences: tuple[str, ...]  # keys of manifests of this recipe with other contents
    # Of an artifact that a person accepted from another fingerprint (flows/plan/accept.py): from
    # (fingerprint), earlier (those that one was accepted from), code (that made the files, as in a
    # pre-image), why, when, who, and proof (what was compared; None: nothing).
    accepted: Annotated[Facts | None, Accepted] = None

    @property
    def ref(self) -> ArtifactRef:
        """Return the artifact that it is the record of."""
        return ArtifactRef(self.stage, self.fingerprint)

    @property
    def identity(self) -> Identity:
        """Return the identity that it was built for."""
        return Identity(stage=self.stage, fingerprint=self.fingerprint, preimage=self.preimage)

    @property
    def input_refs(self) -> tuple[ArtifactRef, ...]:
        """Return the artifacts that it was made from."""
        return tuple(
            ArtifactRef(stage, source.fingerprint) for stage, source in self.inputs.items()
        )

    @property
    def name(self) -> str:
        """Return its name as people see it: stage/fingerprint, shortened."""
        return self.ref.name

    @property
    def architecture(self) -> str | None:
        """The architecture of an imported model that only transformers can run; None for others."""
        return self.provenance.metrics.get("architecture")

    def to_json(self) -> bytes:
        """Return the manifest as the bytes of an object."""
        return encode_record(asdict(self), format=FORMAT)

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Self:
        """Return the manifest in `data`, named `where` in errors. Raises ArtifactError."""
        tree = decode_record(data, format=FORMAT, where=where)
        return _checked(read_record(cls, tree, where=where, **_ABOUT), where)

    @classmethod
    def find(cls, store: Store, key: str) -> Self | None:
        """Return the manifest at `key`; None and errors as of `find_record`."""
        found = find_record(store, key, cls, format=FORMAT, **_ABOUT)
        return found and _checked(found, f"{store.url}/{key}")


def digest_of(files: Iterable[File]) -> str:
    """Return the content digest: 64 hex digits over the files in order of path.

    A file counts by (path, content) if it has a content digest, else by (path, size, sha256).
    """
    # Without the keys: a copy in another store, or with shared files, is the same content.
    rows: list[Tree] = [
        [f.path, f.size, f.sha256] if f.content is None else [f.path, f.content]
        for f in sorted(files, key=lambda f: f.path)
    ]
    return fingerprint_of({"files": rows})


def identify_from(
    stage: Stage, run: RunConfig, inputs: Mapping[str, Manifest], *, code: Code
) -> Identity:
    """Return the identity of `stage` in `run`, made from these artifacts."""
    digests = {source.name: inputs[source.name].digest for source in stage.inputs}
    records = {n: record_digest(inputs[n]) for n in digests} if stage.reads_records else None
    return identify(stage, run, digests, code=code, records=records)


def record_digest(manifest: Manifest) -> str:
    """Return 64 hex digits over all that the report reads of an artifact besides its files.

    Owner, time of creation and most versions are not shown there and do not count.
    """
    made = manifest.provenance
    return fingerprint_of(
        {
            "fingerprint": manifest.fingerprint,  # stands for its pre-image and its inputs
            "files": [[file.path, file.size] for file in manifest.files],
            "run": made.run,
            "processor": made.versions.get("processor"),
            "git_commit": made.git_commit,
            "metrics": made.metrics,
            "segments": list(made.segments),
            "logs": [[log.path, log.sha256] for log in manifest.logs if log.path == EVENTS],
        }
    )


def _checked(manifest: _M, where: str) -> _M:
    """Return a manifest. Raises ArtifactError unless its parts agree with each other."""
    # The checksum of a record shows damage. This shows a record that some program wrote wrongly.
    wrong = None
    if fingerprint_of(manifest.preimage) != manifest.fingerprint:
        wrong = "its fingerprint does not follow from its pre-image"
    elif manifest.preimage.get("stage") != manifest.stage:
        wrong = f"its pre-image is of stage {manifest.preimage.get('stage')}"
    elif digest_of(manifest.files) != manifest.digest:
        wrong = "its digest does not follow from its files"
    elif not manifest.files:
        wrong = "it has no files"
    elif manifest.preimage.get("inputs") != {n: i.digest for n, i in manifest.inputs.items()}:
        wrong = "its inputs are not those of its pre-image"
    elif any(len({f.path for f in fs}) < len(fs) for fs in (manifest.files, manifest.logs)):
        wrong = "two of its files have one path"
    if wrong is not None:
        raise ArtifactError(
            f"{where} is not to be trusted: {wrong}",
            hint=repair_hint(_ABOUT["mend"]),
        )
    return manifest
