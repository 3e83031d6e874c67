"""Publishing and fetching artifacts: bytes first, manifest last, every byte checked on return.

{stage}/{fingerprint}/files/{attempt}/...   uploaded first, by each attempt in its own place
{stage}/{fingerprint}/logs/{attempt}/...
{stage}/{fingerprint}/manifest.json         put-if-absent, last: from then on the artifact exists
{stage}/{fingerprint}/divergences/{attempt}.json   manifest of one that came too late and differed
{stage}/{fingerprint}/superseded/{digest}.json     manifest of one that was built again on purpose
index/{stage}/{created}-{fingerprint}       empty; lists artifacts for people, decides nothing
"""

import contextlib
import hashlib
import shutil
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from flows import lock
from flows.documents import find_document
from flows.fingerprint import Identity, short
from flows.manifest import FORMAT, File, Input, Manifest, Provenance, digest_of
from infra.storage.base import Missing, OnBytes, Store, ignore_bytes
from nanochat_core.errors import ArtifactError

_THREADS = 8
_CHUNK = 1 << 20
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
    key = f"{stage}/{fingerprint}/manifest.json"
    tree = find_document(store, key, format=FORMAT)
    if tree is None:
        return None
    manifest = Manifest.from_tree(tree, where=f"{store.url}/{key}")
    if (manifest.stage, manifest.fingerprint) != (stage, fingerprint):
        raise ArtifactError(
            f"{store.url}/{key} is the manifest of {manifest.name}",
            hint="delete it and run the stage again",
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
) -> Published:
    """Store the files under `output` as the artifact `identity`; `logs` are single files beside it.

    `fence` is called last, right before the manifest is written, and raises if this attempt has
    lost its right to (see flows/lease.py). Whoever finds that another attempt was first adopts its
    artifact. Raises ArtifactError when `output` holds nothing, or something that no artifact can
    hold, and StoreError.
    """
    attempt = uuid.uuid4().hex[:12]
    place = f"{identity.stage}/{identity.fingerprint}"
    found = _files_of(identity.stage, output)
    files = _upload(store, f"{place}/files/{attempt}", output, found, on_bytes)
    kept = [_upload(store, f"{place}/logs/{attempt}", log.parent, [log], on_bytes) for log in logs]
    digest = digest_of(files)
    manifest = Manifest(
        stage=identity.stage,
        fingerprint=identity.fingerprint,
        preimage=identity.preimage,
        files=files,
        logs=tuple(file for uploaded in kept for file in uploaded),
        digest=digest,
        inputs={n: Input(fingerprint=m.fingerprint, digest=m.digest) for n, m in inputs.items()},
        provenance=provenance,
        divergences=tuple(_other_contents(store, place, digest)),
    )
    data = manifest.to_json()
    Manifest.from_json(data, where=f"the new manifest of {manifest.name}")
    fence()
    if store.put_if_absent(f"{place}/manifest.json", data):
        _add_to_index(store, manifest)
        return Published(manifest=manifest, adopted=False, divergence=None)
    return _adopt(store, manifest, attempt)


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


def supersede(store: Store, stage: str, fingerprint: str) -> None:
    """Put an artifact aside so that its stage is built again; its files and manifest are kept.

    Safe to repeat after a crash. Nothing happens when there is no artifact.
    """
    if manifest := find_manifest(store, stage, fingerprint):
        store.put(
            f"{stage}/{fingerprint}/superseded/{short(manifest.digest)}.json", manifest.to_json()
        )
        store.delete(f"{stage}/{fingerprint}/manifest.json")


def newest_manifests(store: Store, stage: str, count: int) -> Iterator[Manifest]:
    """The last artifacts of a stage, newest first: what reasons and estimates refer to.

    Fewer than `count` when many of the latest are gone.
    """
    entries = reversed(list(store.list(f"index/{stage}/")))
    names = islice(dict.fromkeys(entry.key.rpartition("-")[2] for entry in entries), 4 * count)
    yield from islice(filter(None, (_find_whole(store, stage, name) for name in names)), count)


def _find_whole(store: Store, stage: str, fingerprint: str) -> Manifest | None:
    """Like `find_manifest`, for a look around: a damaged one is as good as none."""
    try:
        return find_manifest(store, stage, fingerprint)
    except ArtifactError:
        return None


def fetch(store: Store, manifest: Manifest, cache: Path) -> Path:
    """A local directory with the artifact: files/, logs/ and manifest.json, every byte verified.

    A whole copy in `cache` is used again, after it was verified too; a damaged one is fetched anew.
    Raises ArtifactError, naming the file, when the store's own bytes are damaged or gone.
    """
    directory = cache / manifest.stage / f"{short(manifest.fingerprint)}-{short(manifest.digest)}"
    with lock.hold(directory.with_name(f"{directory.name}.lock"), lambda owner: None):
        if not _is_whole(manifest, directory):
            with _fresh_directory(directory) as fresh:
                _fetch_files(store, manifest, fresh)
                (fresh / "manifest.json").write_bytes(manifest.to_json())
    return directory


def _fetch_files(store: Store, manifest: Manifest, directory: Path) -> None:
    def fetch_one(item: tuple[File, Path]) -> None:
        file, path = item
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.fetch(file.key, path)
        except Missing:
            raise _damaged(store, manifest, file, "is gone") from None
        if (size := path.stat().st_size) != file.size:
            raise _damaged(
                store, manifest, file, f"has {size} bytes, its manifest says {file.size}"
            )
        if (sha256 := _sha256(path)) != file.sha256:
            raise _damaged(
                store,
                manifest,
                file,
                f"has sha256 {short(sha256)}, its manifest says {short(file.sha256)}",
            )

    _parallel(fetch_one, list(_places(manifest, directory)))


def _damaged(store: Store, manifest: Manifest, file: File, what: str) -> ArtifactError:
    return ArtifactError(
        f"{file.path} of {manifest.name} {what} ({store.url}/{file.key})",
        hint=f"the store's copy is damaged: `nanochat run PROFILE --force {manifest.stage}` builds "
        "it again",
    )


def _places(manifest: Manifest, directory: Path) -> Iterator[tuple[File, Path]]:
    for folder, files in (("files", manifest.files), ("logs", manifest.logs)):
        for file in files:
            yield file, directory / folder / file.path


def _is_whole(manifest: Manifest, directory: Path) -> bool:
    """Whether the cached copy is exactly what the manifest says, all bytes read."""
    try:
        if (directory / "manifest.json").read_bytes() != manifest.to_json():
            return False
        expected = {path: file for file, path in _places(manifest, directory)}
        found = [
            path
            for folder in ("files", "logs")
            for path in (directory / folder).rglob("*")
            if path.is_symlink() or not path.is_dir()
        ]
        if set(found) != set(expected) or any(path.is_symlink() for path in found):
            return False
        if any(path.stat().st_size != file.size for path, file in expected.items()):
            return False
        digests = _parallel(_sha256, list(expected))
    except OSError:
        return False
    return digests == [file.sha256 for file in expected.values()]


@contextlib.contextmanager
def _fresh_directory(final: Path) -> Generator[Path]:
    """An empty directory that takes the place of `final` when the block ends well."""
    fresh = final.with_name(f".{final.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
    try:
        (fresh / "files").mkdir(parents=True)
        (fresh / "logs").mkdir()
        yield fresh
        shutil.rmtree(final, ignore_errors=True)
        fresh.rename(final)
    except OSError as error:
        raise ArtifactError(
            f"{final} cannot be written: {(error.strerror or str(error)).lower()}",
            hint="check that NANOCHAT_HOME is a directory of yours on a disk with free space",
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _files_of(stage: str, output: Path) -> list[Path]:
    found = [path for path in output.rglob("*") if path.is_symlink() or not path.is_dir()]
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


def _upload(
    store: Store, prefix: str, base: Path, paths: list[Path], on_bytes: OnBytes
) -> tuple[File, ...]:
    def upload_one(path: Path) -> File:
        name = path.relative_to(base).as_posix()
        file = File(
            path=name, size=path.stat().st_size, sha256=_sha256(path), key=f"{prefix}/{name}"
        )
        store.upload(file.key, path, on_bytes=on_bytes)
        return file

    return tuple(_parallel(upload_one, paths))


def _other_contents(store: Store, place: str, digest: str) -> list[str]:
    """Earlier artifacts of this fingerprint that came out differently."""
    keys = [entry.key for entry in store.list(f"{place}/superseded/")]
    return [key for key in keys if not key.endswith(f"/{short(digest)}.json")]


def _add_to_index(store: Store, manifest: Manifest) -> None:
    stamp = "".join(c for c in manifest.provenance.created.lower() if c.isalnum())
    store.put(f"index/{manifest.stage}/{stamp}-{manifest.fingerprint}", b"")


def _parallel(function: Callable[[_Item], _Result], items: list[_Item]) -> list[_Result]:
    """Results in order; the first error is raised."""
    if len(items) == 1:
        return [function(items[0])]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
