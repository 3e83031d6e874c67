"""Publish artifacts and find them: files first, manifest last.

Fetching is in flows/artifacts/cache.py. Bytes of a large file that an earlier artifact of the stage
has are not stored again: an artifact of 170 shards names the 8 of the artifact before it by their
keys. A manifest that names files of an older artifact keeps them from being collected
(flows/gc/reach.py); until it is written a pin does. The keys:

{stage}/{fingerprint}/files/{attempt}/...   uploaded first, by each attempt under its own prefix
{stage}/{fingerprint}/logs/{attempt}/...
{stage}/{fingerprint}/manifest.json         last, if absent
{stage}/{fingerprint}/divergences/{digest}.json    manifest of one that was second and differed
index/{stage}/{created}-{fingerprint}       empty; lists artifacts for people, decides nothing
"""

import contextlib
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flows.artifacts.pins import pin
from flows.artifacts.transfer import files_below, transfer_each
from flows.identity.fingerprint import Identity
from flows.identity.manifest import File, Input, Manifest, Provenance, digest_of
from flows.identity.records import repair_hint, unless_damaged
from flows.identity.redo import find_redo
from flows.identity.ref import ArtifactRef, short, stamp
from infra.storage.base import ObjectNotFound, OnBytes, Retry, Store, call_once, ignore_bytes
from infra.storage.files import sha256_of
from nanochat_core.errors import ArtifactError, reason_of

MIN_SIZE = 1 << 20  # bytes; storing a smaller file costs no more than to look for it
LOOKED_AT = 4  # earlier artifacts, whose large files are not stored again
Shared: TypeAlias = dict[tuple[int, str], str]  # size and sha256 -> key of an object
_ENTRY = re.compile(r"index/([^/]+)/.*-([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class Published:
    """The result of an attempt to publish."""

    manifest: Manifest  # the one that counts: ours, or that of the first attempt
    adopted: bool  # another attempt was first
    divergence: str | None  # key of our manifest, when the adopted artifact has other contents


def find_manifest(store: Store, ref: ArtifactRef) -> Manifest | None:
    """Return the manifest of an artifact. None means that the store has answered: no such artifact.

    Raises StoreError if the store cannot be reached, ArtifactError if the record is damaged.
    """
    manifest = Manifest.find(store, ref.manifest_key)
    # Its own checks pass: a whole manifest under another key was copied or moved there.
    if manifest is not None and manifest.ref != ref:
        raise ArtifactError(
            f"{store.url}/{ref.manifest_key} is the manifest of {manifest.name}",
            hint=repair_hint("delete it and run the stage again"),
        )
    return manifest


def publish(
    store: Store,
    identity: Identity,
    output: Path,
    *,
    logs: Iterable[Path],
    inputs: Mapping[str, Manifest],
    provenance: Provenance,
    check_lease: Callable[[], None] = lambda: None,
    on_bytes: OnBytes = ignore_bytes,
    retry: Retry = call_once,
) -> Published:
    """Store the files in `output` as the artifact `identity`; `logs` are single files next to it.

    `check_lease` is called before the first upload and right before the manifest is written, and
    raises if this attempt has lost its lease (flows/leases/lease.py). If another attempt was first,
    its artifact is adopted.
    `retry` repeats each file's upload, and the commit with its check, while the store does not
    answer. Raises StoreError, and ArtifactError if `output` is empty, cannot be read, or holds
    something that is not a plain file.
    """
    # Random: an upload of another attempt, however late, writes to other keys.
    attempt = uuid.uuid4().hex[:12]
    ref = identity.ref
    retry(check_lease)
    with contextlib.ExitStack() as stack:
        with _reading_output(identity.stage):
            found = _files_of(identity.stage, output)
            sizes = [path.stat().st_size for path in found]
            # On the outer stack: the pin must hold until the manifest is written, which from then
            # on keeps the shared files from being collected.
            shared = retry(lambda: stack.enter_context(_sharing(store, identity, sizes)))

            def upload(path: Path, on_bytes: OnBytes) -> File:
                # Retried by file: an outage near the end must not repeat the whole upload.
                name = path.relative_to(output).as_posix()
                key = f"{ref.files_prefix(attempt)}/{name}"
                return retry(lambda: _upload(store, shared, path, name, key, on_bytes))

            def upload_log(path: Path) -> File:
                key = f"{ref.logs_prefix(attempt)}/{path.name}"
                return retry(lambda: _upload(store, {}, path, path.name, key, on_bytes))

            files = tuple(transfer_each(upload, found, on_bytes=on_bytes))
            kept = tuple(map(upload_log, logs))
        digest = digest_of(files)
        manifest = Manifest(
            stage=identity.stage,
            fingerprint=identity.fingerprint,
            preimage=identity.preimage,
            files=files,
            logs=kept,
            digest=digest,
            inputs={
                n: Input(fingerprint=m.fingerprint, digest=m.digest) for n, m in inputs.items()
            },
            provenance=provenance,
            divergences=tuple(retry(lambda: _other_contents(store, identity, digest))),
        )
        return commit(store, manifest, check_lease=check_lease, retry=retry)


def commit(
    store: Store,
    manifest: Manifest,
    *,
    check_lease: Callable[[], None] = lambda: None,
    retry: Retry = call_once,
) -> Published:
    """Write the manifest of files that the store has: from then on the artifact exists.

    If another attempt was first, its artifact is adopted. The other arguments as for `publish`;
    without a lease put-if-absent alone lets one of several writers win.
    """
    # Read it as others will: a manifest that readers refuse would block its key.
    data = manifest.to_json()
    Manifest.from_json(data, where=f"the new manifest of {manifest.name}")

    def put() -> bool:
        check_lease()  # last: in the gap before the write, the store's condition alone decides
        return store.put_if_absent(manifest.ref.manifest_key, data)

    if not retry(put) and (other := retry(lambda: _adopt(store, manifest, data))):
        return other
    # After the manifest: the index decides nothing, and may lack an artifact after a crash.
    retry(lambda: _add_to_index(store, manifest))
    return Published(manifest=manifest, adopted=False, divergence=None)


def _adopt(store: Store, ours: Manifest, data: bytes) -> Published | None:
    """Return the artifact that was first, None if it is ours; record `data` if contents differ."""
    winner = find_manifest(store, ours.ref)
    if winner is None:
        raise ArtifactError(
            f"the manifest of {ours.name} was removed while it was being published",
            hint="run the same command again",
        )
    if winner.to_json() == data:  # the store lost the answer to our own write
        return None
    divergence = None
    if winner.digest != ours.digest:
        divergence = f"{ours.ref.divergences_prefix}/{short(ours.digest)}.json"
        store.put(divergence, data)
    return Published(manifest=winner, adopted=True, divergence=divergence)


def newest_manifests(store: Store, stage: str, count: int) -> Iterator[Manifest]:
    """Return the last `count` artifacts of a stage, newest first, read lazily.

    Those of them that are gone or damaged are left out.
    """
    names = read_index(store, stage).get(stage, [])[:count]
    return filter(None, (find_whole(store, ArtifactRef(stage, name)) for name in names))


def read_index(store: Store, stage: str | None = None) -> dict[str, list[str]]:
    """Return the fingerprints of each stage, or of one, the newest first, by a single LIST."""
    # Keys are listed in ascending order and begin with the time of creation.
    keys = [entry.key for entry in store.list(f"index/{stage}/" if stage else "index/")]
    found: dict[str, dict[str, None]] = {}
    for match in filter(None, map(_ENTRY.fullmatch, reversed(keys))):
        found.setdefault(match[1], {})[match[2]] = None
    return {name: list(fingerprints) for name, fingerprints in found.items()}


def find_whole(store: Store, ref: ArtifactRef) -> Manifest | None:
    """Return an artifact. None also means that its manifest is damaged."""
    return unless_damaged(lambda: find_manifest(store, ref))


def _files_of(stage: str, output: Path) -> list[Path]:
    found = list(files_below(output)) if output.is_dir() else []
    if not found:
        raise ArtifactError(
            f"{stage} left no files in {output}", hint="a job has to write one file at least"
        )
    for path in found:
        # The target of a link would not be uploaded.
        if path.is_symlink() or not path.is_file():
            raise ArtifactError(
                f"{stage} left {path}, which is not a plain file", hint="artifacts hold files only"
            )
    return sorted(found, key=lambda path: path.relative_to(output).as_posix())


@contextlib.contextmanager
def _reading_output(stage: str) -> Generator[None]:
    """Convert an OSError of the block to an ArtifactError. A store raises errors of its own."""
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ArtifactError(
            f"what {stage} made cannot be read: {reason_of(error)}{where}",
            hint="check the disk that NANOCHAT_HOME is on, then run the same command again",
        ) from error


def _upload(
    store: Store, shared: Shared, path: Path, name: str, key: str, on_bytes: OnBytes
) -> File:
    """Upload a file to `key`, unless an object in `shared` has its bytes; return its record."""
    size, sha256, content = path.stat().st_size, sha256_of(path), _content_of(path)
    found = _find_shared(store, shared, size=size, sha256=sha256)
    if found is None:
        store.upload(key, path, on_bytes=on_bytes)
    else:
        on_bytes(size)  # no transfer, but progress is counted in bytes of the whole artifact
    return File(path=name, size=size, sha256=sha256, key=found or key, content=content)


def _content_of(path: Path) -> str | None:
    """Return the digest of the documents in a parquet file of text; None for any other file.

    Its bytes depend on the version of the library that wrote them.
    """
    if path.suffix != ".parquet":
        return None
    # Imported here: only artifacts with parquet files pay for pyarrow, which takes long to load.
    from nanochat_core.data.shard_files import find_text_digest

    return find_text_digest(path)


def _other_contents(store: Store, identity: Identity, digest: str) -> list[str]:
    """Return the key of the recipe's artifact before this one, if it has other contents."""
    if identity.redo == 0:
        return []
    number = min(find_redo(store, identity.redone(0).ref).before, identity.redo - 1)
    before = find_whole(store, identity.redone(number).ref)
    return [] if before is None or before.digest == digest else [before.ref.manifest_key]


def _add_to_index(store: Store, manifest: Manifest) -> None:
    """Add an artifact to the index under the time at which it was made or accepted."""
    when = manifest.accepted["when"] if manifest.accepted else manifest.provenance.created
    store.put(f"index/{manifest.stage}/{stamp(when)}-{manifest.fingerprint}", b"")


# Sharing of large files.


@contextlib.contextmanager
def _sharing(store: Store, identity: Identity, sizes: Iterable[int]) -> Generator[Shared]:
    """Yield objects of earlier artifacts with one of these `sizes`, pinned while the block runs.

    Yields none while garbage is collected.
    """
    large = {size for size in sizes if size >= MIN_SIZE}
    shared: Shared = {}
    # One that was asked for again has files of its own: the store's may be damaged.
    if large and not identity.redo:
        for manifest in newest_manifests(store, identity.stage, LOOKED_AT):
            for file in manifest.files:
                if file.size in large:
                    shared.setdefault((file.size, file.sha256), file.key)
    with contextlib.ExitStack() as stack:
        if shared:
            places = {ArtifactRef.parse(key) for key in shared.values()}
            why = f"publishing {identity.ref.name}"
            # A collection under way may be about to delete them; to upload is quicker than to wait.
            try:
                pinned = pin(store, sorted(places), why=why, log=lambda _: None, pause=_do_not_wait)
                stack.enter_context(pinned)
            except _Collecting:
                shared = {}
        yield shared


def _find_shared(store: Store, shared: Shared, *, size: int, sha256: str) -> str | None:
    """Return the key of an object with these bytes. None means no such object, or one cut short."""
    key = shared.get((size, sha256))
    if key is None:
        return None
    try:
        return key if store.head(key).size == size else None
    except ObjectNotFound:
        return None


class _Collecting(Exception):
    """Garbage is being collected. Caught in `_sharing`."""


def _do_not_wait(seconds: float) -> None:
    raise _Collecting
