"""List, download and verify the files of a dataset on the Hugging Face Hub at one commit.

Everything goes through huggingface_hub, which reads HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and
HF_HOME. Its cache stores downloads, so a later run downloads only new files. After a lost
connection a download resumes inside the file; after its process was killed it starts again, because
the client's temporary files have a name per process.

The files of a commit never change, so their list is cached beside the client's cache, and is used
offline too.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from nanochat_core.data.hub.errors import catchable, explain, is_transient, seconds_to_wait
from nanochat_core.data.hub.transfers import OnBytes
from nanochat_core.errors import DataError, reason_of
from nanochat_core.job import write_json

FORMAT = 1  # of the cached lists
WAITS = (1.0, 4.0)  # seconds before a retry; the client itself retries several times before that
SECONDS_FOR_AN_ANSWER = 30.0

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of a dataset at one commit."""

    path: str
    size: int  # bytes
    sha256: str | None  # None means a small file, stored in git itself
    git_id: str | None = None  # of such a file: sha1 over "blob SIZE", a zero byte and its bytes


def list_files(
    repository: str, revision: str, patterns: Sequence[str]
) -> tuple[str, list[HubFile]]:
    """Return the commit that `revision` points to, and its matching files, sorted by path.

    In a pattern `*` matches anything, '/' too. Raises DataError if a pattern matches nothing, if
    the dataset or revision does not exist, or if the Hub cannot be reached; a branch then resolves
    to its last known commit, if there is one.
    """
    commit = _resolve(repository, revision)
    # By commit, not by revision: what a branch points to changes.
    files = _find_list(repository, commit) or _fetch_list(repository, commit)
    for pattern in patterns:
        if not any(fnmatchcase(file.path, pattern) for file in files):
            raise DataError(
                f"{repository} has no file like {pattern} at commit {commit[:12]}",
                hint="its layout has changed, or the revision is another dataset's",
            )
    wanted = [file for file in files if any(fnmatchcase(file.path, p) for p in patterns)]
    return commit, sorted(wanted, key=lambda file: file.path)


def download(
    repository: str, commit: str, file: HubFile, *, on_bytes: OnBytes = lambda count: None
) -> Path:
    """Download and verify a file; return its path in the Hub client's cache. Do not write to it.

    A file that is damaged, in the cache or in transit, is removed and downloaded once more. Raises
    DataError if that fails too, or if the file cannot be downloaded.
    """
    faults: list[str] = []
    for _ in range(2):
        path = _download(repository, commit, file, on_bytes)
        fault = find_fault(path, file)
        if fault is None:
            return path
        _forget(path)
        faults.append(fault)
    # The same wrong bytes twice come from the source, different ones from the way.
    same = len(set(faults)) == 1
    raise DataError(
        f"{file.path} of {repository} came out wrong twice: it {faults[-1]}",
        hint="the server's copy, or a proxy's, is damaged: check HF_ENDPOINT"
        if same
        else "the network or a disk on the way damages data: repair that, then run again",
    )


def find_fault(path: Path, file: HubFile) -> str | None:
    """Return what is wrong with a local copy, as a predicate ("is gone"). None means intact."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            if size != file.size:
                return f"has {size:,} bytes, not {file.size:,}"
            if file.sha256 is not None:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                return _compare("sha256", digest, file.sha256)
            if file.git_id is not None:
                head = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
                head.update(stream.read())
                return _compare("git id", head.hexdigest(), file.git_id)
            return None
    except FileNotFoundError:
        return "is gone"
    except OSError as error:  # a bad block
        return f"cannot be read: {reason_of(error)}"


def _compare(what: str, found: str, expected: str) -> str | None:
    return None if found == expected else f"has {what} {found[:12]}, not {expected[:12]}"


def _resolve(repository: str, revision: str) -> str:
    from huggingface_hub import HfApi

    def ask() -> str:
        _limit_patience()
        return HfApi().resolve_revision(repository, repo_type="dataset", revision=revision).resolved

    return _patiently(ask, repository=repository, what=f"revision {revision}")


def _download(repository: str, commit: str, file: HubFile, on_bytes: OnBytes) -> Path:
    from huggingface_hub import hf_hub_download

    def fetch() -> Path:
        path = hf_hub_download(
            repository,
            file.path,
            repo_type="dataset",
            revision=commit,
            tqdm_class=_bar_for(on_bytes),
        )
        return Path(path)

    return _patiently(fetch, repository=repository, what=file.path)


def _patiently(action: Callable[[], _Result], *, repository: str, what: str) -> _Result:
    """Run an action, retrying after transient errors. Raises DataError."""
    waits = iter(WAITS)
    while True:
        try:
            return action()
        except catchable() as error:
            wait = next(waits, None)
            if wait is None or not is_transient(error):
                raise explain(error, repository=repository, what=what) from error
            time.sleep(seconds_to_wait(error, wait))


def _limit_patience() -> None:
    """Limit the time to wait for an answer: the client has no timeout for small requests."""
    from huggingface_hub import get_session

    client = get_session()  # a new one after a failed connection, so the hook is added each time
    hooks = client.event_hooks
    if _limit_request not in hooks["request"]:
        client.event_hooks = {**hooks, "request": [*hooks["request"], _limit_request]}


def _limit_request(request: Any) -> None:
    limits = request.extensions.get("timeout", {})
    # Only limits that are None: the client sets its own for downloads.
    request.extensions["timeout"] = {
        kind: SECONDS_FOR_AN_ANSWER if limits.get(kind) is None else limits[kind]
        for kind in ("connect", "read", "write", "pool")
    }


def _forget(path: Path) -> None:
    """Remove a damaged file from the cache, with the symlinks to it."""
    # Removing the link alone would leave the damaged content, which the client would link again.
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink(missing_ok=True)
        path = target
    path.unlink(missing_ok=True)


def _list_path(repository: str, commit: str) -> Path:
    from huggingface_hub import cached_assets_path, constants

    folder = cached_assets_path(
        "nanochat-flows",
        namespace=repository.replace("/", "--"),
        subfolder="files",
        assets_dir=constants.HF_ASSETS_CACHE,
    )
    return folder / f"{commit}.json"


def _find_list(repository: str, commit: str) -> list[HubFile]:
    """Return the cached list of files; empty if it is missing or unreadable."""
    try:
        tree: Any = json.loads(_list_path(repository, commit).read_text(encoding="utf-8"))
        if tree["format"] == FORMAT:
            return [HubFile(**file) for file in tree["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return []


def _fetch_list(repository: str, commit: str) -> list[HubFile]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def ask() -> list[HubFile]:
        _limit_patience()
        entries = HfApi().list_repo_tree(
            repository, repo_type="dataset", revision=commit, recursive=True
        )
        return [
            HubFile(path=e.path, size=e.lfs.size, sha256=e.lfs.sha256)
            if e.lfs
            else HubFile(path=e.path, size=e.size, sha256=None, git_id=e.blob_id)
            for e in entries
            if isinstance(e, RepoFile)
        ]

    try:
        files = _patiently(ask, repository=repository, what=f"the list of files at {commit[:12]}")
    except DataError:
        if files := _find_cached_tree(repository, commit):
            return files
        raise
    # Without the cached list a later run only has to ask the Hub again.
    with contextlib.suppress(OSError):  # the cache may be read-only
        write_json(
            _list_path(repository, commit),
            {"format": FORMAT, "repository": repository, "files": [asdict(file) for file in files]},
        )
    return files


def _find_cached_tree(repository: str, commit: str) -> list[HubFile]:
    """Return the files that `hf download` has cached, for a machine without a network."""
    # The cache names a file's content by its sha256 (64 digits) or its git id (40).
    from huggingface_hub import get_cached_repo_tree, try_to_load_from_cache
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        entries = get_cached_repo_tree(repository, repo_type="dataset", revision=commit)
    except CachedRepoTreeNotFoundError:
        return []
    files: list[HubFile] = []
    for entry in entries:
        path = try_to_load_from_cache(repository, entry.path, repo_type="dataset", revision=commit)
        name = (
            Path(path).readlink().name if isinstance(path, str) and Path(path).is_symlink() else ""
        )
        sha256 = name if len(name) == 64 else None
        git_id = entry.blob_id if len(name) == 40 else None
        files.append(HubFile(path=entry.path, size=entry.size, sha256=sha256, git_id=git_id))
    return files


def _bar_for(on_bytes: OnBytes) -> Any:
    """Return a tqdm-like class for the client that forwards the byte counts to `on_bytes`."""

    class Bar:
        def ignore(self, *args: Any, **options: Any) -> None:
            """Do nothing: no bar is drawn, and `update` counts the bytes on the network too."""

        __init__ = __exit__ = close = update_transfer = ignore
        set_postfix_str = set_transfer_postfix_str = ignore

        def __enter__(self) -> "Bar":
            return self

        def update(self, count: float | None = 1) -> None:
            """Count bytes of the file, from the network or deduplicated."""
            on_bytes(int(count or 0))

    return Bar
