"""List, download and verify the files of a dataset on the Hugging Face Hub at one commit.

Everything goes through huggingface_hub, which reads HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and
HF_HOME. Its cache stores downloads and the list of each commit that was downloaded from, so a later
run downloads only new files, and needs no network for old ones. After a lost connection a download
resumes inside the file; after its process was killed it starts again.
"""

import glob
import hashlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanochat_core.data.hub.errors import explaining, with_retries
from nanochat_core.data.hub.transfers import ByteProgress, Log, OnBytes, run_interruptible
from nanochat_core.errors import DataError, reason_of
from nanochat_core.runtime.heartbeat import HEARTBEAT

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

WAITS = (1.0, 4.0)  # seconds before a retry of what the client does not retry itself


def resolve(repository: str, revision: str, *, seconds: float) -> str | None:
    """Return the commit that `revision` points to today; the Hub has `seconds` to answer.

    Raises Unreachable if it does not, DataError if there is no such dataset or revision.
    """
    from huggingface_hub import HfApi

    with explaining(repository, f"revision {revision}"):
        return HfApi().dataset_info(repository, revision=revision, timeout=seconds).sha


def list_files(
    repository: str, revision: str, patterns: Sequence[str]
) -> tuple[str, "list[RepoFile]"]:
    """Return the commit that `revision` points to, and its matching files, sorted by path.

    In a pattern `*` matches anything, '/' too. Raises DataError if a pattern matches nothing, if
    the dataset or revision does not exist, or if the Hub cannot be reached; a branch then resolves
    to its last known commit, if there is one.
    """
    from huggingface_hub import constants

    waits = () if constants.HF_HUB_OFFLINE else WAITS
    commit, files = with_retries(lambda: _list(repository, revision), waits)
    for pattern in patterns:
        if not any(fnmatchcase(file.path, pattern) for file in files):
            raise DataError(
                f"{repository} has no file like {pattern} at commit {commit[:12]}",
                hint="its layout has changed, or the revision is another dataset's",
            )
    wanted = [file for file in files if any(fnmatchcase(file.path, p) for p in patterns)]
    return commit, sorted(wanted, key=lambda file: file.path)


def download(repository: str, commit: str, files: "Sequence[RepoFile]", *, log: Log) -> list[Path]:
    """Download and verify files; return their paths in the client's cache. Do not write to them.

    A file that is damaged, in the cache or in transit, is removed and downloaded once more. Raises
    DataError if that fails too, or if a file cannot be downloaded.
    """
    paths = _download(repository, commit, files, log)
    if faults := {path: fault for path in paths if (fault := _forget_damaged(path))}:
        log(
            "; ".join(
                f"{path.name} {fault}: it is downloaded again" for path, fault in faults.items()
            )
        )
        paths = _download(repository, commit, files, log)
    for file, path in zip(files, paths, strict=True):
        if path in faults and (fault := _forget_damaged(path)):
            raise DataError(
                f"{file.path} of {repository} came out wrong twice: it {fault}",
                hint="the server's copy is damaged, or the network, a proxy or a disk damages "
                "data: check HF_ENDPOINT and HF_HOME",
            )
    return paths


def _list(repository: str, revision: str) -> "tuple[str, list[RepoFile]]":
    from huggingface_hub import HfApi, RepoFile, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    with explaining(repository, f"revision {revision}"):
        found = HfApi().resolve_revision(repository, repo_type="dataset", revision=revision)
        try:
            return found.resolved, get_cached_repo_tree(
                repository, repo_type="dataset", revision=found
            )
        except CachedRepoTreeNotFoundError:
            entries = HfApi().list_repo_tree(
                repository, repo_type="dataset", revision=found.resolved, recursive=True
            )
            return found.resolved, [entry for entry in entries if isinstance(entry, RepoFile)]


def _download(repository: str, commit: str, files: "Sequence[RepoFile]", log: Log) -> list[Path]:
    """Return the files' paths in the cache, after downloading those that it lacks."""
    from huggingface_hub import snapshot_download

    def fetch(on_bytes: OnBytes) -> str:
        return snapshot_download(
            repository,
            repo_type="dataset",
            revision=commit,
            allow_patterns=[glob.escape(file.path) for file in files],
            tqdm_class=_bar_for(on_bytes),
        )

    def attempt() -> Path:
        progress = ByteProgress(sum(file.size for file in files), log)
        with explaining(repository, files[0].path if len(files) == 1 else f"{len(files)} files"):
            return Path(run_interruptible(fetch, progress.add))

    folder = with_retries(attempt, WAITS) if files else Path()
    return [folder / file.path for file in files]


def _forget_damaged(path: Path) -> str | None:
    """Remove a damaged file from the cache; return what is wrong with it. None means intact."""
    # The cache names a file's content by its sha256, or by the id that git gives a small file.
    content = path.resolve()
    HEARTBEAT.beat("verifying downloads")
    try:
        with content.open("rb") as stream:
            if len(content.name) == 64:
                digest = hashlib.file_digest(stream, "sha256")
            else:
                data = stream.read()
                digest = hashlib.sha1(f"blob {len(data)}\0".encode(), usedforsecurity=False)
                digest.update(data)
        if digest.hexdigest() == content.name:
            return None
        fault = f"has digest {digest.hexdigest()[:12]}, not {content.name[:12]}"
    except OSError as error:  # a bad block
        fault = f"cannot be read: {reason_of(error)}"
    # Removing the link alone would leave the content, which the client would link again.
    content.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return fault


def _bar_for(on_bytes: OnBytes) -> Any:
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
                on_bytes(int(n or 0))

    return Bar
