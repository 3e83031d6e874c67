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
import threading
import time
from collections.abc import Generator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from tests.support.nanochat_core.data.hub_records import (
    Commit,
    Fault,
    Kind,
    Request,
    git_id,
    is_large,
    sha256_of,
    tree_of,
)

KINDS = ("datasets", "models")  # of repositories, as addresses name them
PAGE = 100  # entries of a tree in one answer; the Hub's are 1000
CHUNK = 1 << 14


class HubServer:
    """The server. Close it, or use it as a context manager."""

    def __init__(self, home: Path) -> None:
        self.home = home  # HF_HOME of the processes that use `environment`
        self.is_closed = False
        self.requests: list[Request] = []
        self._commits: dict[tuple[str, str], list[Commit]] = {}
        self._objects: dict[str, tuple[str, bytes]] = {}  # large files by sha256
        self._tokens: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._servers = [_Listener(self), _Listener(self)]
        self.endpoint, self.storage = (server.url for server in self._servers)

    def __enter__(self) -> "HubServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Answer no request any more, on old connections neither."""
        self.is_closed = True
        for server in self._servers:
            server.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process talks to this server, with a cache of its own."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home),
            "HF_TOKEN": "",
            "HF_HUB_OFFLINE": "",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def add(self, repository: str, files: Mapping[str, bytes], *, kind: str = "dataset") -> str:
        """Commit these files, and no others, to `main` of a repository; returns the commit."""
        history = self._commits.setdefault((f"{kind}s", repository), [])
        parts = [
            repository,
            str(len(history)),
            *(f"{n} {sha256_of(files[n])}" for n in sorted(files)),
        ]
        name = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        history.append(Commit(name=name, files=dict(files)))
        self._objects |= {sha256_of(data): (path, data) for path, data in files.items()}
        return name

    def gate(self, repository: str, token: str) -> None:
        """From now on bytes are given only to requests with this token."""
        self._tokens[repository] = token

    def fail(
        self,
        text: str,
        status: int,
        *,
        kind: Kind = "bytes",
        times: int | None = 1,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer with an error status."""
        self._add(Fault(kind=kind, text=text, left=times, status=status, headers=headers or {}))

    def spoil(self, text: str, *, times: int | None = 1) -> None:
        """Send another byte in the middle of a file."""
        self._add(Fault(kind="bytes", text=text, left=times, spoils=True))

    def slow(
        self, text: str, pause: float, *, kind: Kind = "bytes", times: int | None = None
    ) -> None:
        """Wait so many seconds before each 16 KB of an answer."""
        self._add(Fault(kind=kind, text=text, left=times, pause=pause))

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def downloads(self, text: str = "") -> list[Request]:
        """Requests for bytes of files whose path contains `text`."""
        return [r for r in self.requests if r.kind == "bytes" and text in r.file]

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def take_faults(self, request: Request) -> list[Fault]:
        """What is to go wrong with a request: used up by it."""
        with self._lock:
            found = [
                fault
                for fault in self._faults
                if fault.kind == request.kind
                and fault.left != 0
                and fault.text in (request.file or request.path)
            ]
            for fault in found:
                fault.left = None if fault.left is None else fault.left - 1
            return found

    def find_commit(self, kind: str, repository: str, revision: str) -> Commit | None:
        """A commit by `main` or by its name."""
        history = self._commits[kind, repository]
        if revision == "main":
            return history[-1]
        return next((commit for commit in history if commit.name == revision), None)

    def repository_in(self, kind: str, path: str) -> str | None:
        """The dataset or model that a path begins with; `kind` is datasets or models."""
        names = (name for of_kind, name in self._commits if of_kind == kind)
        return next((name for name in names if f"{path}/".startswith(f"{name}/")), None)

    def find_object(self, sha256: str) -> tuple[str, bytes] | None:
        """Path and bytes of a large file."""
        return self._objects.get(sha256)

    def may_read(self, repository: str, token: str | None) -> bool:
        """Whether a request is let through the gate."""
        needed = self._tokens.get(repository)
        return needed is None or token == f"Bearer {needed}"

    def _add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    # The client connects from eight threads at once. Linux drops a connection beyond the queue,
    # five by default, and a client tries again after 1, 3 and 7 s of the ten that it waits.
    request_queue_size = 64

    def __init__(self, hub: HubServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is nothing to talk about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """The tests read `requests`."""

    def _answer(self) -> None:
        self.faults: list[Fault] = []
        if self.server.hub.is_closed:
            self.close_connection = True
            return
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.removeprefix("/").split("/")]
        self.request_ = Request(
            method=self.command,
            kind="api",
            path=url.path,
            file="",
            range=self.headers.get("Range"),
            token=self.headers.get("Authorization"),
        )
        if self.server.url == self.server.hub.storage:
            self._answer_storage(parts[-1])
        elif parts[0] == "api" and parts[1] in KINDS:
            self._answer_api(parts[1], "/".join(parts[2:]), parse_qs(url.query))
        elif parts[:2] == ["api", "resolve-cache"]:
            self._answer_resolve(parts[2], "/".join(parts[3:]), is_cache=True)
        elif parts[0] == "datasets":
            self._answer_resolve("datasets", "/".join(parts[1:]), is_cache=False)
        else:
            self._answer_resolve("models", "/".join(parts), is_cache=False)

    def _answer_api(self, kind: str, path: str, query: Mapping[str, list[str]]) -> None:
        hub, repository = self.server.hub, self.server.hub.repository_in(kind, path)
        if self._fails():
            return
        if repository is None:
            return self._refuse_repository()
        what, _, rest = path.removeprefix(repository).removeprefix("/").partition("/")
        commit = hub.find_commit(kind, repository, rest.partition("/")[0] or "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {rest}")
        if what in ("", "revision"):
            self._send_json({"_id": "0", "id": repository, "sha": commit.name, "private": False})
        elif what == "tree":
            self._send_tree(commit, first=int(query.get("cursor", ["0"])[0]))
        else:
            self._refuse(404)

    def _send_tree(self, commit: Commit, *, first: int) -> None:
        entries = tree_of(commit)
        headers = {}
        if len(entries) > first + PAGE:
            url = f"{self.server.url}{urlsplit(self.path).path}"
            headers["Link"] = f'<{url}?recursive=true&cursor={first + PAGE}>; rel="next"'
        self._send_json(entries[first : first + PAGE], headers)

    def _answer_resolve(self, kind: str, path: str, *, is_cache: bool) -> None:
        hub, repository = self.server.hub, self.server.hub.repository_in(kind, path)
        self.request_.kind = "head" if self.command == "HEAD" else "bytes"
        if repository is None:
            return self._refuse_repository()
        rest = path.removeprefix(f"{repository}/").removeprefix("resolve/")
        revision, _, file = rest.partition("/")
        self.request_.file = file
        if self._fails():
            return
        commit = hub.find_commit(kind, repository, revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        data = commit.files.get(file)
        extra = {"X-Repo-Commit": commit.name}
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", extra)
        if not hub.may_read(repository, self.request_.token):
            status = 403 if self.request_.token else 401
            return self._refuse(
                status, "GatedRepo", f"Access to dataset {repository} is restricted"
            )
        if is_large(file, data):
            sha256 = sha256_of(data)
            extra |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256}"'}
            self._redirect(302, f"{hub.storage}/repos/{sha256}", extra)
        elif not is_cache:
            url = f"/api/resolve-cache/{kind}/{repository}/{commit.name}/{quote(file)}"
            self._redirect(307, url, extra)
        else:
            self._send_bytes(data, {**extra, "ETag": f'"{git_id(data)}"'})

    def _answer_storage(self, sha256: str) -> None:
        self.request_.kind = "bytes"
        found = self.server.hub.find_object(sha256)
        if found is None:
            return self._refuse(404)
        self.request_.file, data = found
        if not self._fails():
            self._send_bytes(data, {"ETag": '"of-the-storage"'})

    def _fails(self) -> bool:
        """Whether the request was answered with the error that it was to get."""
        self.faults = self.server.hub.take_faults(self.request_)
        fault = next((fault for fault in self.faults if fault.status), None)
        if fault is not None:
            self._refuse(fault.status, None, "asked to fail", fault.headers)
        return fault is not None

    def _refuse_repository(self) -> None:
        """The Hub does not tell strangers whether a private dataset exists."""
        status = 404 if self.request_.token else 401
        self._refuse(status, "RepoNotFound", "Invalid username or password.")

    def _refuse(
        self,
        status: int,
        code: str | None = None,
        message: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        extra = {**(headers or {}), "X-Error-Message": message}
        self._send_json(
            {"error": message}, extra | ({"X-Error-Code": code} if code else {}), status
        )

    def _redirect(self, status: int, url: str, headers: Mapping[str, str]) -> None:
        self._send(status, b"", {**headers, "Location": url})

    def _send_json(
        self, tree: object, headers: Mapping[str, str] | None = None, status: int = 200
    ) -> None:
        self._send(
            status,
            json.dumps(tree).encode(),
            {**(headers or {}), "Content-Type": "application/json"},
        )

    def _send_bytes(self, data: bytes, headers: Mapping[str, str]) -> None:
        if any(fault.spoils for fault in self.faults):
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        extra = {**headers, "Accept-Ranges": "bytes"}
        if self.request_.range is None:
            return self._send(200, data, extra)
        start = int(self.request_.range.removeprefix("bytes=").partition("-")[0])
        extra["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206, data[start:], extra)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        request = self.request_
        request.status = status
        self.server.hub.note(request)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        pause = sum(fault.pause for fault in self.faults)
        for first in range(0, len(body), CHUNK):
            time.sleep(pause)
            self.wfile.write(body[first : first + CHUNK])


@contextlib.contextmanager
def talking_to_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[HubServer]:
    """A server, with huggingface_hub in this very process talking to it and caching below `home`.

    The library reads its variables when it is imported, so they are set where it keeps them.
    """
    import huggingface_hub
    from huggingface_hub import constants

    with HubServer(home) as server:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_ASSETS_CACHE": str(home / "assets"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield server
        huggingface_hub.close_session()
