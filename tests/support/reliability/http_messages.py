"""Whole HTTP/1.1 messages, read from and written to asyncio streams: what the fault proxy needs."""

import asyncio
from dataclasses import dataclass, replace

_HOP_BY_HOP = ("content-length", "transfer-encoding", "connection", "keep-alive", "expect")
_NO_BODY = (204, 304)


@dataclass(frozen=True, kw_only=True)
class Message:
    """A request or an answer."""

    first: str  # the request line or the status line
    headers: tuple[tuple[str, str], ...]
    body: bytes
    announced: int | None = None  # the Content-Length, where it is not that of the body

    @property
    def method(self) -> str:
        """Of a request: GET, PUT, ..."""
        return self.first.split(" ")[0]

    @property
    def target(self) -> str:
        """Of a request: path and query."""
        return self.first.split(" ")[1]

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.first.split(" ")[1])

    def header(self, name: str) -> str:
        """The value of a header, by its name in small letters; empty without one."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def encode(self) -> bytes:
        """The message as it goes over the wire."""
        lines = [f"{k}: {v}" for k, v in self.headers if k.lower() not in _HOP_BY_HOP]
        length = len(self.body) if self.announced is None else self.announced
        if not (self.first.startswith("HTTP/") and self.status in _NO_BODY):
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([self.first, *lines, "", ""]).encode("latin-1") + self.body


async def read_head(reader: asyncio.StreamReader) -> Message | None:
    """The next message without its body, or None when the connection was closed before it."""
    try:
        data = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = tuple((key, value.strip()) for key, _, value in pairs)
    return Message(first=first, headers=headers, body=b"")


async def read_body(head: Message, reader: asyncio.StreamReader) -> Message:
    """The request whose head was read, with its body."""
    return replace(head, body=await _read_content(head, reader))


async def exchange(address: tuple[str, int], request: Message) -> Message:
    """Send a request over a connection of its own; returns the whole answer."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    try:
        writer.write(request.encode())
        answer = await read_head(reader)
        while answer is not None and answer.status == 100:
            answer = await read_head(reader)
        if answer is None:
            raise ConnectionResetError(f"no answer to {request.first}")
        if request.method == "HEAD":
            return replace(answer, announced=int(answer.header("content-length") or 0))
        return replace(answer, body=await _read_content(answer, reader))
    finally:
        writer.close()


async def _read_content(head: Message, reader: asyncio.StreamReader) -> bytes:
    if head.header("transfer-encoding").lower() != "chunked":
        return await reader.readexactly(int(head.header("content-length") or 0))
    chunks: list[bytes] = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
    return b"".join(chunks)
