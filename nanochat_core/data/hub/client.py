"""List, download and verify files of a repository on the Hugging Face Hub at one commit.

Everything goes through huggingface_hub, which reads HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and
HF_HOME. Its cache stores downloads and the list of each commit that was downloaded from, so a later
run downloads only new files, and needs no network for old ones. After a lost connection a download
resumes inside the file; after its process was killed it starts again.
"""

import glob
import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanochat_core.data.hub.errors import Kind, explaining, with_retries
from nanochat_core.data.hub.transfers import ByteProgress, Log, run_interruptible
from nanochat_core.errors import DataError, reason_of
from nanochat_core.runtime.heartbeat import HEARTBEAT

if TYPE_CHECKING:
    from huggingface_hub import RepoFile, ResolvedRevision


def resolve(repository: str, revision: str, *, seconds: float) -> str | None:
    """Return the commit that `revision` points to today; the Hub has `seconds` to answer.

    Raises Unreachable if it does not, DataError if there is no such dataset or revision.
    """
    from huggingface_hub import HfApi

    with explaining(repository, f"revision {revision}"):
        return HfApi().dataset_info(repository, revision=revision, timeout=seconds).sha


def find_commit(repository: str, revision: str, *, kind: Kind = "dataset") -> str:
    """Return the commit that `revision` points to; the last known one if the Hub is not reached.

    A commit's own name needs no request. Raises like `list_files`.
    """
    return with_retries(lambda: _resolve(repository, revision, kind).resolved)


def list_files(
    repository: str, revision: str, patterns: Sequence[str], *, kind: Kind = "dataset"
) -> tuple[str, "list[RepoFile]"]:
    """Return the commit that `revision` points to, and its matching files, sorted by path.

    In a pattern `*` matches anything, '/' too. Raises DataError if a pattern matches nothing, if
    the repository or revision does not exist, or if the Hub cannot be reached; a branch then
    resolves to its last known commit, if there is one.
    """
    commit, files = with_retries(lambda: _list(repository, revision, kind))
    for pattern in patterns:
        if not any(fnmatchcase(file.path, pattern) for file in files):
            raise DataError(
                f"{repository} has no file like {pattern} at commit {commit[:12]}",
                hint="its layout has changed, or the revision is another dataset's",
            )
    wanted = [file for file in files if any(fnmatchcase(file.path, p) for p in patterns)]
    return commit, sorted(wanted, key=lambda file: file.path)


def download(
    repository: str,
    commit: str,
    files: "Sequence[RepoFile]",
    *,
    log: Log,
    kind: Kind = "dataset",
) -> list[Path]:
    """Download and verify files; return their paths in the client's cache. Do not write to them.

    A file that is damaged, in the cache or in transit, is removed and downloaded once more. Raises
    DataError if that fails too, or if a file cannot be downloaded. Removes nothing offline.
    """
    from huggingface_hub import constants

    for is_last in (False, True):
        paths = _download(repository, commit, files, log, kind)
        pairs = zip(files, paths, strict=True)
        faults = [(file, path, fault) for file, path in pairs if (fault := _fault(file, path))]
        if not faults:
            return paths
        first, path, fault = faults[0]
        if constants.HF_HUB_OFFLINE:
            raise DataError(
                f"{path} {fault}, and HF_HUB_OFFLINE is set",
                hint="run once without HF_HUB_OFFLINE, or copy the file again",
            )
        for _, path, _ in faults:
            # Removing the link alone would leave the content, which the client would link again.
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        if is_last:
            raise DataError(
                f"{first.path} of {repository} came out wrong twice: it {fault}",
                hint="the server's copy is damaged, or the network, a proxy or a disk damages "
                "data: check HF_ENDPOINT and HF_HOME",
            )
        log("; ".join(f"{file.path} {fault}: it is downloaded again" for file, _, fault in faults))
    raise AssertionError


def _resolve(repository: str, revision: str, kind: Kind) -> "ResolvedRevision":
    from huggingface_hub import HfApi

    with explaining(repository, f"revision {revision}", kind=kind):
        return HfApi().resolve_revision(repository, repo_type=kind, revision=revision)


def _list(repository: str, revision: str, kind: Kind) -> "tuple[str, list[RepoFile]]":
    from huggingface_hub import HfApi, RepoFile, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    found = _resolve(repository, revision, kind)
    with explaining(repository, f"revision {revision}", kind=kind):
        try:
            return found.resolved, get_cached_repo_tree(repository, repo_type=kind, revision=found)
        except CachedRepoTreeNotFoundError:
            entries = HfApi().list_repo_tree(
                repository, repo_type=kind, revision=found.resolved, recursive=True
            )
            return found.resolved, [entry for entry in entries if isinstance(entry, RepoFile)]


def _download(
    repository: str, commit: str, files: "Sequence[RepoFile]", log: Log, kind: Kind
) -> list[Path]:
    """Return the files' paths in the cache, after downloading those that it lacks."""
    from huggingface_hub import snapshot_download

    def attempt() -> Path:
        progress = ByteProgress(sum(file.size for file in files), log)
        fetch = partial(
            snapshot_download,
            repository,
            repo_type=kind,
            revision=commit,
            allow_patterns=[glob.escape(file.path) for file in files],
            tqdm_class=_bar_for(progress),
        )
        what = files[0].path if len(files) == 1 else f"{len(files)} files"
        with explaining(repository, what, kind=kind):
            return Path(run_interruptible(fetch, progress))

    _check_space(repository, commit, files, kind)
    folder = with_retries(attempt) if files else Path()
    return [folder / file.path for file in files]


def _check_space(repository: str, commit: str, files: "Sequence[RepoFile]", kind: Kind) -> None:
    """Raise DataError if the cache's disk has too little space for the files that it lacks."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    if constants.HF_HUB_OFFLINE:  # nothing is downloaded
        return
    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache / repo_folder_name(repo_id=repository, repo_type=kind) / "blobs"
    missing = sum(
        file.size
        for file in files
        if not (blobs / (file.lfs.sha256 if file.lfs else file.blob_id)).exists()
        and not try_to_load_from_cache(repository, file.path, revision=commit, repo_type=kind)
    )
    disk = next(path for path in (cache, *cache.parents) if path.exists())
    if missing > (free := shutil.disk_usage(disk).free):
        raise DataError(
            f"{missing / 1e9:,.1f} GB of {repository} are to be downloaded, and the disk of "
            f"{cache} has {free / 1e9:,.1f} GB free",
            hint="free some space, or set HF_HOME to a directory on a larger disk",
        )


def _fault(file: "RepoFile", path: Path) -> str | None:
    """Return what is wrong with a file in the cache. None means intact."""
    # A link leads to a name that is the content's digest. A cache that was copied without links, or
    # is on a disk without them, has the file under its own name. A list from the client's cache has
    # no sha256, so a large file's content must match the id of its pointer too.
    name = path.resolve().name
    expected = name if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) else file.blob_id
    HEARTBEAT.beat("verifying downloads")
    try:
        if expected in _digests(path):
            return None
    except OSError as error:  # a bad block
        return f"cannot be read: {reason_of(error)}"
    return f"has another digest than {expected[:12]}"


def _digests(path: Path) -> Iterator[str]:
    """Yield the digests by which the Hub may name a file: sha256, and git's ids."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        yield sha256
        size = path.stat().st_size
        # Git stores a large file as this pointer (LFS), and the list of a commit has its id.
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        yield hashlib.sha1(
            f"blob {len(pointer)}\0{pointer}".encode(), usedforsecurity=False
        ).hexdigest()
        stream.seek(0)
        blob = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        yield hashlib.file_digest(stream, lambda: blob).hexdigest()


def _bar_for(progress: ByteProgress) -> Any:
    """Return the class of the client's progress bars: they draw nothing and count bytes."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # starts no thread

        def __init__(self, *args: Any, **options: Any) -> None:
            # Of three bars one counts the bytes of files; the others files, and bytes on the wire.
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            """Count bytes of a file, from the network or deduplicated."""
            if self._counts:
                progress.add(int(n or 0))

    return Bar
