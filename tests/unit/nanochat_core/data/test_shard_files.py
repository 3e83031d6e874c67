"""The shard format: what is read, counted and refused, with the place in the file."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat_core.data.shard_files import (
    Origin,
    ShardFile,
    ShardSet,
    find_text_digest,
    inspect_shard,
    read_batches,
    row_group_sizes,
    write_shard,
    write_without_blanks,
)
from tests.support.nanochat_core.data.fixtures import refused

DOCUMENTS = [f"document {i}: {'lorem ipsum ' * (i % 7)}\nend" for i in range(400)]


def inspect(path):
    return inspect_shard(path, name="shard")


def write(path, texts, **options):
    pq.write_table(pa.table({"text": texts}), path, **options)
    return path


def test_a_shard_is_read_in_row_groups_and_counted(tmp_path):
    texts = ["\u00e9t\u00e9 \u4e2d", "", *DOCUMENTS * 3]
    path = tmp_path / "shard.parquet"
    made = write_shard(path, texts, scratch=tmp_path)
    groups = list(read_batches(path))
    assert sum(map(len, groups)) == 1202
    assert row_group_sizes(path) == (1024, 178)
    assert [text for group in groups for text in group] == texts
    assert made == ShardFile(name="shard.parquet", documents=1202, characters=sum(map(len, texts)))
    assert inspect(path) == (ShardFile(name="shard", documents=1201, characters=made.characters), 1)


def test_blank_documents_are_null_empty_or_white_space(tmp_path):
    texts = ["a b", None, "", " \n\t", "\u2003\u00a0", "c", None]
    path = write(tmp_path / "shard.parquet", texts)
    shard, blanks = inspect(path)
    assert (shard.documents, shard.characters, blanks) == (2, 4, 5)
    assert list(read_batches(path)) == [["a b", "", "", " \n\t", "\u2003\u00a0", "c", ""]]


def test_a_shard_without_its_blanks_keeps_its_row_groups(tmp_path):
    texts = ["a", None, "b", "", " ", None, "c", "d"]
    path = write(tmp_path / "shard.parquet", pa.array(texts, pa.large_string()), row_group_size=2)
    (tmp_path / "scratch").mkdir()
    written = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
    for target in written:
        write_without_blanks(path, target, scratch=tmp_path / "scratch")
    assert list(read_batches(written[0])) == [["a"], ["b"], ["c", "d"]]
    assert written[0].read_bytes() == written[1].read_bytes()
    assert inspect(written[0])[1] == 0
    assert list((tmp_path / "scratch").iterdir()) == []


NO_SHARDS = [
    ({"content": ["a"], "id": [1]}, "has no column 'text', its columns are: content, id"),
    ({"text": [1, 2]}, "has a column 'text' of int64, not strings"),
    ({"text": [None]}, "has a column 'text' of null, not strings"),
    ({"text": [["a"]]}, "has a column 'text' of list"),
]


@pytest.mark.parametrize(("table", "complaint"), NO_SHARDS)
def test_a_parquet_file_that_is_no_shard_is_named(tmp_path, table, complaint):
    path = tmp_path / "shard.parquet"
    pq.write_table(pa.table(table), path)
    refused(f"{path} {complaint}", inspect, path, hint="")


def test_two_columns_of_one_name_are_one_line(tmp_path):
    path = tmp_path / "shard.parquet"
    texts = pa.array(["a"])
    pq.write_table(pa.Table.from_arrays([texts, texts], names=["text", "text"]), path)
    complaint = "has 2 columns 'text', its columns are: text, text"
    refused(f"{path} {complaint}", list, read_batches(path))


def test_a_column_is_found_whatever_its_name(tmp_path):
    path = tmp_path / "shard.parquet"
    table = {"a": [{"b": "no"}], "a.b": ["yes"], "text.a": ["no"], "text": ["yes"]}
    pq.write_table(pa.table(table), path)
    assert [list(read_batches(path, column=name)) for name in ("text", "a.b")] == [[["yes"]]] * 2


TEXT_TYPES = [
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
    pa.json_(pa.string()),
]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_text_of_every_type_of_strings_is_read(tmp_path, kind):
    texts = ["\u00e9t\u00e9", None, "", "\U0001f600 long " * 9, "\u00e9t\u00e9"] * 100
    plain = pa.array(texts)
    is_wrapped = isinstance(kind, pa.BaseExtensionType)
    typed = kind.wrap_array(plain) if is_wrapped else plain.cast(kind)
    path = write(tmp_path / "shard.parquet", typed, row_group_size=300)
    assert [text for texts in read_batches(path) for text in texts] == [t or "" for t in texts]
    assert inspect(path)[1] == 200


def test_a_column_of_categories_is_refused_with_what_to_do(tmp_path):
    path = write(tmp_path / "shard.parquet", pa.array(["a", "b"]).dictionary_encode())
    refused("of dictionary<.*, not strings", inspect, path, hint="no dictionary or category")


def test_an_empty_file_an_empty_row_group_and_blank_text_have_no_documents(tmp_path):
    path = write(tmp_path / "shard.parquet", pa.array([], pa.string()))
    assert list(read_batches(path)) == []
    refused(f"{path} is empty", inspect, path)
    write(path, [None, "", "  "])
    refused(f"{path} has 3 documents, all of them blank", inspect, path)
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        for texts in (["a"], [], ["b"]):
            writer.write_table(pa.table({"text": pa.array(texts, pa.string())}))
    assert [text for texts in read_batches(path) for text in texts] == ["a", "b"]


@pytest.mark.parametrize(("size", "count"), [(100, 200_000), (4_000, 6_000), (5_000_000, 6)])
def test_a_row_group_of_any_size_is_read_in_few_megabytes(tmp_path, size, count):
    texts = pa.array([f"{i:x}".rjust(size, "\u00e9") for i in range(count)])
    options = {"row_group_size": count, "write_batch_size": 1, "data_page_size": 1 << 20}
    path = write(tmp_path / "shard.parquet", texts, **options)
    del texts
    before, most, read = pa.total_allocated_bytes(), 0, 0
    for batch in read_batches(path):
        most = max(most, pa.total_allocated_bytes() - before)
        read += len(batch)
    assert read == count
    assert most < 2 * (10 << 20) + 3 * 2 * size  # the whole group has at least 40 MB


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_text_that_is_not_utf8_is_named_with_its_row(tmp_path, kind):
    data = [b"fine", "\u00e9".encode()] * 3 + [b"\xff\xfe", b"fine"]
    binary = pa.large_binary() if kind == pa.large_string() else pa.binary()
    path = write(tmp_path / "shard.parquet", pa.array(data, binary).view(kind), row_group_size=4)
    refused(f"{path} is not UTF-8 in row 6 .row group 1.: invalid", inspect, path)


DAMAGE = {
    "half of it": lambda whole: whole[: len(whole) // 2],
    "without its last byte": lambda whole: whole[:-1],
    "without its end": lambda whole: whole[:-8],
    "nothing": lambda whole: b"",
    "a name of a column that is no text": lambda whole: whole.replace(b"text", b"te\xffx"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named(tmp_path, damage):
    path = write(tmp_path / "shard.parquet", DOCUMENTS)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    refused(f"{path} cannot be read as parquet", inspect, path, hint="get it again")
    assert find_text_digest(path) is None


def test_a_shard_that_is_damaged_inside_is_named_with_its_row_group(tmp_path):
    path = write(tmp_path / "shard.parquet", DOCUMENTS, row_group_size=200)
    whole = path.read_bytes()
    place = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    path.write_bytes(whole[:place] + b"\x00" * 100 + whole[place + 100 :])
    refused(r"shard\.parquet is damaged in row group 1", list, read_batches(path))


def test_a_directory_without_shards_is_refused(tmp_path, write_shards):
    refused("holds no shards", ShardSet.open, tmp_path)
    directory = write_shards([["a"], ["b"]])
    (directory / "shard_00000.parquet").unlink()
    refused(r"shard_00000\.parquet is missing", ShardSet.open, directory)


def test_shards_remember_where_they_came_from(write_shards):
    made = ShardSet.open(write_shards([["a"], ["b"]]))
    assert made.origin is None
    origin = Origin(repository="me/data", revision="main", commit="0" * 40)
    ShardSet(directory=made.directory, shards=made.shards, origin=origin).write()
    assert ShardSet.open(made.directory).origin == origin


def test_text_has_one_digest_whichever_version_and_compression_wrote_it(tmp_path):
    texts = ["\u00e9t\u00e9 \u4e2d", "", *DOCUMENTS * 3]
    path, other = tmp_path / "shard.parquet", tmp_path / "other.parquet"
    write_shard(path, texts, scratch=tmp_path)
    # As another version of pyarrow names itself in the footer.
    written_by = f"version {pa.__version__}".encode()
    other.write_bytes(path.read_bytes().replace(written_by, written_by[:-1] + b"x"))
    large = pa.array(texts, pa.large_string())
    again = write(tmp_path / "again.parquet", large, compression="gzip", row_group_size=1024)
    assert path.read_bytes() != other.read_bytes()
    assert find_text_digest(path) == find_text_digest(other) == find_text_digest(again)


OTHERS = [
    *((["ab", "c", "d"], 3), (["a", "bc", "d"], 3), (["c", "ab", "d"], 3), (["ab", "c"], 3)),
    *((["ab", "c", "d"], 2), (["ab", "c", "d", ""], 4)),
]


def test_other_documents_or_row_groups_have_another_digest(tmp_path):
    path = tmp_path / "shard.parquet"
    found = {find_text_digest(write(path, texts, row_group_size=size)) for texts, size in OTHERS}
    assert len(found - {None}) == len(OTHERS)


def test_only_parquet_files_of_text_alone_have_a_text_digest(tmp_path):
    path = tmp_path / "none.parquet"
    for table in ({"text": ["a"], "id": [1]}, {"text": [1]}):
        pq.write_table(pa.table(table), path)
        assert find_text_digest(path) is None
