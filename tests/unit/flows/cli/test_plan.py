"""`nanochat plan`, `revoke` and `accept` as a person uses them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.pins import PINS, find_pin
from flows.artifacts.publish import Published, find_manifest
from flows.artifacts.runs import Status
from flows.cli.app import main
from flows.cli.train.run import is_recorded
from flows.identity.fingerprint import REPOSITORY, Code, fingerprint_of
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef, short
from flows.overrides import default_name
from flows.plan.accept import Offer, accept
from flows.plan.plan import make_plan
from flows.profiles import open_profile
from flows.stages import STAGES
from infra.storage.base import Store
from infra.storage.local import LocalStore
from tests.support.flows.house import build
from tests.support.flows.shelf import put_run
from tests.support.flows.terminal import Terminal

TINY = open_profile("tiny").run


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Manifest]]:
    """A store with every stage of tiny, as today's code would make it."""
    directory = tmp_path_factory.mktemp("filled")
    store = LocalStore(directory / "store")
    return directory / "store", build(store, directory / "work", Code(REPOSITORY), run=TINY)


@pytest.fixture
def made(
    store: Store, filled: tuple[Path, dict[str, Manifest]], tmp_path: Path
) -> dict[str, Manifest]:
    """The artifacts of such a store, which is the default one."""
    shutil.copytree(filled[0], tmp_path / "home" / "store")
    return filled[1]


def age(store: Store, manifest: Manifest) -> Manifest:
    """The same artifact, built by other code; today's is gone."""
    code = manifest.preimage["code"]
    assert isinstance(code, dict)
    preimage = manifest.preimage | {"code": code | {next(reversed(code)): "0" * 64}}
    fingerprint = fingerprint_of(preimage)
    tree = {"preimage": preimage, "fingerprint": fingerprint}
    old = Manifest(**(vars(manifest) | tree))
    store.put(f"{old.stage}/{fingerprint}/manifest.json", old.to_json())
    store.put(f"index/{old.stage}/20300101t000000z-{fingerprint}", b"")
    store.delete(f"{manifest.stage}/{manifest.fingerprint}/manifest.json")
    return old


def states(terminal: Terminal) -> Iterator[tuple[str, str]]:
    for item in terminal.read("plan", "tiny")["stages"]:
        yield item["stage"], item["state"]


# plan


def test_plan_says_by_its_exit_code_whether_there_is_something_to_run(
    terminal: Terminal, made: dict[str, Manifest]
):
    (*_, summary) = terminal.said("plan", "tiny", "--exit-code")
    assert summary == f"nothing to run: {len(STAGES)} stages up to date"
    changed = ("plan", "tiny", "--set", "sft.num_epochs=7")
    lines = terminal.said(*changed)
    assert terminal.run(*changed, "--exit-code") == (3, lines)
    sft = next(line for line in lines if line.startswith("~ sft"))
    assert f"sft.num_epochs {TINY.sft.num_epochs} -> 7" in sft
    assert "11 min 40 s (at the pace of sft/" in sft  # seven times the 100 s of one epoch
    for stage, code in (("midtrain", 0), ("sft", 3), ("rl", 3)):
        assert terminal.run("plan", "tiny", stage, *changed[2:], "--exit-code")[0] == code
    rl = next(line for line in lines if line.startswith("? rl"))
    assert rl.endswith("after sft")
    assert terminal.fails("plan", "tinny")[1] == "did you mean 'tiny'?"


def test_plan_previews_a_rebuild_and_says_the_name_of_the_run(
    terminal: Terminal, made: dict[str, Manifest]
):
    tree = terminal.read("plan", "tiny", "--force", "sft", "--from-stage", "chat_eval_rl")
    rebuilt = {item["stage"] for item in tree["stages"] if item["state"] == "~"}
    assert rebuilt == {"sft", "chat_eval_rl", "report"}
    assert (tree["up_to_date"], tree["run_name"]) == (False, "tiny")
    assert terminal.read("plan", "tiny", "sft", "--force", "sft")["reason"] == "asked for"
    assert "there is no stage 'stf'" in terminal.fails("plan", "tiny", "--force", "stf")[0]
    changed = ("plan", "tiny", "--set", "sft.num_epochs=7")
    name = default_name("tiny", overrides=("sft.num_epochs=7",))
    setting = "  sft.num_epochs 1 -> 7: changes sft and 4 after"
    assert terminal.run(*changed)[1][:3] == [f"run {name}", setting, ""]
    assert terminal.run(*changed, "--name", "mine")[1][:3] == ["run mine", setting, ""]
    assert terminal.read(*changed)["run_name"] == name
    assert "is the name of another profile" in terminal.fails("plan", "tiny", "--name", "d12")[0]


def test_a_changed_setting_is_shown_before_anything_was_built(terminal: Terminal, store: Store):
    words = ("--set", "sft.num_epochs=2", "--depth", "2")
    lines = terminal.said("plan", "tiny", *words)
    name = default_name("tiny", depth=2, overrides=("sft.num_epochs=2",))
    assert lines[:4] == [
        f"run {name}",
        "  model.depth 3 -> 2: changes pretrain and 8 after",
        "  sft.num_epochs 1 -> 2: changes sft and 4 after",
        "",
    ]
    assert {line[0] for line in lines[4 : 4 + len(STAGES)]} == {"+"}
    assert terminal.run("plan", "tiny", *words, "--name", "tiny")[1][1:4] == lines[1:4]
    assert terminal.read("plan", "tiny", *words)["settings"][1] == {
        "change": "sft.num_epochs 1 -> 2",
        "stages": ["sft"],
        "after": ["rl", "chat_eval_sft", "chat_eval_rl", "report"],
    }
    lines = [" ".join(line.split()) for line in terminal.said("plan", "tiny", "rl", *words)]
    assert "unlike profile model.depth 3 -> 2, by way of pretrain" in lines
    assert "unlike profile sft.num_epochs 1 -> 2, by way of sft" in lines
    lines = terminal.said("plan", "tiny", "midtrain", *words)
    assert not any("sft.num_epochs" in line for line in lines)
    assert terminal.read("plan", "tiny", "sft", "--set", "sft.num_epochs=2")["settings"] == [
        "sft.num_epochs 1 -> 2"
    ]
    assert terminal.read("plan", "tiny")["settings"] == []


def record(
    store: Store,
    made: dict[str, Manifest],
    run: str,
    status: Status = "finished",
    *,
    name: str = "tiny",
) -> None:
    stages = {name: manifest.fingerprint for name, manifest in made.items()}
    put_run(store, run, name=name, status=status, stages=stages)


def test_run_starts_nothing_when_the_latest_run_has_made_everything(
    terminal: Terminal, store: Store, made: dict[str, Manifest], tmp_path: Path
):
    record(store, made, "tiny-20261121t055338z-0001")
    record(store, made, "mine-20261121t055338z-0001", name="mine")
    lines = terminal.said("run", "tiny", "--name", "mine")
    assert lines[-1].split()[:4] == ["next", "nanochat", "chat", "mine"]
    store.delete("runs/mine-20261121t055338z-0001.json")
    code, lines = terminal.run("run", "tiny")
    assert (code, lines[0]) == (0, f"nothing to run: {len(STAGES)} stages up to date")
    assert lines[-1].split()[:4] == ["next", "nanochat", "chat", "tiny"]
    assert len(list(store.list("runs/"))) == 1
    assert not (tmp_path / "home" / "prefect").exists()


def test_a_run_is_recorded_when_the_latest_did_not_end_or_made_something_else(
    store: Store, made: dict[str, Manifest], tmp_path: Path
):
    planned = make_plan(TINY, store, tmp_path / "work")
    assert planned.up_to_date
    assert not is_recorded(store, "tiny", planned)  # no run at all
    record(store, made, "tiny-20261121t055338z-0001")
    assert is_recorded(store, "tiny", planned)
    assert not is_recorded(store, "other", planned)
    record(store, made, "tiny-20261121t055339z-0001", "interrupted")
    assert not is_recorded(store, "tiny", planned)
    record(store, made | {"sft": made["rl"]}, "tiny-20261121t055340z-0001")
    assert not is_recorded(store, "tiny", planned)
    store.put("runs/tiny-20261121t055341z-0001.json", b"damaged")
    assert not is_recorded(store, "tiny", planned)


def test_the_json_of_a_plan_says_all_that_the_lines_say(
    terminal: Terminal, made: dict[str, Manifest]
):
    tree = terminal.read("plan", "tiny", "--set", "sft.num_epochs=7")
    assert tree["format"] == 2
    assert not tree["up_to_date"]
    assert tree["summary"] == terminal.run("plan", "tiny", "--set", "sft.num_epochs=7")[1][-1]
    stages = {item["stage"]: item for item in tree["stages"]}
    assert list(stages) == [stage.name for stage in STAGES]
    assert tree["seconds"] == sum(
        i["estimate"]["seconds"] for i in stages.values() if i["estimate"]
    )
    assert stages["sft"]["changes"] == [
        {"kind": "config", "name": "sft.num_epochs", "old": "1", "new": "7"}
    ]
    assert stages["rl"]["after"] == ["sft"]
    assert stages["pretrain"]["artifact"]["digest"] == made["pretrain"].digest
    assert stages["pretrain"]["inputs"] == ["rows", "tokenizer"]


# revoke


def test_a_revoked_artifact_is_planned_again_until_it_is_valid_again(
    terminal: Terminal, made: dict[str, Manifest]
):
    name = f"midtrain/{short(made['midtrain'].fingerprint)}"
    (line,) = terminal.said("revoke", name, "--why", "learnt the\n test set")
    assert line.startswith(f"{name} revoked 20")
    assert line.endswith(": learnt the test set")
    assert dict(states(terminal))["midtrain"] == "x"
    lines = terminal.run("plan", "tiny")[1]
    assert next(line for line in lines if line.startswith("? sft")).endswith(
        f"made from revoked {name}"
    )
    error, hint = terminal.fails("revoke", name, "--why", "again")
    assert error.startswith(f"{name} was revoked 20")
    assert "--undo" in hint
    (line,) = terminal.said("revoke", name, "--undo")
    assert line.startswith(f"{name} is valid again; it was revoked 20")
    assert set(dict(states(terminal)).values()) == {"="}
    assert "is not revoked" in terminal.fails("revoke", name, "--undo")[0]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "no reason is given"),
        (["--why", "  "], "no reason is given"),
        (["--why", "x" * 501], "the reason has 501 characters"),
        (["--undo", "--why", "x"], "--undo takes no --why"),
    ],
)
def test_a_revocation_needs_a_reason(
    terminal: Terminal, made: dict[str, Manifest], words: list[str], error: str
):
    assert terminal.fails("revoke", f"sft/{made['sft'].fingerprint}", *words)[0].startswith(error)


# accept


def test_what_is_accepted_is_up_to_date(
    terminal: Terminal, store: Store, made: dict[str, Manifest]
):
    old = age(store, made["sft"])
    assert dict(states(terminal))["sft"] == "~"
    lines = terminal.said("accept", "tiny", "sft", "--why", "a new name")
    module = [*made["sft"].preimage["code"]][-1]
    assert lines[0].startswith(f"{old.name}: code {module} changed")
    assert lines[1] == f"accepted as {made['sft'].name}; nothing was compared"
    assert set(dict(states(terminal)).values()) == {"="}
    new = find_manifest(store, ArtifactRef("sft", made["sft"].fingerprint))
    assert new is not None
    assert new.accepted is not None
    assert new.accepted["why"] == "a new name"
    assert new.accepted["from"] == old.fingerprint
    assert "@" in new.accepted["who"]
    assert list(store.list(PINS)) == []
    again = terminal.said("accept", "tiny", "sft", "--why", "a new name")
    assert again == ["sft is up to date: there is nothing to accept"]


def test_while_it_is_accepted_an_artifact_cannot_be_collected(
    terminal: Terminal, store: Store, made: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch
):
    old = age(store, made["sft"])
    kept: set[tuple[str, str]] = set()

    def look(store: Store, offer: Offer, **options: Any) -> Published:
        (entry,) = store.list(PINS)
        pinned = find_pin(store, entry.key)
        assert pinned is not None
        kept.update(pinned.artifacts)
        return accept(store, offer, **options)

    monkeypatch.setattr("flows.cli.train.accept.accept_offer", look)
    terminal.said("accept", "tiny", "sft", "--why", "a new name")
    assert kept == {
        ("sft", old.fingerprint),
        ("sft", made["sft"].fingerprint),
        ("midtrain", made["midtrain"].fingerprint),
        ("task_data", made["task_data"].fingerprint),
    }


def test_the_artifact_to_accept_may_be_named(
    terminal: Terminal, store: Store, made: dict[str, Manifest]
):
    old = age(store, made["sft"])
    words = ["accept", "tiny", "sft", "--why", "w", "--from"]
    assert "midtrain" in terminal.fails(*words, made["midtrain"].name)[0]
    assert terminal.said(*words, f"sft/{old.fingerprint}")[1].startswith("accepted as")


def test_inputs_that_were_revoked_come_first(
    terminal: Terminal, store: Store, made: dict[str, Manifest]
):
    age(store, made["sft"])
    terminal.said("revoke", made["shards"].name, "--why", "spam")
    error, hint = terminal.fails("accept", "tiny", "sft", "--why", "w")
    assert error.startswith("sft cannot be accepted before shards")
    assert hint == "accept or run shards first"


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["sft"], 2, "--why needs a value"),
        (["sft", "--why", ""], 1, "no reason is given"),
        (["stf", "--why", "w"], 1, "there is no stage 'stf'"),
        (["sft", "--why", "w", "--steps", "0"], 2, "--steps is 0"),
        (["sft", "--why", "w", "--set", "sft.num_epochs=7"], 1, "sft/"),
    ],
)
def test_a_mistake_accepts_nothing(
    terminal: Terminal, made: dict[str, Manifest], words: list[str], code: int, error: str
):
    assert terminal.fails("accept", "tiny", *words, code=code)[0].startswith(error)


def test_a_proof_that_cannot_be_had_accepts_nothing(
    terminal: Terminal, store: Store, made: dict[str, Manifest], capsys: pytest.CaptureFixture[str]
):
    age(store, made["shards"])
    assert main(["accept", "tiny", "shards", "--why", "w", "--prove"]) == 1
    assert "was built outside git" in capsys.readouterr().err
    assert find_manifest(store, ArtifactRef("shards", made["shards"].fingerprint)) is None
    assert list(store.list(PINS)) == []
    assert list((Path(os.environ["NANOCHAT_HOME"])).glob("prove-*")) == []
