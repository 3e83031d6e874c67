"""`nanochat plan`, `revoke` and `accept`."""

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.artifacts.pins import PINS, find_pin
from flows.artifacts.publish import find_manifest
from flows.cli.app import main
from flows.cli.train.run import is_recorded
from flows.identity.fingerprint import REPOSITORY, Code, fingerprint_of
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.overrides import default_name
from flows.plan.accept import accept
from flows.plan.plan import make_plan
from flows.plan.prove import Proof
from flows.profiles import open_profile
from flows.run_request import RunRequest
from flows.stages import STAGES
from infra.storage.local import LocalStore
from tests.support.flows.house import build
from tests.support.flows.shelf import put_run

TINY = open_profile("tiny").run


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store with every stage of tiny, as today's code would make it."""
    directory = tmp_path_factory.mktemp("filled")
    store = LocalStore(directory / "store")
    return directory / "store", build(store, directory / "work", Code(REPOSITORY), run=TINY)


@pytest.fixture
def made(store, filled, tmp_path):
    """The artifacts of such a store, which is the default one."""
    shutil.copytree(filled[0], tmp_path / "home" / "store")
    return filled[1]


def age(store, manifest):
    """Put the same artifact, built by other code; today's is gone."""
    code = manifest.preimage["code"]
    preimage = manifest.preimage | {"code": code | {next(reversed(code)): "0" * 64}}
    fingerprint = fingerprint_of(preimage)
    old = Manifest(**(vars(manifest) | {"preimage": preimage, "fingerprint": fingerprint}))
    store.put(f"{old.stage}/{fingerprint}/manifest.json", old.to_json())
    store.put(f"index/{old.stage}/20300101t000000z-{fingerprint}", b"")
    store.delete(f"{manifest.stage}/{manifest.fingerprint}/manifest.json")
    return old


def states(terminal):
    return {item["stage"]: item["state"] for item in terminal.read("plan", "tiny")["stages"]}


# plan


@pytest.mark.usefixtures("made")
def test_plan_reports_by_its_exit_code_whether_something_will_run(terminal):
    terminal.shows("plan tiny --exit-code")
    lines = terminal.shows("plan tiny --set sft.num_epochs=7")
    changed = ("--set", "sft.num_epochs=7", "--exit-code")
    assert terminal.run("plan", "tiny", *changed) == (3, lines)
    for stage, code in (("midtrain", 0), ("sft", 3), ("rl", 3)):
        terminal.shows("plan", "tiny", stage, *changed, code=code)


@pytest.mark.usefixtures("made")
def test_plan_previews_a_rebuild_and_the_name_of_the_run(terminal):
    terminal.shows("plan tiny --force sft --from-stage chat_eval_rl --gpus 0")
    terminal.shows("plan tiny sft --force sft --gpus 0")
    assert not terminal.read("plan", "tiny", "--force", "sft")["up_to_date"]
    changed = ("plan", "tiny", "--set", "sft.num_epochs=7")
    name = default_name(RunRequest(overrides=("sft.num_epochs=7",)))
    assert terminal.run(*changed, "--name", "mine")[1][0] == "run mine"
    assert terminal.read(*changed)["run_name"] == name


def test_a_changed_setting_is_shown_before_anything_was_built(terminal):
    words = "--set sft.num_epochs=2 --depth 2"
    terminal.shows(f"plan tiny {words} --gpus 0 --place threads=2")
    assert terminal.said("plan", "tiny", *words.split(), "--name", "tiny")[0] == "run tiny"
    terminal.shows(f"plan tiny rl {words}")
    terminal.shows(f"plan tiny midtrain {words}")
    assert terminal.read("plan", "tiny", *words.split())["settings"][1] == {
        "change": "sft.num_epochs 1 -> 2",
        "stages": ["sft"],
        "after": ["rl", "chat_eval_sft", "chat_eval_rl", "report"],
    }
    settings = terminal.read("plan", "tiny", "sft", "--set", "sft.num_epochs=2")["settings"]
    assert settings == ["sft.num_epochs 1 -> 2"]
    assert terminal.read("plan", "tiny")["settings"] == []


def record(store, made, run, status="finished", *, name="tiny"):
    stages = {name: manifest.fingerprint for name, manifest in made.items()}
    put_run(store, run, name=name, status=status, stages=stages)


def test_run_starts_nothing_when_the_latest_run_has_made_everything(
    terminal, store, made, tmp_path
):
    record(store, made, "tiny-20261121t055338z-0001")
    record(store, made, "mine-20261121t055338z-0001", name="mine")
    lines = terminal.said("run", "tiny", "--name", "mine")
    assert lines[-1].split()[:4] == ["next", "nanochat", "chat", "mine"]
    store.delete("runs/mine-20261121t055338z-0001.json")
    lines = terminal.said("run", "tiny")
    assert lines[0] == f"nothing to run: {len(STAGES)} stages up to date"
    assert lines[-1].split()[:4] == ["next", "nanochat", "chat", "tiny"]
    assert len(list(store.list("runs/"))) == 1
    assert not (tmp_path / "home" / "prefect").exists()


def test_a_run_is_recorded_when_the_latest_did_not_end_or_made_something_else(
    store, made, tmp_path
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


# revoke


def test_a_revoked_artifact_is_planned_again_until_it_is_valid_again(terminal, made):
    name = made["midtrain"].name
    terminal.shows("revoke", name, "--why", "learnt the\n test set")
    assert states(terminal)["midtrain"] == "x"
    terminal.shows("plan tiny")
    terminal.refuses("revoke", name, "--why", "again")
    terminal.shows(f"revoke {name} --undo")
    assert set(states(terminal).values()) == {"="}
    terminal.refuses(f"revoke {name} --undo")


def test_a_revocation_needs_a_reason(terminal, made):
    name = made["sft"].name
    for words in ([], ["--why", "  "], ["--undo", "--why", "x"]):
        terminal.refuses("revoke", name, *words)


# accept


def test_an_accepted_artifact_is_up_to_date(terminal, store, made):
    old = age(store, made["sft"])
    assert states(terminal)["sft"] == "~"
    lines = terminal.said("accept", "tiny", "sft", "--why", "a new name")
    module = [*made["sft"].preimage["code"]][-1]
    assert lines[0].startswith(f"{old.name}: code {module} changed")
    assert lines[1] == f"accepted as {made['sft'].name}; nothing was compared"
    assert set(states(terminal).values()) == {"="}
    new = find_manifest(store, ArtifactRef("sft", made["sft"].fingerprint))
    assert (new.accepted["why"], new.accepted["from"]) == ("a new name", old.fingerprint)
    assert "@" in new.accepted["who"]
    assert list(store.list(PINS)) == []
    terminal.shows("accept", "tiny", "sft", "--why", "a new name")


def test_while_it_is_accepted_an_artifact_cannot_be_collected(terminal, store, made, monkeypatch):
    old = age(store, made["sft"])
    kept = set()

    def check(store, offer, **options):
        (entry,) = store.list(PINS)
        kept.update(find_pin(store, entry.key).artifacts)
        return accept(store, offer, **options)

    monkeypatch.setattr("flows.cli.train.accept.accept_offer", check)
    terminal.said("accept", "tiny", "sft", "--why", "a new name")
    pinned = {(name, made[name].fingerprint) for name in ("sft", "midtrain", "task_data")}
    assert kept == pinned | {("sft", old.fingerprint)}


def test_the_artifact_to_accept_may_be_named(terminal, store, made):
    old = age(store, made["sft"])
    words = ("accept", "tiny", "sft", "--why", "w", "--from")
    terminal.refuses(*words, made["midtrain"].name)
    assert terminal.said(*words, f"sft/{old.fingerprint}")[1].startswith("accepted as")


@pytest.mark.usefixtures("made")
def test_a_mistake_accepts_nothing(terminal):
    terminal.refuses("accept", "tiny", "sft", "--why", "")
    terminal.refuses("accept tiny sft --why w --set sft.num_epochs=7")


def test_a_proof_that_cannot_be_had_accepts_nothing(terminal, store, made, capsys):
    age(store, made["shards"])
    assert main(["accept", "tiny", "shards", "--why", "w", "--prove"]) == 1
    assert "was built outside git" in capsys.readouterr().err
    assert find_manifest(store, ArtifactRef("shards", made["shards"].fingerprint)) is None
    assert list(store.list(PINS)) == []
    assert list((Path(os.environ["NANOCHAT_HOME"])).glob("scratch-*")) == []


def test_a_proof_is_recorded_with_what_was_accepted(terminal, store, made, monkeypatch):
    old, given = age(store, made["sft"]), []
    facts = {"compared": 7, "digest": "0" * 64, "torch": "2.13.0", "device": "cpu", "processes": 1}
    proof = Proof(old_commit="1" * 40, new_commit="2" * 40, **facts)

    def prove(offer, job, **options):
        given.append((offer.manifest, job.stage, options["steps"]))
        return proof

    monkeypatch.setattr("flows.cli.train.accept.prove_offer", prove)
    terminal.shows("accept tiny sft --why w --prove --gpus 0 --steps 3")
    assert given == [(old, "sft", 3)]
    new = find_manifest(store, ArtifactRef("sft", made["sft"].fingerprint))
    assert new.accepted["proof"] == asdict(proof)
