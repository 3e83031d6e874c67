"""How servers that speak S3 differ from AWS, and what happens to single requests."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import Lock

_COUNTING = Lock()


class Quirk(Enum):
    """A way in which a server differs from AWS."""

    IGNORES_IF_NONE_MATCH = auto()
    RACY_IF_NONE_MATCH = auto()
    REFUSES_IF_NONE_MATCH = auto()
    IGNORES_IF_MATCH = auto()
    RACY_IF_MATCH = auto()
    REFUSES_IF_MATCH = auto()
    REFUSES_QUOTED_VERSIONS = auto()
    IGNORES_RANGES = auto()
    LISTS_1000_SILENTLY = auto()
    LISTS_WITHOUT_TOKENS = auto()
    LISTS_MORE_AND_MORE = auto()
    LISTS_UNSORTED = auto()
    FORGETS_IN_LISTS = auto()
    SENDS_NO_DATE = auto()


class Kind(Enum):
    """What happens to a request."""

    RESET = auto()  # the connection is reset before the body is read
    RESET_REQUEST = auto()  # ... after half of the body is read
    RESET_ANSWER = auto()  # carried out; reset after half of the answer
    LOSE = auto()  # carried out, closed without an answer
    CUT = auto()  # the answer's body ends in the middle, then the connection is closed
    HANG = auto()  # carried out; no answer, the connection stays open
    BLACKHOLE = auto()  # not carried out; no answer, the connection stays open
    REFUSE = auto()  # answered with `status` and `code`, not carried out
    REFUSE_AFTER = auto()  # carried out, answered with `status` and `code`
    STATUS = auto()  # not carried out, answered with one of STATUSES
    ERROR_200 = auto()  # not carried out, answered with 200 and an error
    PAGE = auto()  # not carried out, answered with `status`, `headers` and a web page
    SHORTEN = auto()  # half of the answer's body, with a Content-Length that fits
    FLIP = auto()  # a bit of the answer's body is changed
    FLIP_REQUEST = auto()  # a bit of the request's body is changed on its way in
    DRIP = auto()  # the answer comes in small pieces
    DUPLICATE = auto()  # carried out twice; the second answer is sent
    REPLAY = auto()  # a write that is carried out again after some later requests
    STALE = auto()  # a read that is answered as before the last write


# Those of a network or of an overloaded server, which say nothing of how a server is made.
NETWORK_FAULTS = tuple(kind for kind in Kind if kind not in (Kind.REFUSE, Kind.PAGE))
STATUSES = (
    (503, "SlowDown"),
    (503, "ServiceUnavailable"),
    (500, "InternalError"),
    (502, "BadGateway"),
    (504, "GatewayTimeout"),
    (429, "TooManyRequests"),
    (400, "RequestTimeout"),
)
CONFLICT = (409, "ConditionalRequestConflict")  # to conditional writes that meet each other


@dataclass(kw_only=True)
class Request:
    """What a client asks for."""

    method: str
    key: str  # "" for the bucket
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes
    bucket: str
    is_stale: bool = False  # answered as before the last write

    @property
    def verb(self) -> str:
        """Return GET, or with what S3 names in the query: "POST uploads", "PUT partNumber"."""
        names = ("partNumber", "uploads", "uploadId", "list-type")
        return " ".join([self.method, *(name for name in names if name in self.query)][:2])

    @property
    def is_conditional(self) -> bool:
        """Return whether it is a conditional write."""
        return not {"if-match", "if-none-match"}.isdisjoint(self.headers)


@dataclass(kw_only=True)
class Fault:
    """Happens to some of the requests that match."""

    kind: Kind
    verb: str = ".*"  # a regular expression over the whole Request.verb
    key: str = ""  # another one, anywhere in the key
    skip: int = 0  # the first so many pass
    times: int = 1 << 30
    every: int = 1  # only each so-manieth
    status: int = 503
    code: str = "SlowDown"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    seen: int = 0
    fired: int = 0

    def fires(self, request: Request) -> bool:
        """Count the request if it matches; return whether the fault happens to it."""
        if not re.fullmatch(self.verb, request.verb) or not re.search(self.key, request.key):
            return False
        with _COUNTING:
            self.seen += 1
            if self.seen <= self.skip or self.fired >= self.times or self.seen % self.every:
                return False
            self.fired += 1
            return True


@dataclass(kw_only=True)
class Answer:
    """What is sent back."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])


PAGE = b"<!DOCTYPE html><html><head><title>Log in</title></head><body>Wi-Fi<br></body></html>"


class FakeError(Exception):
    """An answer with an error of S3."""

    def __init__(self, status: int, code: str, headers: Mapping[str, str] = {}) -> None:
        super().__init__(code)
        self.status, self.code, self.headers = status, code, headers

    def answer_to(self, request: Request) -> Answer:
        """Return the answer, without a body if the request is a HEAD."""
        text = f"<Error><Code>{self.code}</Code><Message>says the fake</Message></Error>"
        return Answer(
            status=self.status,
            body=b"" if request.method == "HEAD" else text.encode(),
            headers={"Content-Type": "application/xml", **self.headers},
        )
