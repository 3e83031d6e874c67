"""`nanochat data`: statistics of pretraining text; `data_show` prints conversations."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.names import is_artifact, open_usable
from flows.cli.artifacts.data_show import show
from flows.cli.options import AsJson, StoreOptions, make_group
from flows.cli.output import print_result, print_warning
from flows.cli.progress import count_of, show_bytes
from flows.render.table import columns
from flows.render.text import count, percent, size
from flows.stages import SHARDS
from infra.storage.base import Store
from nanochat_core.errors import ConfigError

if TYPE_CHECKING:  # duckdb and pyarrow are slow to import, and every command imports this module
    from flows.cli.artifacts.data_stats import FileStats, LengthBin, TextStats

_BAR = 40  # characters of the longest bar
_SHOWN_FILES = 24
_NUMBERS = 5  # columns of numbers in the table of files


def stats(
    what: Annotated[
        str,
        Parameter(
            name="REF|DIRECTORY",
            help="shards@RUN, shards/FINGERPRINT, a run's name (its shards), a directory of "
            "parquet files with a column text, or one such file.",
        ),
    ],
    /,
    *,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Count documents, characters and bytes; show how long documents are and in which scripts.

    Lengths are of all documents, scripts of a sample.
    """
    from flows.cli.artifacts.data_stats import find_text_files, measure_text

    path = _find_path(what)
    # The cache stays open while the files are read: what is in use is not evicted.
    with place.cache as cache:
        if path is None:
            path = _fetch_shards(place.open_store(), what, cache)
        found = measure_text(find_text_files(path))
    print_result(lambda: _tree(found), _lines(found), as_json=as_json)
    return 0


def make_data_app(**place: Any) -> App:
    """Return the group of commands."""
    return make_group("data", stats, show, **place)


def _find_path(what: str) -> Path | None:
    """Return the path that `what` names; None means the name of an artifact or a run.

    Raises ConfigError for what can only be a path and does not exist.
    """
    path = Path(what).expanduser()
    if path.exists():
        return path
    if what.startswith(("/", ".", "~")):
        raise ConfigError(
            f"{what} does not exist",
            hint=f"give a directory of parquet files, or {SHARDS.name}@RUN",
        )
    return None


def _fetch_shards(store: Store, name: str, cache: Cache) -> Path:
    """Return a verified local directory with the shards called `name`."""
    reference = name if is_artifact(name) else f"{SHARDS.name}@{name}"
    manifest = open_usable(store, reference, warn=print_warning)
    if manifest.stage != SHARDS.name:
        raise ConfigError(
            f"{manifest.name} has no documents: it is of stage {manifest.stage}",
            hint=f"give {SHARDS.name}@RUN, or a directory of parquet files",
        )
    total = sum(file.size for file in manifest.files)
    with show_bytes(total, what=manifest.name) as on_bytes:
        return fetch(store, manifest, cache, on_bytes=on_bytes) / "files"


def _tree(found: "TextStats") -> dict[str, Any]:
    return found.totals | asdict(found)


def _lines(found: "TextStats") -> Iterator[str]:
    totals = found.totals
    yield (
        f"{count_of(len(found.files), 'file')}: {count_of(totals['documents'], 'document')}, "
        f"{count(totals['characters'])} characters, {size(totals['bytes'])} of text"
    )
    yield ""
    yield from _file_table(found.files)
    yield ""
    yield from _length_table(found.lengths)
    yield ""
    yield from _script_table(found)


def _file_table(files: Sequence["FileStats"]) -> list[str]:
    head = ("file", "split", "documents", "characters", "mean", "longest", "bytes a character")
    rows = [
        (
            file.name,
            file.split,
            f"{file.documents:,}",
            f"{file.characters:,}",
            f"{file.characters / file.documents:,.0f}",
            f"{file.longest:,}",
            f"{file.bytes / max(file.characters, 1):.3f}",
        )
        # max(..., 1): a file of empty documents has no characters.
        for file in _shown(files)
    ]
    table = [head, *rows]
    if not any(file.split for file in files):
        table = [(row[0], *row[2:]) for row in table]
    lines = columns(table, right=range(len(table[0]) - _NUMBERS, len(table[0])))
    if (hidden := len(files) - len(rows)) > 0:
        # Before the last line, which is the validation shard.
        lines.insert(-1, f"... {hidden} more; --json has all")
    return lines


def _shown(files: Sequence["FileStats"]) -> list["FileStats"]:
    """Return all files, or the first ones and the last, which is the validation shard."""
    if len(files) <= _SHOWN_FILES:
        return list(files)
    return [*files[: _SHOWN_FILES - 1], files[-1]]


def _length_table(lengths: Sequence["LengthBin"]) -> list[str]:
    total = max(sum(length.documents for length in lengths), 1)
    most = max(length.documents for length in lengths)
    rows = [
        (
            f"{length.least:,}" if length.least else "none",
            # Bins are powers of two: [least, 2 * least - 1].
            f"- {2 * length.least - 1:,}" if length.least else "",
            f"{length.documents:,}",
            percent(length.documents / total),
            _bar(length.documents / max(most, 1)),
        )
        for length in lengths
    ]
    head = ("characters", "", "documents", "", "")
    return columns([head, *rows], right=(0, 2, 3))


def _script_table(found: "TextStats") -> list[str]:
    head = (
        f"scripts, in a sample of {count_of(found.sampled_documents, 'document')} "
        f"({count(found.sampled_characters)} characters):"
    )
    rows = [
        (name, percent(share), _bar(share / max(found.scripts.values())))
        for name, share in found.scripts.items()
        if share
    ]
    return [head, *(columns(rows, right=(1,)) if rows else [])]


def _bar(share: float) -> str:
    """Return a bar for a share of the longest; any share above 0 has at least one character."""
    return "#" * max(round(_BAR * share), 1 if share else 0)
