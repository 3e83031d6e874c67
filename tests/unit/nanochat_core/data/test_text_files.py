"""Which files are text, what is said of the others, and how documents are divided."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat_core.config import ShardsConfig
from nanochat_core.data.text import local_text, text_files
from nanochat_core.data.text.text_files import KINDS, choose_text, documents_of, kind_of_file
from nanochat_core.data.text.text_folder import files_below, folder_snapshot
from nanochat_core.runtime.progress import Progress
from tests.support.nanochat_core.data.fixtures import refused
from tests.support.nanochat_core.data.fixtures import shards_config as config


def texts_of(path, **changes):
    return [document.text for document in documents_of(path, config(**changes))]


def choose(sizes, **options):
    """Name -> bytes; returns the chosen names and the lines of the log."""
    log, size_of = [], sizes.__getitem__
    chosen = choose_text(sizes, "here", path_of=str, size_of=size_of, log=log.append, **options)
    return chosen, log


NAMES = {  # a kind of text -> names of files
    **{".jsonl": ["A.JSONL", "a.jsonl.gz"], ".parquet": ["deep/A.Parquet"]},
    **{".txt": ["a.TXT.Zst", "a.b.txt.bz2"], ".ndjson": ["a.ndjson.xz"]},
    None: ["a.parquet.gz", "a.md", "a.gz", "txt", ".txt", "a.txt/b"],
}


def test_an_ending_says_what_is_text_in_capital_letters_and_compressed_too():
    assert [kind_of_file(f"a{kind}") for kind in KINDS] == [*KINDS]
    for kind, names in NAMES.items():
        assert {name: kind_of_file(name) for name in names} == dict.fromkeys(names, kind)


def test_what_is_left_out_is_counted_by_ending():
    chosen, log = choose({"a.txt": 9, "b.TXT": 9, "c.md": 1, "d.MD": 1, "e.csv": 1, "LICENSE": 1})
    assert chosen == ["a.txt", "b.TXT"]
    assert log == [
        "left out of here: 4 of 6 files are not text: 2 .md, 1 .csv, 1 without an ending"
    ]
    many = {f"a.x{i}": 1 for i in range(9)}
    assert choose({"a.txt": 99} | many)[1][0].endswith("1 .x0, 1 .x1, 1 .x2, 1 .x3, others")
    assert choose({"a.txt": 1, "b.jsonl": 1})[1] == []


MOSTLY_LEFT_OUT = [
    *({"a.md": 1}, {"a.md": 1, "b.csv": 2, ".hidden.txt": 9}, {"a.txt": 10, "b.md": 11}),
    {"a.txt": 10, **{f"{i}.md": 10 for i in range(3)}},
    {"a.jsonl": 10**7, "b.json": 6 * 10**6, "c.json": 5 * 10**6},
    {"a.txt": 10, "b.txt": 10, "c.txt": 10, "big.csv": 10**9},
    *({"data/readme/a.txt": 10, "data/readme/b.csv": 11}, {"a.txt": 0, "b.pdf": 1}),
    {"a.txt": 10, "readme_dump.csv": 10**10},
    {"notes.txt": 10, **{f"{i}.json": 10**6 for i in range(11)}},  # each of which is small
]
WITH_SOME_OTHERS = [
    {"data.jsonl": 10**9, "README.md": 9, "LICENSE": 9, "dataset_infos.json": 9},  # of the Hub
    {"a.txt": 1, "README.md": 5000, "data/LICENSE.txt.md": 900, "Readme": 9},
    {"a.parquet": 100, "dataset_infos.json": 10**6, "data/state.json": 10**6},
    {"a.txt": 10, "b.md": 10},
]


def test_text_that_would_mostly_be_left_out_is_an_error():
    for sizes in MOSTLY_LEFT_OUT:
        refused(r"files are not text: \d+ \.", choose, sizes, hint="convert")
    for sizes in WITH_SOME_OTHERS:
        assert len(choose(sizes)[1]) == 1


@pytest.mark.parametrize(
    ("named", "path", "is_read"),
    [
        ("bucket/.cache/text", "bucket/.cache/text/a.txt", True),
        ("bucket/.cache/*/a*", "bucket/.cache/text/a.txt", True),
        ("bucket/a/__MACOSX", "bucket/a/__MACOSX/a.txt", True),
        (".a.txt", ".a.txt", True),
        ("bucket/.cache", "bucket/.cache/.git/a.txt", False),
        ("bucket/*", "bucket/.cache/a.txt", False),
        ("bucket", "bucket/text/.a.txt", False),
        ("", ".cache/a.txt", False),
    ],
)
def test_what_a_user_named_is_read_although_it_is_hidden(named, path, is_read):
    assert choose({path: 1, "b.txt": 1}, named=named)[0] == [*([path] if is_read else []), "b.txt"]


def test_hidden_files_and_those_of_macos_are_not_data_but_a_folder_in_a_hidden_one_is(tmp_path):
    folder, names = tmp_path / ".cache" / "letters", ("a.txt", "deep/b.txt")
    hidden = ("._a.jsonl", "deep/._b.txt", "__MACOSX/a.txt", ".git/c.txt", ".DS_Store", "x/.a.txt")
    for name in (*names, *hidden):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    assert sorted(files_below(folder)) == [folder / name for name in names]
    assert choose(dict.fromkeys((*names, *hidden), 1)) == ([*names], [])
    settings = config(path=folder)
    (folder / ".DS_Store").write_text("opened in the Finder")
    assert folder_snapshot(folder) == settings.snapshot
    found = local_text.documents(settings, Progress(tmp_path / "events.jsonl"), tmp_path)
    assert [document.text for document in found] == ["text", "text"]


def test_documents_are_the_same_whichever_editor_saved_them(tmp_path):
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in ("\u00e9\r\na", "b")]
    (tmp_path / "a.jsonl").write_bytes("\r\n\r\n".join(["", *lines, ""]).encode("utf-16"))
    assert texts_of(tmp_path / "a.jsonl") == ["\u00e9\r\na", "b"]  # of an escape, as it is written
    (tmp_path / "a.txt").write_bytes("\u00e9\r\n\r\nb\r\n".encode("utf-16"))
    assert texts_of(tmp_path / "a.txt", separator="\n\n") == ["\u00e9", "b\n"]
    # The marks of files that were joined are not text.
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\n\n\xef\xbb\xbfb" + "\ufeffc".encode())
    assert texts_of(tmp_path / "a.txt", separator="\n\n") == ["a", "bc"]


@pytest.mark.parametrize(
    ("separator", "documents"),
    [
        (None, ["# A\na\n\n# B\nb<|endoftext|>c\n"]),
        ("\n", ["# A", "a", "", "# B", "b<|endoftext|>c", ""]),
        ("\n\n", ["# A\na", "# B\nb<|endoftext|>c\n"]),
        ("\n# ", ["# A\na\n", "B\nb<|endoftext|>c\n"]),
        (r"\n\n", ["# A\na", "# B\nb<|endoftext|>c\n"]),
        (r"\r\n\r\n", ["# A\na", "# B\nb<|endoftext|>c\n"]),
        ("\r\n\r\n", ["# A\na", "# B\nb<|endoftext|>c\n"]),
        ("<|endoftext|>", ["# A\na\n\n# B\nb", "c\n"]),
        ("none of it", ["# A\na\n\n# B\nb<|endoftext|>c\n"]),
    ],
)
def test_a_txt_is_divided_by_a_separator(tmp_path, separator, documents, monkeypatch):
    (tmp_path / "input.txt").write_text("# A\na\n\n# B\nb<|endoftext|>c\n")
    for size in (1, 5, 1 << 20):  # a separator may lie across what is read at a time
        monkeypatch.setattr("tasks.user_files._CHUNK", size)
        assert texts_of(tmp_path / "input.txt", separator=separator) == documents


def test_a_large_txt_is_read_if_its_documents_are_small(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_IN_TXT", 1000)
    monkeypatch.setattr("tasks.user_files._CHUNK", 100)
    (tmp_path / "a.txt").write_text("some text\n\n" * 500)
    refused(r"a \.txt is one document", texts_of, tmp_path / "a.txt", hint="shards.separator")
    assert len(texts_of(tmp_path / "a.txt", separator="\n\n")) == 501
    complaint, hint = r"a document of more than .* between separators", "choose a shards.separator"
    refused(complaint, texts_of, tmp_path / "a.txt", separator="none of it", hint=hint)


def test_a_separator_has_one_identity_however_it_is_written():
    for spellings in (
        ("\n\n", r"\n\n", "\r\n\r\n", r"\r\n\r\n", "\r\r"),
        ("\t#", r"\t#"),
        ("<|end|>",),
    ):
        trees = [config(separator=each) for each in spellings]
        trees += [ShardsConfig.from_tree(tree.tree()) for tree in trees]
        assert {tree.canonical()["separator"] for tree in trees} == {spellings[0]}
    assert config(separator=None).separator is None
    assert config(separator="").separator == ""


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.txt"])
def test_a_pointer_of_git_lfs_says_how_to_get_the_file(tmp_path, name):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / name).write_bytes(pointer)
    hint = "get the file: git lfs pull"
    refused(f"{name} is a pointer of Git LFS", texts_of, tmp_path / name, hint=hint)


def test_a_part_without_rows_and_a_text_of_bytes_are_read(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    pq.write_table(pa.table({"body": [b"\xc3\xa9"]}), tmp_path / "bytes.parquet")
    assert texts_of(tmp_path / "empty.parquet") == []
    (tmp_path / "a.jsonl").write_text('{"body": "a"}')
    assert texts_of(tmp_path / "bytes.parquet", column="body") == ["\u00e9"]
    assert texts_of(tmp_path / "a.jsonl", column="body") == ["a"]
