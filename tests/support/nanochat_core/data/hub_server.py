"""A server that answers like the Hugging Face Hub and misbehaves on request.

Two listeners, as on the Hub: one has the API and `resolve`, the other the bytes of large files, to
which `resolve` redirects and which must never see a token. Parquet files and whatever has 64 KB or
more count as large (LFS). What it answers was checked against huggingface_hub's own parsing.

    def test_it(hub):                       # the fixture `hub` of conftest.py: this process talks
        commit = hub.add("me/data", {"a.parquet": b"..."})   # to the server, with an empty cache
        hub.fail("a.parquet", 503)          # the next GET of its bytes
"""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.nanochat_core.data.web_server import FileHandler, FileServer, spoiled

LARGE = 1 << 16  # bytes
# What a request asks for: information on a repository or its tree; where a file is and its ETag;
# the bytes of a file.
Kind: TypeAlias = Literal["api", "head", "bytes"]
Reply: TypeAlias = tuple[int, dict[str, str], bytes]  # status, headers, body
_API = re.compile(r"/api/(datasets|models)/(.+?)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/(?:(datasets)/)?(.+?)/resolve/([^/]+)/(.+)")


@dataclass(kw_only=True)
class Request:
    """One request and how it was answered."""

    kind: Kind
    path: str  # of the URL
    file: str  # in the repository, empty for the API
    token: str | None  # the header Authorization
    status: int = 0


@dataclass(kw_only=True)
class Fault:
    """Something that goes wrong with requests whose file, or URL, contains `text`."""

    kind: Kind = "bytes"
    text: str
    left: int | None = None  # times; None: always
    status: int = 0  # answer this and nothing else
    spoils: bool = False  # one byte of the file is another
    pause: float = 0.0  # seconds before each chunk


class HubServer:
    """The server, until `close`."""

    def __init__(self, home: Path) -> None:
        self.home = home  # HF_HOME of the processes that use `environment`
        self.is_closed = False
        self.requests: list[Request] = []
        self._commits: dict[tuple[str, str], dict[str, Mapping[str, bytes]]] = {}
        self.objects: dict[str, tuple[str, bytes]] = {}  # large files by sha256
        self._tokens: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._servers = [FileServer(_Handler, self), FileServer(_Handler, self)]
        self.endpoint, self.storage = (server.url for server in self._servers)

    def close(self) -> None:
        """Answer no request any more, on old connections neither."""
        self.is_closed = True
        for server in self._servers:
            server.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process talks to this server, with a cache of its own."""
        return {
            **{"HF_ENDPOINT": self.endpoint, "HF_HOME": str(self.home), "NO_PROXY": "127.0.0.1"},
            **{"HF_TOKEN": "", "HF_HUB_OFFLINE": "", "HF_HUB_DISABLE_TELEMETRY": "1"},
            "HF_HUB_DISABLE_XET": "1",
        }

    def add(self, repository: str, files: Mapping[str, bytes], *, kind: str = "dataset") -> str:
        """Commit these files, and no others, to `main` of a repository; returns the commit."""
        history = self._commits.setdefault((f"{kind}s", repository), {})
        digests = [f"{path} {sha256_of(files[path])}" for path in sorted(files)]
        commit = hashlib.sha1(repr([repository, len(history), digests]).encode()).hexdigest()
        history[commit] = dict(files)
        self.objects |= {sha256_of(data): (path, data) for path, data in files.items()}
        return commit

    def gate(self, repository: str, token: str) -> None:
        """From now on bytes are given only to requests with this token."""
        self._tokens[repository] = f"Bearer {token}"

    def fail(self, text: str, status: int, *, kind: Kind = "bytes", times: int | None = 1) -> None:
        """Answer with an error status."""
        self._faults.append(Fault(kind=kind, text=text, left=times, status=status))

    def spoil(self, text: str, *, times: int | None = 1) -> None:
        """Send another byte in the middle of a file."""
        self._faults.append(Fault(text=text, left=times, spoils=True))

    def slow(self, text: str, pause: float) -> None:
        """Wait so many seconds before each 16 KB of a file."""
        self._faults.append(Fault(text=text, pause=pause))

    def heal(self) -> None:
        self._faults = []

    def downloads(self, text: str = "") -> list[Request]:
        """Requests for bytes of files whose path contains `text`."""
        return [r for r in self.requests if r.kind == "bytes" and text in r.file]

    def take_faults(self, request: Request) -> list[Fault]:
        """Return what is to go wrong with a request: used up by it."""
        with self._lock:
            about = request.file or request.path
            found = [f for f in self._faults if f.kind == request.kind and f.text in about]
            found = [fault for fault in found if fault.left != 0]
            for fault in found:
                fault.left = None if fault.left is None else fault.left - 1
            return found

    def answer(self, request: Request) -> Reply:
        """Return the answer of a Hub that is well."""
        if found := _FILE.fullmatch(request.path):
            kind, repository, revision, _ = found.groups()
        elif found := _API.fullmatch(request.path):
            kind, repository, what, revision = found.groups()
        else:
            return refusal(404)
        history = self._commits.get((kind or "models", repository))
        if history is None:  # the Hub does not reveal to strangers whether a private one exists
            return refusal(404 if request.token else 401, "RepoNotFound", "Invalid username")
        commit = list(history)[-1] if revision in (None, "main") else revision
        if (files := history.get(commit)) is None:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if request.kind == "api":
            about = {"_id": "0", "id": repository, "sha": commit, "private": False}
            tree = json.dumps(tree_of(files) if what == "tree" else about)
            return 200, {"Content-Type": "application/json"}, tree.encode()
        if (data := files.get(request.file)) is None:
            return refusal(404, "EntryNotFound", "Entry not found")
        if request.token != self._tokens.get(repository, request.token):
            return refusal(403 if request.token else 401, "GatedRepo", "Access is restricted")
        headers, sha256 = {"X-Repo-Commit": commit}, sha256_of(data)
        if not is_large(request.file, data):
            return 200, {**headers, "ETag": f'"{git_id(data)}"'}, data
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256}"'}
        return 302, {**headers, "Location": f"{self.storage}/{sha256}"}, b""


class _Handler(FileHandler):
    def do_GET(self) -> None:
        hub: HubServer = self.server.owner
        if hub.is_closed:
            self.close_connection = True
            return
        path, token = unquote(urlsplit(self.path).path), self.headers.get("Authorization")
        kind: Kind = "head" if self.command == "HEAD" else "bytes"
        if self.server.url == hub.storage:
            file, data = hub.objects[path.removeprefix("/")]
            request = Request(kind=kind, path=path, file=file, token=token)
            reply: Reply = 200, {"ETag": '"of-the-storage"'}, data
        else:
            found = _FILE.fullmatch(path)
            kind, file = (kind, found[4]) if found else ("api", "")
            request = Request(kind=kind, path=path, file=file, token=token)
            reply = hub.answer(request)
        faults = hub.take_faults(request)
        failed = [fault.status for fault in faults if fault.status]
        request.status, headers, body = refusal(failed[0]) if failed else reply
        hub.requests.append(request)
        if any(fault.spoils for fault in faults):
            body = spoiled(body)
        self.send(request.status, body, headers, pause=sum(fault.pause for fault in faults))

    do_HEAD = do_GET


def refusal(status: int, code: str = "", message: str = "asked to fail") -> Reply:
    """Return the answer of the Hub with an error."""
    return status, {"X-Error-Code": code, "X-Error-Message": message}, b"{}"


def tree_of(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    """Return the entries of a commit's tree, folders among them."""
    folders = {str(folder) for path in files for folder in Path(path).parents} - {"."}
    entries: list[dict[str, object]] = [
        {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in folders
    ]
    for path, data in files.items():
        about = {"type": "file", "path": path, "size": len(data)}
        lfs = {"oid": sha256_of(data), "size": len(data), "pointerSize": 134}
        if is_large(path, data):
            entries.append(about | {"oid": git_id(pointer_to(data)), "lfs": lfs})
        else:
            entries.append(about | {"oid": git_id(data)})
    return sorted(entries, key=lambda entry: str(entry["path"]))


def is_large(path: str, data: bytes) -> bool:
    return path.endswith(".parquet") or len(data) >= LARGE


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pointer_to(data: bytes) -> bytes:
    """Return what git stores in place of a large file."""
    lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{sha256_of(data)}")
    return "\n".join((*lines, f"size {len(data)}\n")).encode()


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def talking_to_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[HubServer]:
    """A server, with huggingface_hub in this very process talking to it and caching below `home`.

    The library reads its variables when it is imported, so they are set where it keeps them.
    """
    import huggingface_hub
    from huggingface_hub import constants

    server = HubServer(home)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_ASSETS_CACHE": str(home / "assets"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    try:
        yield server
        huggingface_hub.close_session()
    finally:
        server.close()
