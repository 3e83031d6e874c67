"""Stage `shards` from text at hand: dealt out, shuffled, and what cannot be used is named."""

import errno
import json
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.profiles import open_profile
from nanochat_core.data import shards
from nanochat_core.data.hub.datasets import DATASETS
from nanochat_core.data.shard_files import ShardSet
from nanochat_core.data.text import local_text
from nanochat_core.data.text.installed import BUILT_IN
from nanochat_core.errors import ConfigError, DataError
from nanochat_core.runtime.progress import Progress, read_events
from tests.support.nanochat_core.data.fixtures import digests, documents_of, refused
from tests.support.nanochat_core.data.fixtures import shards_config as config

DOCUMENTS = [f"document {i}: {'lorem ipsum ' * (i % 7)}\nend" for i in range(400)]


@pytest.fixture
def folder(tmp_path):
    """Four hundred documents in files of all three kinds."""
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    lines = [json.dumps({"text": text, "id": 1}) for text in DOCUMENTS[:150]]
    (folder / "a.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.table({"text": DOCUMENTS[150:399]}), folder / "deep" / "b.parquet")
    (folder / "c.txt").write_text(DOCUMENTS[399])
    (folder / "notes.pdf").write_bytes(b"\xff")
    return folder


def test_every_document_lands_in_exactly_one_shard_in_no_order(shards_job, folder):
    job = shards_job(path=folder)
    metrics = shards.run(job)
    made = ShardSet.open(job.output)
    assert len(made.train) == 3
    parts = [documents_of(path) for path in (*made.train, made.validation)]
    assert sorted(text for part in parts for text in part) == sorted(DOCUMENTS)
    assert metrics["documents"] == 400
    assert metrics["characters"] == sum(map(len, DOCUMENTS))
    assert [s.documents for s in made.shards] == [len(part) for part in parts]
    numbers = [DOCUMENTS.index(text) for text in parts[0]]
    assert numbers != sorted(numbers)
    assert max(map(len, parts[:3])) - min(map(len, parts[:3])) <= 1
    assert 4 <= metrics["validation_documents"] <= 32
    assert not (job.directory / "scratch").exists()
    events = list(read_events(job.events))
    assert {event["total"] for event in events if "total" in event} == {3}  # files
    assert [event["step"] for event in events if "step" in event][-1] == 3
    log = [event["text"] for event in events if "text" in event]
    assert log[0].endswith("1 of 4 files are not text: 1 .pdf")
    assert log[1].startswith("warning: the text has only ")


def test_the_same_text_gives_the_same_bytes_and_another_seed_another_order(shards_job, folder):
    job = shards_job(path=folder)
    shards.run(job)
    first = digests(job.output)
    shards.run(job)
    assert digests(job.output) == first
    job.config["seed"] = 43
    shards.run(job)
    assert digests(job.output) != first


def test_a_copy_of_a_document_never_crosses_to_validation(shards_job, tmp_path):
    lines = [json.dumps({"text": f"document {i % 100}"}) for i in range(400)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(lines))
    job = shards_job(path=tmp_path / "text")
    shards.run(job)
    made = ShardSet.open(job.output)
    train = {text for path in made.train for text in documents_of(path)}
    assert not train & set(documents_of(made.validation))


def test_blank_documents_are_left_out_and_half_characters_repaired(shards_job, folder):
    odd = '{"text": ""}\n{"text": " \\n "}\n{"text": "half \\ud800 character"}\n'
    (folder / "odd.jsonl").write_text(odd)
    job = shards_job(path=folder)
    metrics = shards.run(job)
    assert (metrics["documents"], metrics["blank_documents"]) == (401, 2)


BAD_LINES = [
    *('{"text": ', '{"txt": "a", "b": 2}', '["text"]', '{"text": 5}'),
    *('{"text": null}', '{"text": ["a"]}', '{"text": "\udcff"}'),
]


def test_a_file_that_cannot_be_used_is_named(shards_job, tmp_path, transcript):
    (tmp_path / "text").mkdir()
    path = tmp_path / "text" / "x.jsonl"
    for line in BAD_LINES:
        path.write_bytes(f'{{"text": "ok"}}\n\n{line}\n'.encode("utf-8", "surrogateescape"))
        job = shards_job(path=tmp_path / "text")
        transcript.refused(ascii(line)[:70], DataError, shards.run, job)
        assert list(job.output.iterdir()) == []


def test_one_long_file_is_divided_as_the_hint_says(shards_job, tmp_path):
    (tmp_path / "text").mkdir()
    lines = [f"Scene {i}.\r\nEnter a ghost." for i in range(400)]
    (tmp_path / "text" / "input.txt").write_bytes("\r\n\r\n".join(lines).encode())
    path = str(tmp_path / "text")
    with pytest.raises(DataError, match="1 document: too few for 3 training shards") as error:
        shards.run(shards_job(path=path))
    setting = re.search(r"--set 'shards\.(\w+)=(.*?)'", error.value.hint or "")
    given = ("shards.source=local", f"shards.path={path}", f"shards.{setting[1]}={setting[2]}")
    profile = open_profile("tiny", overrides=given)
    job = shards_job(path=path, separator=profile.run.shards.separator)
    assert shards.run(job)["documents"] == 400


NO_CONFIG = [
    *({"source": "web"}, {"num_shards": 0}, {"separator": ""}, {"source": "climbmix"}),
    {"source": "climbmix", "num_shards": 6543},
]


def test_a_config_that_cannot_be_is_refused(shards_job, transcript):
    for changes in NO_CONFIG:
        transcript.refused(str(changes), ConfigError, shards.run, shards_job(**changes))
    for changes in ({"path": None}, {"path": "/nowhere/at/all"}):
        transcript.refused(str(changes), DataError, shards.run, shards_job(**changes))


def test_text_behind_a_link_to_a_folder_is_read_once(folder, tmp_path):
    (folder / "deep").rename(tmp_path / "elsewhere")
    for link, target in (("x", tmp_path / "elsewhere"), ("y", folder / "x"), ("loop", folder)):
        (folder / link).symlink_to(target)
    progress = Progress(tmp_path / "events.jsonl")
    found = list(local_text.documents(config(path=folder), progress, tmp_path))
    assert sorted(document.text for document in found) == sorted(DOCUMENTS)


def test_a_folder_that_cannot_be_listed_is_not_passed_over(shards_job, folder, monkeypatch):
    def refuse(path, *, scandir=os.scandir):
        if str(path).endswith("deep"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    job = shards_job(path=folder)
    monkeypatch.setattr(os, "scandir", refuse)
    refused(r"text/deep cannot be read: permission denied", shards.run, job)


def test_text_edited_since_the_plan_or_while_it_is_read_is_refused_in_one_line(shards_job, folder):
    complaint = f"{folder} has changed since the run was planned"
    progress = Progress(folder / ".events.jsonl")
    documents = local_text.documents(config(path=folder), progress, folder)
    next(documents)
    job = shards_job(path=folder)
    (folder / "c.txt").write_text("another text")
    refused(complaint, list, documents)
    refused(complaint, shards.run, job, hint="run again")


def test_the_names_that_a_plan_knows_are_those_that_the_stage_can_read():
    assert (*shards.TEXT_SOURCES, *DATASETS) == BUILT_IN
