"""What the command line does with artifacts, plans and runs that exist."""

import json
from pathlib import Path

import pytest

from flows.artifacts.publish import publish
from flows.artifacts.runs import Run, write_run
from flows.cli.app import main
from flows.cli.train.run import headline
from flows.identity.fingerprint import Identity, fingerprint_of
from flows.identity.manifest import Manifest, Provenance
from infra.storage.base import Store
from infra.storage.open import open_store
from nanochat_core.section import Tree


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Run a command that must fail; returns the texts after `error:` and `hint:`."""
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    error, hint = captured.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    return error.removeprefix("error: "), hint.removeprefix("hint: ")


def make_artifact(store: Store, stage: str, files: dict[str, str], directory: Path) -> Manifest:
    """Publish an artifact of `stage`, which stands on nothing."""
    preimage: dict[str, Tree] = {
        "stage": stage,
        "format": 1,
        "config": {"seed": json.dumps(files)},
        "inputs": {},
        "code": {},
    }
    identity = Identity(stage=stage, fingerprint=fingerprint_of(preimage), preimage=preimage)
    output = directory / identity.fingerprint
    for name, text in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(text)
    provenance = Provenance(
        run="tiny-1",
        owner="o",
        epoch=1,
        created="2026-11-21T06:00:00Z",
        git_commit=None,
        metrics={},
        segments=(),
    )
    return publish(
        store,
        identity,
        output,
        logs=[],
        inputs={},
        provenance=provenance,
        fence=lambda: None,
    ).manifest


def make_run(
    store: Store, *manifests: Manifest, run: str = "tiny-1", started: str = "2026-11-21T06:00:01Z"
) -> None:
    """Record a run called tiny that made these artifacts."""
    stages = {manifest.stage: manifest.fingerprint for manifest in manifests}
    write_run(
        store,
        Run(
            run=run,
            name="tiny",
            profile="tiny",
            depth=None,
            overrides=(),
            status="finished",
            started=started,
            ended=started,
            stages=stages,
        ),
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home directory, the default one of this test."""
    monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NANOCHAT_STORE", raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Store:
    """The default store of `home`."""
    home.mkdir()
    return open_store((home / "store").as_uri())


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_what_is_no_model(
    command: str, home: Path, tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = make_artifact(store, "tokens", {"a": "b"}, tmp_path)
    make_run(store, tokens)
    (tmp_path / "file").write_text("")

    def answer(name: str) -> tuple[str, str]:
        return fails([command, name], capsys)

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
    assert answer("tnyi") == (
        "there is no profile, run or model 'tnyi'",
        "did you mean 'tiny'?",
    )
    assert answer("sft@tiny")[0] == f"there is no sft@tiny in {store.url}"
    assert answer("sft@")[0] == "'sft@' names no run"


def test_the_chat_model_of_a_profile_is_the_furthest_trained_and_then_the_newest(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mid, sft, rl = (
        make_artifact(store, stage, {"made_by": stage}, tmp_path)
        for stage in ("midtrain", "sft", "rl")
    )

    def fetched(name: str) -> str:
        target = tmp_path / f"copy-{len(list(tmp_path.glob('copy-*')))}"
        assert main(["fetch", name, "--to", str(target)]) == 0
        capsys.readouterr()
        return (target / "made_by").read_text()

    make_run(store, mid, sft, rl, run="tiny-1", started="2026-11-21T06:00:01Z")
    assert (fetched("tiny"), fetched("sft@tiny"), fetched("midtrain@tiny")) == (
        "rl",
        "sft",
        "midtrain",
    )
    other = make_artifact(store, "rl", {"made_by": "rl of tiny-2"}, tmp_path)
    make_run(store, mid, sft, other, run="tiny-2", started="2026-11-21T06:00:02Z")
    make_run(store, mid, run="tiny-3", started="2026-11-21T06:00:03Z")
    assert (fetched("tiny"), fetched("tiny-1")) == ("rl of tiny-2", "rl")
    assert (fetched("tiny-3"), fetched("rl@tiny")) == ("midtrain", "rl of tiny-2")


def test_report_says_where_the_report_card_is(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = make_artifact(store, "report", {"report.html": "<p>", "report.md": "# Card\n"}, tmp_path)
    make_run(store, card)

    assert main(["report", "tiny"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert Path(line).read_text() == "<p>"
    assert main(["report", "tiny", "--markdown"]) == 0
    assert capsys.readouterr().out == "# Card\n"


def test_a_plan_of_a_fresh_home_has_everything_to_build(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tiny"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("+ shards ")
    assert main(["plan", "tiny", "--json"]) == 2
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert {stage["state"] for stage in stages} == {"+"}


def test_explain_names_what_a_stage_is_made_from(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "tiny", "sft"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("sft: makes a chat model\n")
    assert "midtrain, task_data" in said
    assert "never built" in said


def test_status_of_a_fresh_home_says_how_to_begin(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "no runs yet: nanochat run tiny\n"
    assert fails(["status", "tiny"], capsys)[1] == "nanochat run tiny"
    assert fails(["status", "tnyi"], capsys)[1] == "did you mean 'tiny'?"


def test_status_lists_runs_and_shows_one(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft = make_artifact(store, "sft", {"a": "b"}, tmp_path)
    make_run(store, run="tiny-1", started="2026-11-21T06:00:00Z")
    make_run(store, sft, run="tiny-2", started="2026-11-21T07:00:00Z")

    assert main(["status"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "tiny-2",
        "tiny-1",
    ]
    assert main(["status", "tiny"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("run tiny-2: finished\n")
    assert f"done         {sft.fingerprint[:12]}" in said
    assert "nothing is being built" not in said
    assert "+ shards" in said
    assert main(["status", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["run"] == "tiny-2"


def test_down_without_a_server_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down"]) == 0
    assert capsys.readouterr().out == "no Prefect server was running\n"


def test_a_run_ends_with_the_numbers_its_report_card_opens_with() -> None:
    card = "# Report card\n\nd3.\n\n- val_bpb 1.9\n- spelling: 80 %\n\n## Scores\n\n- not this\n"
    assert headline(card) == ["val_bpb 1.9", "spelling: 80 %"]
