"""`nanochat stage` builds one stage, and says which command makes what it lacks."""

import json
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest

from flows.artifacts.runs import find_run
from flows.building.context import BuildContext
from flows.building.retry import TransientStageError
from flows.cli.app import main
from infra.launch.torchrun import StageInterrupted
from infra.storage.base import Store
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError
from tests.support.flows.terminal import Terminal

SMALL = ("--gpus", "0", "--set", "tokenizer.vocab_size=300", "--set", "model.vocab_size=300")


def argv_of(folder: Path) -> tuple[str, ...]:
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in topics.values()]
    (folder / "topics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = ("shards.source=local", f"shards.path={folder}", "shards.num_shards=1")
    return (*SMALL, *(word for setting in given for word in ("--set", setting)))


def test_a_missing_input_is_named_with_the_command_that_makes_it(
    terminal: Terminal, tmp_path: Path
) -> None:
    words = argv_of(tmp_path / "a {b}")
    error, hint = terminal.fails("stage", "tiny", "rows", *words)
    assert "rows needs tokens, which is not in file://" in error
    assert "nanochat stage tiny shards" in hint
    assert f"'shards.path={tmp_path}/a {{b}}'" in hint


def test_what_was_lost_has_an_exit_code_of_its_own(
    terminal: Terminal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lose(*args: object, **kwargs: object) -> None:
        raise TransientStageError("node 1 heard nothing of node 0", hint="start node 0")

    monkeypatch.setattr("flows.cli.train.stage.build_share", lose)
    assert main(("stage", "tiny", "shards", *argv_of(tmp_path / "a"))) == 75
    assert capsys.readouterr().err.splitlines() == [
        "error: node 1 heard nothing of node 0",
        "hint: start node 0",
    ]


def test_a_record_whose_end_the_store_refused_is_ended_by_the_next_command(
    terminal: Terminal, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(LocalStore):
        is_away = False

        def put(self, key: str, data: bytes) -> None:
            if self.is_away:
                raise StoreError("the store does not answer")
            super().put(key, data)

    refusing = Refusing(tmp_path / "home" / "store")
    monkeypatch.setattr("flows.cli.options.open_store", lambda url: refusing)

    def build(*args: object, **kwargs: object) -> SimpleNamespace:
        refusing.is_away = True
        return SimpleNamespace(cached=False, uri="")

    monkeypatch.setattr("flows.cli.train.stage.build_share", build)
    words = ("stage", "tiny", "shards", *argv_of(tmp_path / "a"), "--run", "again-1")
    assert main(words) != 0

    def status() -> str | None:
        found = find_run(store, "again-1")
        return found and found.status

    assert main(["ls"]) == 0  # the store is still away
    assert status() == "running"
    refusing.is_away = False
    assert main(["ls"]) == 0
    assert status() == "interrupted"


@pytest.mark.parametrize("options", ["--strict --run again-1 --force", "--strict", ""])
def test_the_command_that_resumes_has_the_options_of_the_one_that_was_interrupted(
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise StageInterrupted("asked to stop")

    monkeypatch.setattr("flows.cli.train.stage._find_inputs", lambda *_: {})
    monkeypatch.setattr("flows.cli.train.stage.build_share", stop)
    words = ("stage", "tiny", "pretrain", "--gpus", "0", *options.split())
    assert main(words) == 130
    hint = capsys.readouterr().err.splitlines()[-1]
    assert hint == f"hint: resume with: nanochat {' '.join(words)}"


def test_the_command_of_one_of_several_machines_resumes_with_its_variables(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(stage: object, context: BuildContext, *args: object, node: int, force: bool) -> None:
        assert (context.placement.nodes, node) == (2, 1)
        raise StageInterrupted("asked to stop")

    for name, value in (("PET_NNODES", "2"), ("PET_NODE_RANK", "1"), ("PET_MASTER_ADDR", "a")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("flows.cli.train.stage._find_inputs", lambda *_: {})
    monkeypatch.setattr("flows.cli.train.stage.build_share", stop)
    assert main(("stage", "tiny", "pretrain", "--gpus", "0")) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "hint: resume with: PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=a "
        "nanochat stage tiny pretrain --gpus 0"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stage", "tiny", "pretrian"), "there is no stage 'pretrian'"),
        (("stage", "tiny"), "stage needs a stage after the profile"),
        (("stage", "pretrain", "tiny"), "'pretrain' is a stage, not a profile"),
        (("stage", "pretrain", "tiny"), "the profile comes first: tiny pretrain"),
        (("stage", "{}"), "a request in JSON stands alone"),
        (("stage", "tiny", "rows", "--name", "a/b"), "a/b"),
        (("stage", "tiny", "rows", "--run", "a/b"), "a/b"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    terminal: Terminal, words: tuple[str, ...], said: str
) -> None:
    error, hint = terminal.fails(*words, "--gpus", "0")
    assert said in error + hint


def test_text_that_is_no_request_is_refused_in_one_line(terminal: Terminal) -> None:
    assert "not a stage request" in terminal.fails("stage", "{}")[0]


def test_what_cannot_be_for_one_of_several_machines_is_refused_in_one_line(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    error, _ = terminal.fails("stage", "tiny", "pretrain", "--gpus", "0", "--force")
    assert "--force on 2 nodes needs --run" in error
    error, hint = terminal.fails("stage", "tiny", "shards", *argv_of(tmp_path / "a"))
    assert "shards is built by one machine, this is node 1" in error
    assert hint == "start it on node 0 alone"
