"""What the command line does with artifacts, plans and runs that exist."""

from pathlib import Path

import pytest

from infra.storage.base import Store
from tests.support.flows.rows import publish_files
from tests.support.flows.shelf import make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_what_is_no_model(command: str, tmp_path: Path, store: Store, terminal: Terminal) -> None:
    put_run(store, "tiny-1", put_artifact(store, make_manifest("tokens")))
    (tmp_path / "file").write_text("")

    def answer(name: str) -> tuple[str, str]:
        return terminal.fails(command, name)

    assert "is not a model: it is not a directory" in answer(f"{tmp_path}/file")[0]
    assert "is not a model: there is no such directory" in answer(f"{tmp_path}/nothing")[0]
    assert answer("tokens@tiny") == (
        "tokens@tiny is not a model",
        "stages that make one: pretrain, midtrain, sft, rl",
    )
    assert answer("tiny") == (
        f"tiny has no chat model in {store.url}: no run of it has made one yet",
        "nanochat run tiny",
    )
    assert answer("d12")[0] == f"d12 has no chat model in {store.url}: it was never run"
    assert answer("tnyi") == ("there is no profile, run or model 'tnyi'", "did you mean 'tiny'?")
    assert answer("sft@tiny")[0] == f"there is no sft@tiny in {store.url}"
    assert answer("sft@")[0] == "'sft@' names no run"


def test_report_says_where_the_report_card_is(
    store: Store, tmp_path: Path, terminal: Terminal
) -> None:
    files = {"report.html": b"<p>", "report.md": b"# Card\n"}
    put_run(store, "tiny-1", publish_files(store, "report", files, tmp_path))
    (line,) = terminal.said("report", "tiny")
    assert Path(line).read_text() == "<p>"
    assert terminal.said("report", "tiny", "--markdown") == ["# Card"]


def test_a_fresh_home_has_everything_to_build_and_says_how_to_begin(terminal: Terminal) -> None:
    lines = terminal.said("plan", "tiny")
    assert lines[0].startswith("+ shards ")
    assert {stage["state"] for stage in terminal.read("plan", "tiny")["stages"]} == {"+"}
    said = "\n".join(terminal.said("plan", "tiny", "sft"))
    assert said.startswith("sft: makes a chat model\n")
    assert "midtrain, task_data" in said
    assert "never built" in said
    assert terminal.said("status") == ["nothing was run yet: nanochat run tiny"]
    assert terminal.fails("status", "tiny")[1] == "nanochat run tiny"
    assert terminal.fails("status", "tnyi")[1] == "did you mean the profile 'tiny'?"
    assert terminal.said("down") == ["no Prefect server was running"]


def test_status_lists_runs_and_shows_one(store: Store, terminal: Terminal) -> None:
    sft = put_artifact(store, make_manifest("sft"))
    put_run(store, "tiny-1", started="2026-11-21T06:00:00Z")
    put_run(store, "tiny-2", sft, started="2026-11-21T07:00:00Z")
    assert [line.split()[0] for line in terminal.said("status")] == ["tiny-2", "tiny-1"]
    said = "\n".join(terminal.said("status", "tiny"))
    assert said.startswith("run tiny-2: finished\n")
    assert f"done         {sft.fingerprint[:12]}" in said
    assert "nothing is being built" not in said
    assert "+ shards" in said
    assert terminal.read("status", "tiny")[0]["run"] == "tiny-2"
