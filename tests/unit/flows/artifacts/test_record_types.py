"""A record is used when every field of it has its type, and else named with what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.checkpoints import find_steps
from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import FORMAT as RUNS
from flows.artifacts.runs import find_run
from flows.cli.app import main
from flows.identity.manifest import FORMAT
from flows.identity.records import decode_record, encode_record
from flows.identity.ref import ArtifactRef
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError
from tests.support.flows.fixtures import store  # that of the default home
from tests.support.flows.shelf import ACCEPTED, make_manifest, put_artifact, put_run
from tests.support.infra.storage.owners import path_of

__all__ = ["store"]


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "local")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format": 1, "a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply"),
        (b"\xff", "not JSON"),
        (b'{"format": 1, "format": 1}', "'format' occurs twice"),
        (b'{"format": 1, "a": NaN}', "the number nan is not a number or too large"),
        (b'{"format": 1, "a": 1e999}', "the number inf is not a number or too large"),
        (b'{"format": 1, "a": ' + b"9" * 400 + b"}", "too large"),
        (b'{"format": 1, "a": "\\ud800"}', "not JSON"),
        (b'{"format": true}', "format True"),
    ],
)
def test_what_no_version_writes_is_refused_in_one_line(data, says):
    with pytest.raises(ArtifactError, match=says) as caught:
        decode_record(data, format=1, where="here")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("provenance", "created"), 5, "provenance.created is 5, expected str"),
        (("provenance", "created"), "2026-13-41T00:00:00Z", "expected a time"),
        (("provenance", "epoch"), True, "provenance.epoch is True, expected int"),
        (("provenance", "epoch"), 2**70, "expected an integer of 64 bits"),
        (("provenance", "metrics"), [], "provenance.metrics is \\[\\], expected a group"),
        (("provenance", "segments"), [{"started": "x"}], "segments\\[0\\].started is 'x'"),
        (("provenance", "segments"), [{"processes": 0}], "expected 1 or more"),
        (("provenance", "versions"), {"torch": 2}, "versions.torch is 2, expected str"),
        (("files",), [5], "files\\[0\\] is 5, expected a group"),
        (("files", 0, "size"), -1, "files\\[0\\].size is -1, expected a count"),
        (("files", 0, "sha256"), None, "files\\[0\\].sha256 is None, expected str"),
        (("inputs",), {"../x": {"fingerprint": "a" * 64, "digest": ""}}, "a name in the store"),
        (("inputs",), {"x": {"fingerprint": "../x", "digest": ""}}, "expected 64 hex digits"),
        (("preimage", "config"), 5, "preimage.config is 5, expected a group"),
        (("divergences",), "x", "divergences is 'x', expected a list"),
        (("accepted",), {**ACCEPTED, "from": "x"}, "accepted.from is 'x', expected 64 hex digits"),
        (("accepted",), {}, "accepted.\\w+ is missing"),
        (("surplus",), 1, "'surplus' is not known"),
    ],
)
def test_each_field_of_a_manifest_has_its_type(local, path, value, says):
    manifest = make_manifest("sft")
    key = f"sft/{manifest.fingerprint}/manifest.json"
    tree = decode_record(manifest.to_json(), format=FORMAT, where="here")
    holder: Any = tree
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = value
    local.put(key, encode_record(tree, format=FORMAT))
    with pytest.raises(ArtifactError, match=says) as caught:
        find_manifest(local, ArtifactRef("sft", manifest.fingerprint))
    assert key in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "done"},
        {"started": 5},
        {"stages": {"sft": "../x"}},
        {"stages": {"../x": "a" * 64}},
        {"overrides": "x"},
        {"depth": 1.5},
        {"reached": {"x": "y"}},
    ],
)
def test_each_field_of_a_run_has_its_type(local, changes):
    put_run(local, "tiny-1")
    tree = decode_record(local.get("runs/tiny-1.json"), format=RUNS, where="here")
    local.put("runs/tiny-1.json", encode_record({**tree, **changes}, format=RUNS))
    with pytest.raises(ArtifactError, match=r"runs/tiny-1\.json is not the record of a run"):
        find_run(local, "tiny-1")


@pytest.mark.parametrize("name", ["step-abc/x", "step-0000001", "step-" + "9" * 90 + "/x"])
def test_a_key_that_is_no_checkpoint_is_passed_over(local, name):
    local.put(f"sft/{'a' * 64}/checkpoints/{name}/COMMIT.json", b"x")
    assert find_steps(local, ArtifactRef("sft", "a" * 64)) is None


def test_lists_leave_out_what_cannot_be_read_and_name_it(store, capsys, terminal):
    put_run(store, "tiny-1", put_artifact(store, make_manifest("sft")))
    put_run(store, "tiny-2")
    store.put("runs/tiny-2.json", b"[" * 100_000)
    for words in (("status",), ("ls",), ("status", "--json"), ("ls", "--json")):
        assert main(words) == 0
        captured = capsys.readouterr()
        assert "tiny-1" in captured.out
        (line,) = captured.err.splitlines()
        assert line.startswith("warning: 1 record cannot be read: ")
        assert "runs/tiny-2.json is damaged: it is nested too deeply" in line
        if "--json" in words:
            assert len(json.loads(captured.out)) == 1


def test_an_object_that_is_too_large_for_a_record_is_left_out(store, capsys):
    assert isinstance(store, LocalStore)
    put_run(store, "tiny-1")
    put_run(store, "tiny-2")
    path = path_of(store, "runs/tiny-2.json")
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # without taking the room
    assert main(["status"]) == 0
    captured = capsys.readouterr()
    assert "tiny-1" in captured.out
    assert "runs/tiny-2.json" in captured.err


def test_an_index_entry_that_names_nothing_ends_no_command(store, terminal):
    store.put("index/sft/x-", b"")
    assert terminal.said("ls") == [f"no artifacts in {store.url}: nanochat run tiny"]
    assert terminal.said("plan", "tiny") != []
    assert terminal.said("sql", "select count(*) from artifacts") != []
