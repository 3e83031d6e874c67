"""Text that users saved with other editors, and files that are damaged or not there."""

import bz2
import gzip
import hashlib
import json
import lzma

import pyarrow as pa
import pytest

from tasks import user_files
from tasks.user_files import FileFault, json_lines, read_text, text_chunks

TEXT = "a \x00 \u00e9\r\nb\r\n\r\nc \U0001f600\u2028x\x85y\rd\n"
READ = "a \x00 \u00e9\nb\n\nc \U0001f600\u2028x\x85y\nd\n"
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-be-sig", "utf-32", "utf-32-be-sig")


def encode(text, encoding):
    """Encode with a mark, which Python writes for the machine's byte order alone."""
    name = encoding.removesuffix("-be-sig")
    return text.encode(name) if name == encoding else f"\ufeff{text}".encode(f"{name}-be")


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
COMPRESSORS |= {".GZ": gzip.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", COMPRESSORS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_text_is_the_same_whatever_saved_it(tmp_path, encoding, ending, monkeypatch):
    data, compress = encode(TEXT, encoding), COMPRESSORS[ending]
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(compress(data[:9]) + compress(data[9:]))  # as `cat` joins compressed files
    for size in (1, 7, 1 << 20):  # of what is read at a time
        monkeypatch.setattr(user_files, "_CHUNK", size)
        digest = hashlib.sha256()
        assert "".join(text_chunks(path, digest=digest)) == READ
        assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_text(path) == READ


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n", "\r\n \t\r\n"])
def test_lines_of_json_may_have_any_newlines_and_blank_lines(tmp_path, encoding, newline):
    values = [{"a": "x\u2028\r\n\u00e9"}, [1, None], "\ufeff"]
    lines = [json.dumps(value, ensure_ascii=False) for value in values]
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode(newline.join(lines) + newline, encoding))
    assert [value for _, value in json_lines(path, hint="a line")] == values


def test_files_that_were_joined_with_their_marks_are_lines_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n\xef\xbb\xbf{"a": 2}')
    expected = [(f"{path}:1", {"a": 1}), (f"{path}:3", {"a": 2})]
    assert list(json_lines(path, hint="a line")) == expected
    for content in (b"", b"\xef\xbb\xbf", "".encode("utf-16"), b"\n \n"):
        path.write_bytes(content)
        assert read_text(path).strip() == ""
        assert list(json_lines(path, hint="a line")) == []


LFS = b"version https://git-lfs.github.com/spec/v1\noid"
NO_TEXT = [
    *(("a.txt", b"one\ntwo\n\xff\n"), ("a.txt", "\u00e9".encode()[:1]), ("a.txt", LFS)),
    ("a.txt", "a\r\nb\r\n".encode("utf-16") + b"\x00\xd8a\x00"),
    ("a.txt", encode("\u00d8\r\n" * 400_000, "utf-16-be-sig") + b"\xd8\x00\x00a"),
    ("a.txt", encode("a\n" * 400_000, "utf-16") + b"\x00\xd8a\x00"),
    ("a.txt", encode("a\n" * 300_000, "utf-32-be-sig") + b"aaaa"),
    *(("a.txt", b"a\x00b\x00 c"), ("a.txt", "\u043e, \u043c\n".encode("utf-16-le"))),
    ("a.txt.gz", gzip.compress("a\nb".encode("utf-32-be"), mtime=0)),
    ("a.txt", "\u043f\u0440\u0438\u0432\n".encode("utf-16-le")),
    *(("a.txt", "a\n".encode("utf-16") + b"a"), ("a.gz", b"no"), ("a.bz2", b"no")),
    ("a.gz", gzip.compress(b"a" * 999, mtime=0)[:-9]),
    *(("a.xz", b"not xz at all"), ("a.zst", zstd(b"a" * 999)[:-5])),
]


def test_what_is_no_text_is_named_with_its_line(tmp_path, transcript):
    for name, content in NO_TEXT:
        (tmp_path / name).write_bytes(content)
        head = f"{name} {content[:9]!r} to {content[-9:]!r}"
        transcript.refused(head, FileFault, read_text, tmp_path / name)


def test_a_folder_and_a_missing_file_are_errors_of_the_system(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.gz"):
        with pytest.raises(OSError, match=r"\[Errno"):
            read_text(path)


@pytest.mark.parametrize("size", [0, 1, 999, 1000])
def test_a_line_of_the_largest_size_is_read_and_a_longer_one_named(tmp_path, monkeypatch, size):
    monkeypatch.setattr(user_files, "MAX_LINE", 1002)
    monkeypatch.setattr(user_files, "_CHUNK", 10)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps("x" * size) + "\n\n7")
    assert [value for _, value in json_lines(path, hint="")] == ["x" * size, 7]
    path.write_text("7\n" + json.dumps("x" * 1001))
    with pytest.raises(FileFault, match=f"{path}:2 is longer than") as error:
        list(json_lines(path, hint="a line is a text"))
    assert "a line is a text" in error.value.hint
