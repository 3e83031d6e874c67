"""Read text files of users: with a byte order mark, in UTF-16, with CRLF, compressed.

Editors and exports differ in all of these, and none of them is part of the text.
"""

import codecs
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_LINE = 100_000_000  # characters
_CHUNK = 1 << 20  # bytes
_BEGIN = 1024  # bytes of a file that show whether it is UTF-16 or UTF-32 without a mark
_CONTROL = 9  # a quarter of the bytes of letters in UTF-16 is below, at least; of UTF-8 none
_MARKED = {  # UTF-32 first: its mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_MARK = "\ufeff"  # joined files have it in the middle too
_CONVERT = "convert the file: iconv -f ITS_ENCODING -t utf-8"
_LFS = b"version https://git-lfs.github.com/spec/"


class FileFault(ValueError):
    """A user's file that cannot be read as text: where and why in one line, and what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def check_lfs(path: Path) -> None:
    """Raise FileFault if git has put a pointer in the place of a file that Git LFS stores."""
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise FileFault(
                f"{path} is a pointer of Git LFS, not the file itself",
                "get the file: git lfs pull",
            )


def read_text(path: Path) -> str:
    """Return a small text file. Raises OSError, and FileFault as `text_chunks` does."""
    return "".join(text_chunks(path))


def json_lines(path: Path, *, hint: str, digest: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield ("path:line", value) of each line that is not blank.

    `hint` says what a line is. `digest` gets the file's bytes. Raises OSError, and FileFault as
    `text_chunks` does or naming the line that is not JSON.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse)
    for number, line in enumerate(_lines(path, digest, hint), start=1):
        where = f"{path}:{number}"
        try:
            if line := line.lstrip(_MARK).strip():
                yield where, decoder.decode(line)
        except (ValueError, RecursionError) as error:  # nested too deep
            raise FileFault(f"{where} is not JSON: {error}", hint) from error


def _lines(path: Path, digest: Any, hint: str) -> Iterator[str]:
    """Yield the lines of a file. Raises FileFault for one of more than MAX_LINE characters."""
    parts: list[str] = []  # joined once: a line may be long
    number, size = 1, 0
    for chunk in text_chunks(path, digest=digest):
        first, *more = chunk.split("\n")
        parts.append(first)
        size += len(first)
        if size > MAX_LINE:
            raise FileFault(
                f"{path}:{number} is longer than {MAX_LINE / 1e6:,.0f} MB", f"divide it: {hint}"
            )
        for part in more:
            yield "".join(parts)
            parts, size = [part], len(part)
        number += len(more)
    yield "".join(parts)


def text_chunks(path: Path, *, digest: Any = None) -> Iterator[str]:
    r"""Yield a file's text, about a MB at a time, without a byte order mark, newlines as "\n".

    The encoding is UTF-8 unless the file begins with the mark of UTF-16 or UTF-32. A name that ends
    in one of COMPRESSED is decompressed. `digest` gets all bytes of the file. Raises OSError, and
    FileFault naming the file, and the line that is in another encoding.
    """
    check_lfs(path)
    lines = 1
    with path.open("rb") as file:
        raw = io.BufferedReader(_Hashed(file, digest)) if digest is not None else file
        data = _bytes_of(path, raw)
        begin = b""
        while len(begin) < 4 and (chunk := next(data, b"")):  # a decompressor may give less
            begin += chunk
        marked = (name for mark, name in _MARKED.items() if begin.startswith(mark))
        encoding = next(marked, "utf-8")
        control = [at for at, byte in enumerate(begin[:_BEGIN]) if byte < _CONTROL]
        if encoding.startswith("utf-8") and 4 * len(control) > len(begin[:_BEGIN]):
            raise FileFault(
                f"{path}:{1 + begin[: control[0]].count(10)} is not UTF-8 text: it has many "
                "control bytes, as UTF-16 without a byte order mark",
                f"{_CONVERT}, for example UTF-16LE",
            )
        decoder = codecs.getincrementaldecoder(encoding)()
        newlines = io.IncrementalNewlineDecoder(None, translate=True)
        try:
            for chunk in _with_end(begin, data):
                text = decoder.decode(chunk, final=not chunk)
                lines += text.count("\n")
                yield newlines.decode(text, final=not chunk)
        except UnicodeDecodeError as error:
            # Of the encoding that its mark chose: what follows the first chunk has none.
            lines += error.object[: error.start].decode(error.encoding).count("\n")
            name = "UTF-8" if encoding.startswith("utf-8") else encoding.upper()
            raise FileFault(
                f"{path}:{lines} is not {name}: {error.reason}",
                _CONVERT,
            ) from error
        # What follows the end of compressed data. `raw` may be closed by now, `file` is not.
        while digest is not None and (chunk := file.read(_CHUNK)):
            digest.update(chunk)


def _with_end(begin: bytes, data: Iterator[bytes]) -> Iterator[bytes]:
    yield begin
    yield from data
    if begin:
        yield b""


def _bytes_of(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of an open file, decompressed. Raises FileFault if it is damaged."""
    unpack = COMPRESSED.get(path.suffix.lower())
    if unpack is None:
        while chunk := file.read(_CHUNK):
            yield chunk
        return
    import lzma
    import zlib

    try:
        stream = unpack(file)
        while chunk := stream.read(_CHUNK):
            yield chunk
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk: a decompressor's own has no number
        raise FileFault(
            f"{path} cannot be decompressed: {error}", "it is damaged: get it again"
        ) from error


def _gzip(file: BinaryIO) -> Any:
    import gzip

    return gzip.GzipFile(fileobj=file)


def _bzip2(file: BinaryIO) -> Any:
    import bz2

    return bz2.BZ2File(file)


def _xz(file: BinaryIO) -> Any:
    import lzma

    return lzma.LZMAFile(file)


def _zstd(file: BinaryIO) -> Any:
    import pyarrow as pa  # Python has it from 3.14 on

    return pa.CompressedInputStream(file, "zstd")


COMPRESSED = {".gz": _gzip, ".bz2": _bzip2, ".xz": _xz, ".zst": _zstd}


class _Hashed(io.RawIOBase):
    """A file whose bytes go to a digest as they are read."""

    def __init__(self, file: BinaryIO, digest: Any) -> None:
        self._file, self._digest = file, digest

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes into `buffer`."""
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        return len(data)


def _refuse(constant: str) -> None:
    # Python's parser accepts NaN and Infinity, which are not JSON.
    raise ValueError(f"{constant} is no number in JSON")
