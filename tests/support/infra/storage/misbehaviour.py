"""How servers that speak S3 differ from AWS, and what happens to single requests."""

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
    CHECKS_NO_CHECKSUMS = auto()
    REFUSES_MD5 = auto()
    LISTS_NO_UPLOADS = auto()
    LISTS_WITHOUT_TOKENS = auto()
    LISTS_MORE_AND_MORE = auto()
    LISTS_UNSORTED = auto()
    FORGETS_IN_LISTS = auto()
    SENDS_NO_DATE = auto()


class Kind(Enum):
    """What happens to a request."""

    RESET = auto()  # closed before it is carried out
    LOSE = auto()  # carried out, closed without an answer
    REFUSE = auto()  # answered with `status` and `code`, not carried out
    REFUSE_AFTER = auto()  # carried out, answered with `status` and `code`
    FLIP_REQUEST = auto()  # a byte of the body is changed on its way in
    CUT = auto()  # the answer's body ends in the middle, then the connection is closed
    SHORTEN = auto()  # the answer's body is shorter, and so is its Content-Length
    FLIP = auto()  # a byte of a good answer's body is changed
    ERROR_200 = auto()  # carried out not at all, but answered with 200 and an error
    PAGE = auto()  # not carried out, answered with `status`, `headers` and a web page
    HANG = auto()  # not answered for as long as `seconds`


@dataclass(kw_only=True)
class Request:
    """What a client asked."""

    method: str
    key: str  # "" for the bucket
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes
    bucket: str

    @property
    def verb(self) -> str:
        """GET, or with what S3 names in the query: "POST uploads", "PUT partNumber"."""
        names = ("partNumber", "uploads", "uploadId", "list-type")
        return " ".join([self.method, *(name for name in names if name in self.query)][:2])


@dataclass(kw_only=True)
class Fault:
    """What happens to some of the requests that match."""

    kind: Kind
    verb: str  # as Request.verb, "*" for all
    key: str = ""  # a piece of it
    skip: int = 0  # the first so many pass
    times: int = 1 << 30
    every: int = 1  # only each so-manieth
    status: int = 503
    code: str = "SlowDown"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0
    seen: int = 0
    fired: int = 0

    def fires(self, request: Request) -> bool:
        """Whether it happens to this request."""
        if self.verb not in ("*", request.verb) or self.key not in request.key:
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
    """The server says no."""

    def __init__(self, status: int, code: str, headers: Mapping[str, str] = {}) -> None:
        super().__init__(code)
        self.answer = Answer(
            status=status,
            body=f"<Error><Code>{code}</Code><Message>says the fake</Message></Error>".encode(),
            headers={"Content-Type": "application/xml", **headers},
        )
