"""`nanochat import`: a checkpoint of nanochat's becomes an artifact that every command knows."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from flows.artifacts.cache import Cache
from flows.artifacts.names import open_model, open_run
from flows.artifacts.pins import PINS
from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import point, write_run
from flows.identity.ref import ArtifactRef
from nanochat_core.model.checkpoint import load_model
from tests.support.flows.terminal import Terminal
from tests.support.nanochat_core.interop.models import a_checkpoint, a_model

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def nanochats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as nanochat keeps it, with a base model and a chat model."""
    home = tmp_path_factory.mktemp("nanochat")
    for folder, step in (("base_checkpoints", 100), ("chatsft_checkpoints", 20)):
        directory = a_checkpoint(home / folder / "d4", step=step)
        if not (home / "tokenizer").exists():
            shutil.move(directory / "tokenizer", home / "tokenizer")
        else:
            shutil.rmtree(directory / "tokenizer")
    return home


NOTE = "reading the checkpoint"


def imported(terminal: Terminal, *words: str) -> list[str]:
    note, *lines = terminal.hears("import", *words).splitlines()
    assert note == NOTE
    return lines


def failed(terminal: Terminal, *words: str) -> str:
    return "\n".join(terminal.fails("import", *words, notes=(NOTE,)))


def test_an_imported_model_is_found_by_its_name(nanochats, store, tmp_path, terminal):
    lines = imported(terminal, str(nanochats / "chatsft_checkpoints" / "d4"), "--name", "theirs")
    assert lines[0].startswith("sft@theirs: sft/")
    assert "step 20, era 2026-03-14" in lines[0]
    assert lines[2].endswith("nanochat run PROFILE --use sft@theirs")
    run = open_run(store, "theirs")
    assert (run.status, sorted(run.stages)) == ("finished", ["sft", "tokenizer"])
    with Cache(tmp_path / "cache", 10**9) as cache:
        directory = open_model(store, "theirs", cache=cache, warn=print)
        model = load_model(directory, torch.device("cpu"))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens), a_model("2026-03-14")(tokens))
    home = tmp_path / "home"
    assert not list(home.glob("scratch-*"))
    assert not list(store.list(PINS))


def test_the_same_files_again_are_the_same_artifact(
    nanochats, store, tmp_path, terminal, monkeypatch
):
    def write_pinned(*arguments):  # until a run names it, no garbage collection may take it
        assert list(store.list(PINS))
        write_run(*arguments)

    monkeypatch.setattr("flows.interop.import_model.write_run", write_pinned)
    path = str(nanochats / "base_checkpoints" / "d4")
    first = imported(terminal, path, "--name", "one")[0]
    (tmp_path / "home" / "scratch-x").mkdir()  # of one that was killed
    second, _, hint = imported(terminal, path, "--name", "two", "--step", "100")
    assert not list((tmp_path / "home").glob("scratch-*"))
    assert hint.endswith("--use pretrain@two --use tokenizer@two")
    assert second.removeprefix("pretrain@two") == (
        first.removeprefix("pretrain@one") + ", imported before"
    )
    one, two = open_run(store, "one"), open_run(store, "two")
    assert one.stages == two.stages
    assert terminal.said("status", "one")[:2] == [
        f"run {one.run}: finished",
        "  profile  (imported)",
    ]
    assert len(terminal.said("ls", "one")) >= 3
    plan = terminal.run("plan", "tiny", "--use", "pretrain@one", "--use", "tokenizer@one")[1]
    assert [line.split()[1] for line in plan if "given" in line] == ["tokenizer", "pretrain"]
    manifest = find_manifest(store, ArtifactRef("pretrain", one.stages["pretrain"]))
    assert manifest.provenance.metrics["from_step"] == 100


def test_what_a_person_has_to_say_is_asked_for(nanochats, store, tmp_path, terminal):
    elsewhere = tmp_path / "d4"
    shutil.copytree(nanochats / "base_checkpoints" / "d4", elsewhere)
    path = str(elsewhere)
    point(store, "main", "tiny-1")
    for words, text in (
        ("", "--kind: base, mid, sft, rl"),
        ("--kind chat", "--kind is 'chat'"),
        ("--kind base", "say where it is with --tokenizer"),
        ("--kind base --name tiny", "tiny is the name of a profile"),
        ("--kind base --name a/b", "a/b"),
        ("--kind base --name main", "main is a tag"),
    ):
        assert text in failed(terminal, path, *words.split())
    assert "choose one with --name" in failed(terminal, str(tmp_path / ".d4"))
    pickled = str(nanochats / "tokenizer" / "tokenizer.pkl")
    words = (path, "--kind", "base", "--name", "mine", "--tokenizer", pickled)
    assert "spring" in failed(terminal, *words, "--era", "spring")
    assert imported(terminal, *words)[0].startswith("pretrain@mine")


def test_a_file_that_lies_leaves_nothing_behind(nanochats, store, tmp_path, terminal):
    directory = tmp_path / "base_checkpoints" / "d4"
    shutil.copytree(nanochats / "base_checkpoints" / "d4", directory)
    meta = directory / "meta_000100.json"
    tree = json.loads(meta.read_text())
    tree["model_config"]["n_layer"] = 10**7
    meta.write_text(json.dumps(tree))
    assert "n_layer is 10000000" in failed(terminal, str(directory))
    assert not list(store.list(""))
    assert not list((tmp_path / "home").glob("scratch-*"))


def test_a_path_to_nothing_is_one_line(tmp_path, terminal):
    missing = tmp_path / "none"
    for words in ((), ("--kind", "base")):
        assert f"there is no directory {missing}" in failed(terminal, str(missing), *words)
    missing.touch()
    assert f"{missing} is a file" in failed(terminal, str(missing))
    assert "has no model_*.pt" in failed(terminal, str(tmp_path), "--kind", "base")
