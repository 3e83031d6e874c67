"""A small S3 server in this process that can misbehave as real ones and networks do.

`Quirk` is how a server is, `Fault` what happens to single requests. Without them it
passes the same contract test as a real server. It checks no signatures; `requests` are all that
were sent to it, `fired` those that a fault happened to.
"""

import base64
import contextlib
import functools
import hashlib
import random
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.support.infra.storage.fake_http import serve
from tests.support.infra.storage.misbehaviour import (
    NETWORK_FAULTS,
    Answer,
    FakeError,
    Fault,
    Kind,
    Quirk,
    Request,
)

RACE = 1.0  # seconds, between looking and writing, for which a racy store waits for a second


@dataclass(frozen=True, kw_only=True)
class Object:
    """Bytes at a key."""

    data: bytes
    etag: str
    written: float
    tag: str | None = None  # user metadata "upload"


@dataclass(kw_only=True)
class Upload:
    """Parts that are not yet an object."""

    key: str
    begun: float
    tag: str | None
    parts: dict[int, Object] = field(default_factory=dict[int, Object])


class FakeS3:
    """One bucket, in memory."""

    def __init__(self, *, faults: Sequence[Fault] = (), bucket: str = "fake") -> None:
        self.quirks: set[Quirk] = set()
        self.faults = list(faults)
        self.requests: list[Request] = []
        self.fired: list[tuple[int, Kind, Request]] = []  # faults that happened, by request
        self.objects: dict[str, Object] = {}
        self.slow = 0.3  # seconds of an answer that drips
        self.seed = 0
        self.later: list[tuple[int, Request]] = []  # writes to carry out again, and when
        self.connections: set[socket.socket] = set()
        self._storm = 0.0
        self._before: dict[str, Object | None] = {}  # what a key held before its last write
        self.uploads: dict[str, Upload] = {}  # unfinished ones
        self.bucket = bucket
        self.now: Callable[[], float] = time.time
        self._lock = threading.RLock()
        self._together = threading.Condition()
        self._looked = Counter[tuple[str, str | None]]()  # a racy store's conditional writes
        self._servers = [serve(self)]

    @property
    def endpoint(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @functools.cached_property
    def calm_endpoint(self) -> str:
        """Return another address of it, where no fault happens and no request is counted."""
        self._servers.append(serve(self, is_calm=True))
        return f"http://127.0.0.1:{self._servers[-1].server_address[1]}"

    def stop(self) -> None:
        """Listen no longer, and end the threads of open connections."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def count(self, verb: str, key: str = "") -> int:
        """Return how many requests of a verb there were for keys with a piece in it."""
        return sum(r.verb == verb and key in r.key for r in self.requests)

    def arm(self, *faults: Fault, storm: float = 0.0, seed: int = 0) -> None:
        """Count anew, with these faults; `storm` is the share of requests that meet a random one.

        Connections and writes to be repeated are dropped.
        """
        self._disconnect()
        with self._lock:
            self.requests, self.fired, self.later = [], [], []
            self.faults, self._storm, self.seed = list(faults), storm, seed

    def settle(self) -> int:
        """Carry out the writes that wait to be repeated; return how many."""
        with self._lock:
            due, self.later = self.later, []
        for _, request in due:
            self._repeat(request)
        return len(due)

    def meet(self, request: Request) -> tuple[int, Fault | None]:
        """Count a request; return its number, from 1, and what happens to it."""
        with self._lock:
            self.requests.append(request)
            number = len(self.requests)
            due = [again for at, again in self.later if at <= number]
            self.later = [(at, again) for at, again in self.later if at > number]
        for again in due:
            self._repeat(again)
        # Each fault counts the requests that match it, whether another one comes first or not.
        firing = [fault for fault in self.faults if fault.fires(request)]
        chance = random.Random(f"{self.seed} storm {number}")
        if not firing and chance.random() < self._storm:
            firing = [Fault(kind=chance.choice(NETWORK_FAULTS))]
        return number, firing[0] if firing else None

    def _repeat(self, request: Request) -> None:
        with contextlib.suppress(FakeError):
            self.answer(request)

    def _set(self, key: str, new: Object | None) -> None:
        with self._lock:
            self._before[key] = self.objects.get(key)
            if new is None:
                self.objects.pop(key, None)
            else:
                self.objects[key] = new

    def _seen(self, request: Request) -> dict[str, Object]:
        """Return the objects that a request sees: a stale one not the last write."""
        with self._lock:
            seen = dict(self.objects)
        if request.is_stale and request.key in self._before:
            before = self._before[request.key]
            seen = {request.key: before} if before else {}
        elif request.is_stale and not request.key and seen:
            seen.pop(max(seen, key=lambda key: seen[key].written))
        return seen

    def answer(self, request: Request) -> Answer:
        """Carry a request out."""
        if request.bucket != self.bucket:
            raise FakeError(404, "NoSuchBucket")
        actions: dict[str, Callable[[Request], Answer]] = {
            "GET": self._get,
            "HEAD": self._get,
            "PUT": self._put,
            "DELETE": self._delete,
            "GET list-type": self._list,
            "GET uploads": self._list_uploads,
            "POST uploads": self._begin,
            "PUT partNumber": self._put_part,
            "POST uploadId": self._complete,
            "DELETE uploadId": self._abort,
        }
        return actions[request.verb](request)

    def _get(self, request: Request) -> Answer:
        found = self._seen(request).get(request.key)
        if found is None:
            raise FakeError(404, "NoSuchKey")
        if request.headers.get("if-match", "").strip('"') not in ("", found.etag):
            raise FakeError(412, "PreconditionFailed")
        headers = {
            "ETag": f'"{found.etag}"',
            "Last-Modified": formatdate(found.written, usegmt=True),
        }
        if found.tag:
            headers["x-amz-meta-upload"] = found.tag
        span = request.headers.get("range")
        if span is None or Quirk.IGNORES_RANGES in self.quirks:
            return Answer(body=found.data, headers=headers)
        size = len(found.data)
        first, last = (int(n) if n else size for n in span.removeprefix("bytes=").split("-"))
        if first >= size:
            raise FakeError(416, "InvalidRange")
        last = min(last, size - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return Answer(status=206, body=found.data[first : last + 1], headers=headers)

    def _put(self, request: Request) -> Answer:
        data = self._body(request)
        racy = (Quirk.RACY_IF_MATCH in self.quirks and "if-match" in request.headers) or (
            Quirk.RACY_IF_NONE_MATCH in self.quirks and "if-none-match" in request.headers
        )
        if racy:
            self._check_conditions(request)
            with self._together:
                moment = (request.key, request.headers.get("if-match"))
                self._looked[moment] += 1
                self._together.notify_all()
                self._together.wait_for(lambda: self._looked[moment] > 1, RACE)
        with self._lock:
            if not racy:
                self._check_conditions(request)
            etag = hashlib.md5(data).hexdigest()
            self._set(request.key, Object(data=data, etag=etag, written=self.now()))
        return Answer(headers={"ETag": f'"{etag}"'})

    def _check_conditions(self, request: Request) -> None:
        found = self.objects.get(request.key)
        absent, match = request.headers.get("if-none-match"), request.headers.get("if-match")
        if absent and Quirk.REFUSES_IF_NONE_MATCH in self.quirks:
            raise FakeError(501, "NotImplemented")
        if absent and found and Quirk.IGNORES_IF_NONE_MATCH not in self.quirks:
            raise FakeError(412, "PreconditionFailed")
        if match is None or Quirk.IGNORES_IF_MATCH in self.quirks:
            return
        if Quirk.REFUSES_IF_MATCH in self.quirks:
            raise FakeError(400, "InvalidArgument")
        if found is None:
            raise FakeError(404, "NoSuchKey")
        if Quirk.REFUSES_QUOTED_VERSIONS not in self.quirks:
            match = match.strip('"')
        if match != found.etag:
            raise FakeError(412, "PreconditionFailed")

    def _delete(self, request: Request) -> Answer:
        if request.key in self.objects:
            self._set(request.key, None)
        return Answer(status=204)

    def _list(self, request: Request) -> Answer:
        prefix = request.query.get("prefix", "")
        after = request.query.get("continuation-token") or request.query.get("start-after", "")
        seen = self._seen(request)
        keys = sorted(k for k in seen if k.startswith(prefix) and k > after)
        if Quirk.LISTS_UNSORTED in self.quirks:
            keys.reverse()
        if Quirk.FORGETS_IN_LISTS in self.quirks:
            del keys[1::2]
        page, more = keys[:1000], len(keys) > 1000
        if Quirk.LISTS_1000_SILENTLY in self.quirks:
            more = False
        if Quirk.LISTS_MORE_AND_MORE in self.quirks:
            page, more = page if not after else [], True
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(seen[key].data)}</Size>"
            f"<LastModified>{_iso(seen[key].written)}</LastModified>"
            f"<ETag>&quot;{seen[key].etag}&quot;</ETag></Contents>"
            for key in page
        )
        sends_token = (
            more and not {Quirk.LISTS_WITHOUT_TOKENS, Quirk.LISTS_MORE_AND_MORE} & self.quirks
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if sends_token else ""
        return _xml(
            "ListBucketResult",
            f"<Name>{self.bucket}</Name><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}",
        )

    def _list_uploads(self, request: Request) -> Answer:
        items = "".join(
            f"<Upload><Key>{one.key}</Key><UploadId>{name}</UploadId>"
            f"<Initiated>{_iso(one.begun)}</Initiated></Upload>"
            for name, one in self.uploads.items()
            if one.key.startswith(request.query.get("prefix", ""))
        )
        return _xml("ListMultipartUploadsResult", items)

    def _begin(self, request: Request) -> Answer:
        name = uuid.uuid4().hex
        tag = request.headers.get("x-amz-meta-upload")
        self.uploads[name] = Upload(key=request.key, begun=self.now(), tag=tag)
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")

    def _put_part(self, request: Request) -> Answer:
        data = self._body(request)
        etag = hashlib.md5(data).hexdigest()
        parts = self._upload(request).parts
        parts[int(request.query["partNumber"])] = Object(data=data, etag=etag, written=self.now())
        return Answer(headers={"ETag": f'"{etag}"'})

    def _complete(self, request: Request) -> Answer:
        upload = self._upload(request)
        parts = upload.parts
        wanted = [
            (int(part.findtext("{*}PartNumber", "")), part.findtext("{*}ETag", "").strip('"'))
            for part in ElementTree.fromstring(request.body).iter()
            if part.tag.endswith("}Part")
        ]
        if any(number not in parts or parts[number].etag != etag for number, etag in wanted):
            raise FakeError(400, "InvalidPart")
        data = b"".join(parts[number].data for number, _ in wanted)
        etags = b"".join(bytes.fromhex(etag) for _, etag in wanted)
        etag = f"{hashlib.md5(etags).hexdigest()}-{len(wanted)}"
        self._set(upload.key, Object(data=data, etag=etag, written=self.now(), tag=upload.tag))
        del self.uploads[request.query["uploadId"]]
        return _xml("CompleteMultipartUploadResult", f"<ETag>{etag}</ETag>")

    def _abort(self, request: Request) -> Answer:
        self._upload(request)
        del self.uploads[request.query["uploadId"]]
        return Answer(status=204)

    def _upload(self, request: Request) -> Upload:
        try:
            return self.uploads[request.query["uploadId"]]
        except KeyError:
            raise FakeError(404, "NoSuchUpload") from None

    def _body(self, request: Request) -> bytes:
        """The bytes to write, if their checksum is right."""
        digest = base64.b64encode(hashlib.md5(request.body).digest()).decode()
        if request.headers.get("content-md5", digest) != digest:
            raise FakeError(400, "BadDigest")
        return request.body


def _xml(name: str, inner: str) -> Answer:
    text = f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{name}>'
    return Answer(body=text.encode(), headers={"Content-Type": "application/xml"})


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
