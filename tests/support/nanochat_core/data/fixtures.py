"""Jobs of the data stages on text small enough for a test."""

import hashlib
import io
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat_core.config import ShardsConfig
from nanochat_core.data import tokens
from nanochat_core.data.shard_files import ShardSet, read_batches, shard_name, write_shard
from nanochat_core.data.text.text_folder import folder_snapshot
from nanochat_core.errors import DataError, NanochatError
from nanochat_core.job import Job
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.nanochat_core.data.hub_server import HubServer, talking_to_hub
from tests.support.small_job import small_job

MakeJob = Callable[..., Job]
ENTRIES = {"task_data": "conversations.task_data"}  # where the module is not named like its stage


def shards_config(source: str = "local", **changes: Any) -> ShardsConfig:
    """Return settings of `shards` with changes; of a local folder as it is now."""
    fields = {"path": None, "num_shards": 3, "snapshot": (), "revision": None} | changes
    if source == "local" and fields["path"]:
        fields["path"] = str(fields["path"])
        if Path(fields["path"]).is_dir():
            fields["snapshot"] = folder_snapshot(Path(fields["path"]))
    return ShardsConfig(source=source, **fields)


def documents_of(path: Path) -> list[str]:
    return [text for group in read_batches(path) for text in group]


def texts_of(directory: Path) -> list[str]:
    """Return all documents of a set of shards, those for validation last."""
    made = ShardSet.open(directory)
    return [text for path in (*made.train, made.validation) for text in documents_of(path)]


def parquet_bytes(table: dict[str, Any], **options: Any) -> bytes:
    """Return a table as the bytes of a parquet file."""
    buffer = io.BytesIO()
    pq.write_table(pa.table(table), buffer, **options)
    return buffer.getvalue()


def digests(directory: Path) -> dict[str, str]:
    """Return sha256 of every file below a directory."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


def refused(
    match: str,
    call: Callable[..., object],
    *given: Any,
    kind: type[NanochatError] = DataError,
    hint: str | None = None,
    leaves: bool = False,
    **named: Any,
) -> str:
    """Assert that a call ends in an error of a kind, in one line that matches, with a hint that
    contains `hint`; None means that it may have none. Unless it `leaves` something, a job's output
    is empty. Returns the line."""
    with pytest.raises(kind, match=match) as error:
        call(*given, **named)
    assert "\n" not in str(error.value)
    assert hint is None or hint in error.value.hint
    for job in given:
        assert leaves or not isinstance(job, Job) or not any(job.output.iterdir())
    return str(error.value)


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """make_job(stage name, inputs, section=Section): a job in a folder of its own."""

    def make(stage: str, inputs: dict[str, Path], **sections: Any) -> Job:
        job = small_job(
            tmp_path / f"{stage}-job",
            stage=stage,
            entry=f"nanochat_core.data.{ENTRIES.get(stage, stage)}",
            config={"seed": 42, **{name: section.tree() for name, section in sections.items()}},
            inputs=inputs,
        )
        job.output.mkdir(parents=True, exist_ok=True)
        return job

    return make


@pytest.fixture
def shards_job(make_job: MakeJob) -> MakeJob:
    """shards_job(source, **settings): a job of stage `shards`."""
    return lambda *given, **changes: make_job("shards", {}, shards=shards_config(*given, **changes))


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    words = " ".join(f"word{i} thing{i * 7}" for i in range(200))
    Tokenizer.train(iter([words]), vocab_size=300).save(directory)
    return directory


@pytest.fixture
def write_shards(tmp_path: Path) -> Callable[[list[list[str]]], Path]:
    """write_shards([documents of each shard]) -> the directory; validation is the last shard."""

    def write(documents: list[list[str]]) -> Path:
        directory = tmp_path / "shards"
        scratch = tmp_path / "shards-scratch"
        for folder in (directory, scratch):
            folder.mkdir(exist_ok=True)
        files = [
            write_shard(directory / shard_name(i), texts, scratch=scratch)
            for i, texts in enumerate(documents)
        ]
        ShardSet(directory=directory, shards=tuple(files)).write()
        return directory

    return write


@pytest.fixture
def tokens_dir(
    make_job: MakeJob, write_shards: Callable[[list[list[str]]], Path], tokenizer_dir: Path
) -> Path:
    documents = [
        [f"word{i} " * (1 + i % 40) for i in range(300)],
        [f"thing{i} " * (1 + i % 25) for i in range(200)],
        [f"word{i} thing{i}" * (1 + i % 10) for i in range(60)],
    ]
    job = make_job("tokens", {"shards": write_shards(documents), "tokenizer": tokenizer_dir})
    tokens.run(job)
    return job.output


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[HubServer]:
    """A Hub without datasets; huggingface_hub talks to it and has an empty cache."""
    with talking_to_hub(tmp_path / "hf-home", monkeypatch) as server:
        yield server
