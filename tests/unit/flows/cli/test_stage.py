"""`nanochat stage` builds one stage, and prints which command makes what it lacks."""

import json
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest

from flows.artifacts.runs import find_run
from flows.building.retry import TransientStageError
from flows.cli.app import main
from infra.launch.torchrun import StageInterrupted
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError

SMALL = ("--gpus", "0", "--set", "tokenizer.vocab_size=300", "--set", "model.vocab_size=300")


def argv_of(folder):
    """Return options of a run with text of its own, which lies in a folder."""
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in topics.values()]
    (folder / "topics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    settings = ("shards.source=local", f"shards.path={folder}", "shards.num_shards=1")
    return (*SMALL, *(word for setting in settings for word in ("--set", setting)))


@pytest.fixture
def given(tmp_path):
    return argv_of(tmp_path / "a {b}")  # a name that needs quotes


@pytest.fixture
def build(monkeypatch):
    """Replace the building of a stage, whose inputs exist."""

    def replace(action):
        monkeypatch.setattr("flows.cli.train.stage.build_share", action)
        monkeypatch.setattr("flows.cli.train.stage._find_inputs", lambda *_: {})

    return replace


def test_a_missing_input_is_named_with_the_command_that_makes_it(terminal, given):
    terminal.refuses("stage", "tiny", "rows", *given)


def test_a_transient_error_has_an_exit_code_of_its_own(terminal, given, build):
    def lose(*args, **kwargs):
        raise TransientStageError("no heartbeat of node 0", hint="start node 0")

    build(lose)
    terminal.refuses("stage", "tiny", "shards", *given, code=75)


def test_a_record_whose_end_the_store_refused_is_ended_by_the_next_command(store, given, build):
    def refuse(*args):
        raise StoreError("the store does not answer")

    def succeed(*args, **kwargs):
        away.setattr(LocalStore, "put", refuse)
        return SimpleNamespace(cached=False, uri="")

    build(succeed)
    with pytest.MonkeyPatch.context() as away:
        assert main(("stage", "tiny", "shards", *given, "--run", "again-1")) != 0
        assert main(["ls"]) == 0  # the store is still away
        assert find_run(store, "again-1").status == "running"
    assert main(["ls"]) == 0
    assert find_run(store, "again-1").status == "interrupted"


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ("--strict --run again-1 --force", ""),
        ("--strict", ""),
        ("", ""),
        ("", "PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=a "),
    ],
)
def test_the_command_that_resumes_has_options_and_variables_of_the_interrupted_one(
    terminal, monkeypatch, build, options, variables
):
    def stop(stage, context, *args, node, force):
        assert (context.placement.nodes, node) == ((2, 1) if variables else (1, 0))
        assert force == ("--force" in options)
        raise StageInterrupted("asked to stop")

    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    build(stop)
    words = ("stage", "tiny", "pretrain", "--gpus", "0", *options.split())
    _, hint = terminal.fails(*words, code=130)
    assert hint == f"resume with: {variables}nanochat {' '.join(words)}"


def test_what_cannot_be_for_one_of_several_machines_is_refused(terminal, monkeypatch, given):
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    terminal.refuses("stage tiny pretrain --gpus 0 --force")
    terminal.refuses("stage", "tiny", "shards", *given)
