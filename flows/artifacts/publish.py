"""Publishing artifacts and finding them: bytes first, manifest last.

Fetching is in flows/artifacts/cache.py, what artifacts share in flows/artifacts/shared_files.py.
The keys:

{stage}/{fingerprint}/files/{attempt}/...   uploaded first, by each attempt in its own place
{stage}/{fingerprint}/logs/{attempt}/...
{stage}/{fingerprint}/manifest.json         put-if-absent, last: from then on the artifact exists
{stage}/{fingerprint}/divergences/{attempt}.json   manifest of one that came too late and differed
{stage}/{fingerprint}/superseded/{digest}.json     manifest of one that was built again on purpose
index/{stage}/{created}-{fingerprint}       empty; lists artifacts for people, decides nothing
"""

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from flows.artifacts.shared_files import LOOKED_AT, Shared, find_shared, sharing
from flows.artifacts.transfer import transfer_each
from flows.identity.contents import content_of
from flows.identity.fingerprint import Identity, short
from flows.identity.manifest import EARLIER, FORMAT, File, Input, Manifest, Provenance, digest_of
from flows.identity.records import encode_record, find_document, find_stored, repair_hint
from infra.storage.base import OnBytes, Persist, Store, VersionedObject, call_once, ignore_bytes
from infra.storage.files import sha256_of
from nanochat_core.errors import ArtifactError

_ENTRY = re.compile(r"index/([^/]+)/.*-([0-9a-f]{64})")
_PUT_ASIDE = "superseded"  # in a manifest's place: the digest of the one that was put aside


@dataclass(frozen=True, kw_only=True)
class Published:
    """What became of an attempt to publish."""

    manifest: Manifest  # the one that counts: ours, or that of whoever was first
    adopted: bool  # somebody was first
    divergence: str | None  # key of our manifest, when the adopted artifact has other contents


def find_manifest(store: Store, stage: str, fingerprint: str) -> Manifest | None:
    """The artifact, or None only when the store says there is none.

    Raises StoreError when the store cannot be asked, ArtifactError when its answer is damaged.
    """
    key = _manifest_key(stage, fingerprint)
    tree = find_document(store, key, format=FORMAT, earlier=EARLIER)
    if tree is None or _PUT_ASIDE in tree:
        return None
    manifest = Manifest.from_tree(tree, where=f"{store.url}/{key}")
    if (manifest.stage, manifest.fingerprint) != (stage, fingerprint):
        raise ArtifactError(
            f"{store.url}/{key} is the manifest of {manifest.name}",
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
    fence: Callable[[], None],
    on_bytes: OnBytes = ignore_bytes,
    persist: Persist = call_once,
) -> Published:
    """Store the files under `output` as the artifact `identity`; `logs` are single files beside it.

    `fence` is called last, right before the manifest is written, and raises if this attempt has
    lost its right to (see flows/leases/lease.py). Whoever finds that another attempt was first
    adopts its artifact. `persist` repeats each file's upload, and the commit with its fence, while
    the store does not answer. Raises ArtifactError when `output` holds nothing, or something that
    no artifact can hold, or cannot be read, and StoreError.
    """
    attempt = uuid.uuid4().hex[:12]
    place = f"{identity.stage}/{identity.fingerprint}"
    with contextlib.ExitStack() as stack:
        with _reading_output(identity.stage):
            found = _files_of(identity.stage, output)
            sizes = [path.stat().st_size for path in found]

            def share() -> Shared:
                earlier = newest_manifests(store, identity.stage, LOOKED_AT)
                return stack.enter_context(sharing(store, identity, sizes, earlier))

            upload = partial(_upload, store, on_bytes=on_bytes, persist=persist)
            shared = persist(share)
            files = upload(f"{place}/files/{attempt}", output, found, shared)
            kept = [upload(f"{place}/logs/{attempt}", x.parent, [x], {}) for x in logs]
        digest = digest_of(files)
        manifest = Manifest(
            stage=identity.stage,
            fingerprint=identity.fingerprint,
            preimage=identity.preimage,
            files=files,
            logs=tuple(file for uploaded in kept for file in uploaded),
            digest=digest,
            inputs={
                n: Input(fingerprint=m.fingerprint, digest=m.digest) for n, m in inputs.items()
            },
            provenance=provenance,
            divergences=tuple(persist(lambda: _other_contents(store, place, digest))),
        )
        return commit(store, manifest, attempt=attempt, fence=fence, persist=persist)


def commit(
    store: Store,
    manifest: Manifest,
    *,
    attempt: str,
    fence: Callable[[], None],
    persist: Persist = call_once,
) -> Published:
    """Write the manifest of files that the store has: from then on the artifact exists.

    If another attempt was first, its artifact is adopted. `fence` and `persist` as for `publish`.
    """
    data = manifest.to_json()
    Manifest.from_json(data, where=f"the new manifest of {manifest.name}")
    key = _manifest_key(manifest.stage, manifest.fingerprint)
    found = persist(lambda: find_stored(store, key, format=FORMAT, earlier=EARLIER))
    if persist(lambda: _put_manifest(store, key, data, found, fence)):
        persist(lambda: _add_to_index(store, manifest))
        return Published(manifest=manifest, adopted=False, divergence=None)
    return persist(lambda: _adopt(store, manifest, attempt))


def _adopt(store: Store, ours: Manifest, attempt: str) -> Published:
    winner = find_manifest(store, ours.stage, ours.fingerprint)
    if winner is None:
        raise ArtifactError(
            f"the manifest of {ours.name} was removed while it was being published",
            hint="run the same command again",
        )
    if winner.to_json() == ours.to_json():  # the store lost the answer to our own write
        _add_to_index(store, ours)
        return Published(manifest=ours, adopted=False, divergence=None)
    divergence = None
    if winner.digest != ours.digest:
        divergence = f"{ours.stage}/{ours.fingerprint}/divergences/{attempt}.json"
        store.put(divergence, ours.to_json())
    return Published(manifest=winner, adopted=True, divergence=divergence)


def supersede(store: Store, manifest: Manifest, *, fence: Callable[[], None]) -> None:
    """Put this artifact aside so that its stage is built again; its files and manifest are kept.

    A note takes the manifest's place, and the next manifest the note's, each only if nothing was
    written since it was read. What a network or a stopped process brings long after is void so,
    where a late removal would take away the next artifact. `fence` as for `publish`. Safe to repeat
    after a crash; nothing happens when it is put aside already. Raises ArtifactError when another
    manifest stands there.
    """
    key = _manifest_key(manifest.stage, manifest.fingerprint)
    found = find_stored(store, key, format=FORMAT, earlier=EARLIER)
    if found is None or _PUT_ASIDE in found[0]:
        return
    tree, stored = found
    fence()
    if Manifest.from_tree(tree, where=f"{store.url}/{key}") == manifest:
        store.put(f"{key.rpartition('/')[0]}/superseded/{short(manifest.digest)}.json", stored.data)
        note = {_PUT_ASIDE: manifest.digest, "by": uuid.uuid4().hex}  # like no note before
        if store.put_if_same(key, encode_record(note, format=FORMAT), version=stored.version):
            return
    raise ArtifactError(
        f"the manifest of {manifest.name} was replaced while it was being put aside",
        hint="run the same command again",
    )


def _manifest_key(stage: str, fingerprint: str) -> str:
    return f"{stage}/{fingerprint}/manifest.json"


def _put_manifest(
    store: Store,
    key: str,
    data: bytes,
    found: tuple[dict[str, Any], VersionedObject] | None,
    fence: Callable[[], None],
) -> bool:
    """Write a manifest where none is, or the note of one that was put aside; whether it was.

    Which of the two was `found` before the write, and not again when it is repeated because its
    answer was lost: that must not bring back what was put aside meanwhile.
    """
    fence()
    if found is None:
        return store.put_if_absent(key, data)
    tree, stored = found
    return _PUT_ASIDE in tree and store.put_if_same(key, data, version=stored.version)


def newest_manifests(
    store: Store,
    stage: str,
    count: int,
    *,
    keep: Callable[[Manifest], bool] = lambda manifest: True,
    unread: list[str] | None = None,
) -> Iterator[Manifest]:
    """The last artifacts of a stage, newest first: what reasons and estimates refer to.

    Fewer than `count` when many of the latest are gone, or not such as to `keep`. A manifest that
    cannot be read is left out, and `unread` gets why.
    """
    names = islice(indexed(store, stage), 4 * count)
    found = (_find_whole(store, stage, name, unread) for name in names)
    yield from islice((m for m in found if m is not None and keep(m)), count)


def indexed(store: Store, stage: str) -> list[str]:
    """Return the fingerprints that the index has of a stage, the newest first, each once."""
    return read_index(store, stage).get(stage, [])


def read_index(store: Store, stage: str | None = None) -> dict[str, list[str]]:
    """Return the fingerprints of each stage, or of one, the newest first, by a single LIST."""
    keys = [entry.key for entry in store.list(f"index/{stage}/" if stage else "index/")]
    found: dict[str, dict[str, None]] = {}
    for match in filter(None, map(_ENTRY.fullmatch, reversed(keys))):
        found.setdefault(match[1], {})[match[2]] = None
    return {name: list(fingerprints) for name, fingerprints in found.items()}


def _find_whole(
    store: Store, stage: str, fingerprint: str, unread: list[str] | None
) -> Manifest | None:
    try:
        return find_manifest(store, stage, fingerprint)
    except ArtifactError as error:
        if unread is not None:
            unread.append(str(error))
        return None


def _files_of(stage: str, output: Path) -> list[Path]:
    found = list(_walk(output)) if output.is_dir() else []
    if not found:
        raise ArtifactError(
            f"{stage} left no files in {output}", hint="its job did not do its work"
        )
    for path in found:
        if path.is_symlink() or not path.is_file():
            raise ArtifactError(
                f"{stage} left {path}, which is not a plain file", hint="artifacts hold files only"
            )
    return sorted(found, key=lambda path: path.relative_to(output).as_posix())


def _walk(directory: Path) -> Iterator[Path]:
    """All that is no directory. Not rglob, which passes over a directory that it may not read."""
    with os.scandir(directory) as entries:
        for entry in entries:
            path = directory / entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(path)
            else:
                yield path


@contextlib.contextmanager
def _reading_output(stage: str) -> Generator[None]:
    """What the operating system refuses is an ArtifactError: the store's refusals are its own."""
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ArtifactError(
            f"what {stage} made cannot be read: {(error.strerror or str(error)).lower()}{where}",
            hint="check the disk that NANOCHAT_HOME is on, then run the same command again",
        ) from error


def _upload(
    store: Store,
    prefix: str,
    base: Path,
    paths: list[Path],
    shared: Shared,
    *,
    on_bytes: OnBytes,
    persist: Persist,
) -> tuple[File, ...]:
    """Store files whose bytes are nowhere in `shared`."""

    def upload_one(path: Path, on_bytes: OnBytes) -> File:
        name = path.relative_to(base).as_posix()
        size, sha256, content = path.stat().st_size, sha256_of(path), content_of(path)
        key = find_shared(store, shared, size=size, sha256=sha256)
        if key is not None:
            on_bytes(size)
            return File(path=name, size=size, sha256=sha256, key=key, content=content)
        key = f"{prefix}/{name}"
        file = File(path=name, size=size, sha256=sha256, key=key, content=content)
        store.upload(file.key, path, on_bytes=on_bytes)
        return file

    def upload_until_stored(path: Path, on_bytes: OnBytes) -> File:
        return persist(lambda: upload_one(path, on_bytes))

    return tuple(transfer_each(upload_until_stored, paths, on_bytes=on_bytes))


def _other_contents(store: Store, place: str, digest: str) -> list[str]:
    """Earlier artifacts of this fingerprint that came out differently."""
    keys = [entry.key for entry in store.list(f"{place}/superseded/")]
    return [key for key in keys if not key.endswith(f"/{short(digest)}.json")]


def _add_to_index(store: Store, manifest: Manifest) -> None:
    """At the time it was made, or accepted."""
    when = manifest.accepted["when"] if manifest.accepted else manifest.provenance.created
    stamp = "".join(c for c in when.lower() if c.isalnum())
    store.put(f"index/{manifest.stage}/{stamp}-{manifest.fingerprint}", b"")
