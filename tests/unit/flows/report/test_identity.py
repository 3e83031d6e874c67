"""The report's fingerprint covers all that the report shows: its inputs' records and logs too."""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from flows.identity.fingerprint import REPOSITORY, Code, Identity
from flows.identity.manifest import File, Manifest, identify_from
from flows.profiles import open_profile
from flows.report.card import make_card
from flows.report.inputs import Artifact, open_artifacts
from flows.stages import REPORT
from infra.storage.files import sha256_of
from tests.support.flows.house import make_house
from tests.support.flows.reported import make_inputs, run_report

RUN = open_profile("tiny").run
CODE = Code(REPOSITORY)


def identity_of(artifacts: Mapping[str, Artifact]) -> Identity:
    """What the report is called that is made of these artifacts."""
    made = {name: artifact.manifest for name, artifact in artifacts.items()}
    return identify_from(REPORT, RUN, made, code=CODE)


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every single value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str) and value.startswith("2026-"):
        return value.replace("2026-", "2025-")
    return value * 3 + 1 if isinstance(value, int | float) else f"another {value}"


@pytest.mark.usefixtures("drawn_anew")
def test_the_same_artifacts_elsewhere_and_later_give_the_same_report(ordinary, card, tmp_path):
    shutil.copytree(ordinary["pretrain"].parents[1], tmp_path / "there")
    there = {name: tmp_path / "there" / name / "files" for name in ordinary}
    for path in (tmp_path / "there").rglob("*"):
        path.touch()  # as fetched at another time
    assert identity_of(open_artifacts(ordinary)) == identity_of(open_artifacts(there))
    assert run_report(tmp_path / "job", there) == card


@pytest.mark.parametrize("stage", ["pretrain", "tokenizer", "chat_eval_rl"])
def test_a_change_of_any_value_that_is_shown_gives_another_fingerprint(ordinary, stage):
    artifacts = open_artifacts(ordinary)
    card, identity = make_card(artifacts), identity_of(artifacts)
    manifest = artifacts[stage].manifest
    made = dataclasses.asdict(manifest.provenance)
    shown: set[str] = set()
    for leaf in leaves(made):
        tree = json.loads(json.dumps(made))
        place = tree
        for key in leaf[:-1]:
            place = place[key]
        place[leaf[-1]] = other(place[leaf[-1]])
        tree["segments"] = tuple(tree["segments"])
        changed = dataclasses.replace(manifest.provenance, **tree)
        written = dataclasses.replace(manifest, provenance=changed).to_json()
        there = Manifest.from_json(written, where=stage)
        others = {**artifacts, stage: dataclasses.replace(artifacts[stage], manifest=there)}
        if make_card(others) != card:
            shown.add(leaf[0])
            assert identity_of(others) != identity, leaf
    assert shown >= ({"git_commit", "metrics", "segments"} if stage == "pretrain" else {"segments"})


def test_a_change_of_a_log_that_is_shown_gives_another_fingerprint(tmp_path):
    inputs = make_inputs(tmp_path)
    before = open_artifacts(inputs)
    folder = inputs["pretrain"].parent
    log = folder / "logs" / "events.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-3]))
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes(), where="")
    listed = File(path=log.name, size=log.stat().st_size, sha256=sha256_of(log), key="logs/e")
    (folder / "manifest.json").write_bytes(dataclasses.replace(manifest, logs=(listed,)).to_json())
    after = open_artifacts(inputs)
    assert make_card(before) != make_card(after)
    assert identity_of(before) != identity_of(after)


def test_a_plan_names_the_record_that_differs(tmp_path):
    house = make_house(tmp_path / "house")
    made = house.build(commit="a")
    key = f"pretrain/{made['pretrain'].fingerprint}/manifest.json"
    changed = dataclasses.replace(made["pretrain"].provenance, git_commit="b")
    other_record = dataclasses.replace(made["pretrain"], provenance=changed)
    house.store.put(key, other_record.to_json())
    plan = house.plan()
    assert [item.stage.name for item in plan.stages if item.state != "="] == ["report"]
    assert plan.of("report").reason == "record pretrain changed"
