"""`nanochat data stats`: exact counts of every document, scripts of a sample, by name or place."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.artifacts.revocations import revoke
from flows.cli.artifacts.data_stats import PLACES, find_text_files, measure_text
from flows.identity.manifest import Manifest
from infra.storage.base import Store
from nanochat_core.data.shard_files import ShardSet, shard_name, write_shard
from tests.support.flows.rows import publish_directory
from tests.support.flows.shelf import CREATED, make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal

SCRIPTS = {
    "Latin": "a\u00e9\u00df",
    "Cyrillic": "\u043f\u0440\u0438",
    "CJK": "\u4e2d\u3042\ud55c",
    "Arabic": "\u0645\u0631\u062d",
    "Devanagari": "\u0928\u093f\u092e",
    "digits": "19\u0667",
    "punctuation": ".(+",
    "white space": " \n\u00a0",
    "other": "\u05d0\u0e01\u0301",
}


def write_shards(directory: Path, *documents: list[str]) -> Path:
    directory.mkdir(parents=True)
    shards = [
        write_shard(directory / shard_name(n), texts, scratch=directory.parent)
        for n, texts in enumerate(documents)
    ]
    ShardSet(directory=directory, shards=tuple(shards)).write()
    return directory


def write(path: Path, texts: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), path, **options)
    return path


def publish_shards(store: Store, directory: Path) -> Manifest:
    manifest = publish_directory(store, "shards", directory)
    put_run(store, "tiny-1", manifest)
    return manifest


def test_every_document_is_counted_and_measured(tmp_path: Path):
    texts = ["a" * 3, "\u4e2d" * 5, "\U0001f926\u0301", "x" * 1024]
    directory = write_shards(tmp_path / "shards", texts[:3], texts[3:])
    found = measure_text(find_text_files(directory))
    totals = {"documents": 4, "characters": 3 + 5 + 2 + 1024, "bytes": 3 + 15 + 6 + 1024}
    assert found.totals == totals
    first, last = found.files
    assert (first.name, first.split, first.longest) == ("shard_00000.parquet", "train", 5)
    assert (last.split, last.documents, last.characters) == ("validation", 1, 1024)
    assert [(b.least, b.documents) for b in found.lengths if b.documents] == [
        (2, 2),
        (4, 1),
        (1024, 1),
    ]
    assert [length.least for length in found.lengths] == [2**n for n in range(1, 11)]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 8, 1023, 1024, 2**20 - 1, 2**20])
def test_a_bin_begins_at_a_power_of_two(tmp_path: Path, number: int):
    found = measure_text(find_text_files(write(tmp_path / "a.parquet", ["x" * number])))
    (only,) = found.lengths
    assert only.least <= number < 2 * only.least


def test_null_and_empty_documents_are_counted_apart(tmp_path: Path):
    found = measure_text(find_text_files(write(tmp_path / "a.parquet", ["", None, "ab"])))
    assert found.totals == {"documents": 3, "characters": 2, "bytes": 2}
    assert [(b.least, b.documents) for b in found.lengths] == [(0, 2), (1, 0), (2, 1)]


def test_a_file_of_nothing_but_nulls_has_no_scripts(tmp_path: Path, terminal: Terminal):
    path = write(tmp_path / "a.parquet", pa.array([None, None], pa.string()))
    lines = terminal.said("data", "stats", str(path))
    assert lines[0] == "1 file: 2 documents, 0 characters, 0 bytes of text"
    assert lines[-1] == "scripts, in a sample of 2 documents (0 characters):"


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_character_belongs_to_one_script(tmp_path: Path, name: str):
    found = measure_text(find_text_files(write(tmp_path / "a.parquet", [SCRIPTS[name]])))
    assert found.scripts == {**dict.fromkeys(SCRIPTS, 0.0), name: 1.0}
    assert found.sampled_characters == 3


def test_shares_are_of_all_characters(tmp_path: Path):
    texts = ["ab \u043f" * 10, "1\u4e2d"]
    found = measure_text(find_text_files(write(tmp_path / "a.parquet", texts)))
    assert next(iter(found.scripts.items())) == ("Latin", 20 / 42)
    assert found.scripts["CJK"] == found.scripts["digits"] == 1 / 42
    assert sum(found.scripts.values()) == pytest.approx(1.0)


def test_the_sample_is_spread_over_the_file_and_of_beginnings(tmp_path: Path):
    parts = ["a", "\u043f", "\u4e2d", "1"]
    assert len(parts) == PLACES
    texts = [part * 5 for part in parts for _ in range(1000)]
    found = measure_text(find_text_files(write(tmp_path / "a.parquet", texts, row_group_size=100)))
    assert found.sampled_documents == 512
    assert {found.scripts[name] for name in ("Latin", "Cyrillic", "CJK", "digits")} == {0.25}
    path = write(tmp_path / "long.parquet", ["a" * 10_000 + "\u043f" * 10_000])
    assert measure_text(find_text_files(path)).scripts["Cyrillic"] == 0.0


def test_a_directory_is_shown_as_a_table_with_bars(tmp_path: Path, terminal: Terminal):
    directory = write_shards(tmp_path / "shards", ["abcd", "ab", "ab", "ab"], ["\u4e2d\u4e2d"])
    assert terminal.said("data", "stats", str(directory)) == [
        "2 files: 5 documents, 12 characters, 16 bytes of text",
        "",
        "file                 split       documents  characters  mean  longest  bytes a character",
        "shard_00000.parquet  train               4          10     2        4              1.000",
        "shard_00001.parquet  validation          1           2     2        2              3.000",
        "",
        "characters       documents",
        "         2  - 3          4  80.0 %  ########################################",
        "         4  - 7          1  20.0 %  ##########",
        "",
        "scripts, in a sample of 5 documents (12 characters):",
        "Latin  83.3 %  ########################################",
        "CJK    16.7 %  ########",
    ]


def test_many_files_are_cut_short_in_the_table_and_nowhere_else(tmp_path: Path, terminal: Terminal):
    for number in range(30):
        write(tmp_path / "text" / f"{number:02}.parquet", ["x"])
    lines = terminal.said("data", "stats", str(tmp_path / "text"))
    assert lines[0].startswith("30 files: 30 documents")
    assert "... 6 more; --json has all" in lines
    assert any(line.startswith("29.parquet") for line in lines)
    assert not any(line.startswith("28.parquet") for line in lines)
    assert len(terminal.read("data", "stats", str(tmp_path / "text"))["files"]) == 30


def test_json_has_every_number(tmp_path: Path, terminal: Terminal):
    path = write(tmp_path / "deep" / "a.parquet", ["ab"])
    assert terminal.read("data", "stats", str(tmp_path)) == {
        "documents": 1,
        "characters": 2,
        "bytes": 2,
        "files": [
            {
                "name": "deep/a.parquet",
                "split": "",
                "documents": 1,
                "characters": 2,
                "bytes": 2,
                "longest": 2,
            }
        ],
        "lengths": [{"least": 2, "documents": 1, "characters": 2}],
        "scripts": {**dict.fromkeys(SCRIPTS, 0.0), "Latin": 1.0},
        "sampled_documents": 1,
        "sampled_characters": 2,
    }
    assert terminal.read("data", "stats", str(path))["files"][0]["name"] == "a.parquet"


@pytest.mark.parametrize("form", ["shards@tiny", "tiny", "shards@tiny-1", "shards/{}"])
def test_shards_are_found_by_every_name(
    store: Store, tmp_path: Path, terminal: Terminal, form: str
):
    manifest = publish_shards(store, write_shards(tmp_path / "made", ["abc"], ["d"]))
    name = form.format(manifest.fingerprint[:8])
    lines = terminal.said("data", "stats", name)
    assert lines[0] == "2 files: 2 documents, 4 characters, 4 bytes of text"


def test_revoked_shards_are_refused_unless_asked_for_by_fingerprint(
    store: Store, tmp_path: Path, terminal: Terminal
):
    manifest = publish_shards(store, write_shards(tmp_path / "made", ["abc"], ["d"]))
    revoke(store, manifest, why="bad", who="me", when=CREATED)
    assert "revoked" in terminal.fails("data", "stats", "tiny")[0]


def test_an_artifact_without_documents_is_refused(store: Store, terminal: Terminal):
    manifest = put_artifact(store, make_manifest("tokens"))
    put_run(store, "tiny-1", manifest)
    error, hint = terminal.fails("data", "stats", "tokens@tiny")
    assert error == f"{manifest.name} has no documents: it is of stage tokens"
    assert "shards@RUN" in hint


def test_a_place_that_is_not_there_is_said(tmp_path: Path, terminal: Terminal):
    error, _ = terminal.fails("data", "stats", str(tmp_path / "nothing"))
    assert error == f"{tmp_path / 'nothing'} does not exist"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    error, hint = terminal.fails("data", "stats", str(tmp_path / "empty"))
    assert error == f"{tmp_path / 'empty'} has no parquet file"
    assert "column named text" in hint


def not_utf8() -> pa.Array:
    return pa.array([b"fine", b"\xff", b"fine"], pa.binary()).view(pa.string())


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"text": not_utf8()}, "is not UTF-8 in row 1 (row group 0): invalid start byte"),
        ({"content": ["a"]}, "has no column 'text', its columns are: content"),
        ({"text": [1]}, "has a column 'text' of int64, not strings"),
        ({"text": [b"a"]}, "has a column 'text' of binary, not strings"),
        ({"text": pa.array([], pa.string())}, "is empty"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, terminal: Terminal, table: dict[str, Any], complaint: str
):
    write(tmp_path / "a.parquet", ["fine"])
    pq.write_table(pa.table(table), tmp_path / "b.parquet")
    assert terminal.fails("data", "stats", str(tmp_path))[0] == f"{tmp_path}/b.parquet {complaint}"


@pytest.mark.parametrize("place", [0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, terminal: Terminal, place: float):
    write(tmp_path / "a.parquet", ["fine"])
    path = write(tmp_path / "b.parquet", [f"document {i}" for i in range(5000)])
    path.write_bytes(path.read_bytes()[: int(place * path.stat().st_size)])
    error, _ = terminal.fails("data", "stats", str(tmp_path))
    assert error.startswith(f"{path} cannot be read as parquet")


def test_a_file_that_is_damaged_inside_is_named(tmp_path: Path, terminal: Terminal):
    texts = [f"document {i} " * 20 for i in range(400)]
    path = write(tmp_path / "b.parquet", texts, row_group_size=200, compression="zstd")
    place = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + b"\x00" * 100 + whole[place + 100 :])
    error, _ = terminal.fails("data", "stats", str(tmp_path))
    assert error.startswith(f"{path} is damaged in row group 1")


def test_names_of_files_cannot_move_the_cursor(tmp_path: Path, terminal: Terminal):
    write(tmp_path / "\x1b[2Ja'b.parquet", ["fine"])
    lines = terminal.said("data", "stats", str(tmp_path))
    assert any(line.startswith("\\x1b[2Ja'b.parquet") for line in lines)


def test_the_group_says_what_it_has(terminal: Terminal):
    assert any("stats" in line for line in terminal.said("data"))
    error, hint = terminal.fails("data", "nothing")
    assert error == "unknown command 'nothing'"
    assert "stats" in hint
    assert terminal.fails("data", "stats")[0] == "data stats needs REF|DIRECTORY"
