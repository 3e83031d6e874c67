"""Statistics of parquet files of documents: number, lengths and scripts.

Counts and lengths are of every document, in one pass of duckdb. Scripts are of a sample: the first
characters of documents at 4 positions spread evenly over each file, so that little is read twice.
Shards are shuffled, so this is as good as a random sample.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from nanochat_core.data.shard_files import ShardSet, inspect_shard, row_group_sizes
from nanochat_core.errors import DataError

PLACES = 4  # of the sample in each file
DOCUMENTS_A_PLACE = 128
SAMPLED_CHARACTERS = 10_000  # of one document

# A character counts for the first class that matches. Unicode's classes, as duckdb's regular
# expressions know them.
SCRIPTS = {
    "white space": r"\s|\p{Z}",
    "digits": r"\p{N}",
    "punctuation": r"\p{P}|\p{S}",
    "Latin": r"\p{Latin}",
    "Cyrillic": r"\p{Cyrillic}",
    "CJK": r"\p{Han}|\p{Hiragana}|\p{Katakana}|\p{Hangul}|\p{Bopomofo}",
    "Arabic": r"\p{Arabic}",
    "Devanagari": r"\p{Devanagari}",
}
OTHER = "other"

# In duckdb length() counts characters and strlen() bytes. The function bin() gives binary digits:
# their number less one is floor(log2). The column `bin` of a document is n if it has at least 2^n
# characters and fewer than 2^(n+1), and -1 if it has none.
_LENGTHS = """
SELECT filename, bin, count(*), sum(characters), sum(bytes), max(characters)
FROM (
    SELECT
        filename,
        coalesce(length(text), 0) AS characters,
        coalesce(strlen(text), 0) AS bytes,
        CASE WHEN characters = 0 THEN -1 ELSE length(bin(characters)) - 1 END AS bin
    FROM read_parquet($paths, filename = true)
)
GROUP BY GROUPING SETS (filename, bin)
"""
_SAMPLE = """
SELECT left(text, $characters) AS text FROM read_parquet($path, file_row_number = true)
WHERE file_row_number >= $first AND file_row_number < $first + $count
"""
# Counted inside duckdb, so that Python sees thousands of distinct characters and not millions.
_CHARACTERS = f"""
SELECT character, count(*)
FROM (SELECT unnest(string_split(text, '')) AS character FROM ({_SAMPLE}))
GROUP BY character
"""


@dataclass(frozen=True)
class FileStats:
    """One file's documents."""

    name: str  # below the directory
    split: str  # "train" or "validation"; "" when nothing says so
    documents: int
    characters: int
    bytes: int  # of the text in UTF-8, not of the file
    longest: int  # characters


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Documents of at least `least` characters and fewer than twice as many."""

    least: int  # 0: documents without any
    documents: int
    characters: int


@dataclass(frozen=True, kw_only=True)
class TextStats:
    """All files' documents."""

    files: tuple[FileStats, ...]
    lengths: tuple[LengthBin, ...]  # in order, none left out between the first and the last
    scripts: dict[str, float]  # share of the sample's characters; largest first
    sampled_documents: int
    sampled_characters: int

    @property
    def totals(self) -> dict[str, int]:
        """Documents, characters and bytes of text of all files."""
        names = ("documents", "characters", "bytes")
        return {name: sum(getattr(file, name) for file in self.files) for name in names}


@dataclass(frozen=True)
class TextFile:
    """A parquet file with a column `text`."""

    path: Path
    name: str
    split: str = ""


def find_text_files(path: Path) -> list[TextFile]:
    """Return the files of a shards directory, all parquet files below a directory, or one file.

    Raises DataError if there is none.
    """
    if path.is_file():
        return [TextFile(path, path.name)]
    # shards.json knows which file is held out; without it no file has a split.
    if (path / "shards.json").is_file():
        shards = ShardSet.open(path)
        last = TextFile(shards.validation, shards.validation.name, "validation")
        return [*(TextFile(train, train.name, "train") for train in shards.train), last]
    paths = sorted(found for found in path.rglob("*.parquet") if found.is_file())
    if not paths:
        raise DataError(
            f"{path} has no parquet file",
            hint="give a directory of shards, or of parquet files with a column named text",
        )
    return [TextFile(found, found.relative_to(path).as_posix()) for found in paths]


def measure_text(files: Sequence[TextFile]) -> TextStats:
    """Count what is in the files. Raises DataError with the file and row that cannot be used.

    A null document counts as one without characters.
    """
    # First: it raises a clear DataError for a file that is not parquet or has no column `text`.
    sizes = [sum(row_group_sizes(file.path)) for file in files]
    paths = [str(file.path) for file in files]
    try:
        with duckdb.connect() as database:
            rows = database.execute(_LENGTHS, {"paths": paths}).fetchall()
            characters: Counter[str] = Counter()
            for path, size in zip(paths, sizes, strict=True):
                for first, count in _places(size):
                    characters.update(_sample(database, path, first=first, count=count))
            scripts = _classify(database, characters)
    except duckdb.Error as error:
        # duckdb does not say which row is bad. This slower check does, and raises DataError for it.
        for file in files:
            inspect_shard(file.path, name=file.name)
        raise DataError(
            f"duckdb cannot read the files: {str(error).partition(chr(10))[0]}",
            hint="check that nothing else writes to them, then run again",
        ) from error
    return TextStats(
        files=tuple(
            FileStats(
                file.name, file.split, *next(row[2:] for row in rows if row[0] == str(file.path))
            )
            for file in files
        ),
        lengths=tuple(_bins({row[1]: row[2:4] for row in rows if row[1] is not None})),
        scripts=scripts,
        sampled_documents=sum(count for size in sizes for _, count in _places(size)),
        sampled_characters=characters.total(),
    )


def _bins(found: Mapping[int, tuple[int, int]]) -> Iterator[LengthBin]:
    # Empty bins between the first and the last are kept, so that the table reads as a histogram.
    for number in range(min(found), max(found) + 1):
        documents, characters = found.get(number, (0, 0))
        least = 0 if number < 0 else 2**number
        yield LengthBin(least=least, documents=documents, characters=characters)


def _places(size: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of each piece of the sample of a file of `size` rows."""
    if size <= PLACES * DOCUMENTS_A_PLACE:
        yield 0, size
        return
    for place in range(PLACES):
        yield place * size // PLACES, DOCUMENTS_A_PLACE


def _sample(
    database: duckdb.DuckDBPyConnection, path: str, *, first: int, count: int
) -> dict[str, int]:
    """Return the count of each character in one piece of the sample."""
    values = {"path": path, "first": first, "count": count, "characters": SAMPLED_CHARACTERS}
    return dict(database.execute(_CHARACTERS, values).fetchall())


def _classify(database: duckdb.DuckDBPyConnection, characters: Counter[str]) -> dict[str, float]:
    """Return the share of each script, largest first."""
    whens = " ".join(
        f"WHEN regexp_full_match(c, '{SCRIPTS[name]}') THEN '{name}'" for name in SCRIPTS
    )
    query = f"SELECT CASE {whens} ELSE '{OTHER}' END FROM (SELECT unnest($characters) AS c)"
    # unnest keeps the order of the list, so rows and characters correspond.
    counts = dict.fromkeys([*SCRIPTS, OTHER], 0)
    known = list(characters)
    for character, (name,) in zip(
        known, database.execute(query, {"characters": known}).fetchall(), strict=True
    ):
        counts[name] += characters[character]
    total = max(characters.total(), 1)
    return {name: counts[name] / total for name in sorted(counts, key=lambda n: -counts[n])}
