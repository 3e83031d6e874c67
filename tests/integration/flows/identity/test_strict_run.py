"""What stages open decides their fingerprints: every stage of a small run is built strictly.

Real workers record each file of our packages that they open, and a strict build fails if its
fingerprint does not cover one of them. That it does is shown by toys, in test_code_check.py.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flows.building.build import BuildContext, build
from flows.identity.fingerprint import REPOSITORY
from flows.identity.manifest import Manifest
from flows.profiles import Profile, make_placement, open_profile
from flows.stages import STAGES
from infra.storage.open import open_store
from tests.campaigns.end_to_end import small

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]  # fourteen workers, one by one
FEWER = {
    "tokenizer.max_chars": 100_000,
    "pretrain.num_steps": 2,
    "pretrain.eval_tokens": 1024,
    "base_eval.eval_tokens": 1024,
    "base_eval.max_new_tokens": 2,
    "rl.num_steps": 1,
    "rl.max_new_tokens": 2,
    "rl.eval_examples": 1,
}


def open_small(text: Path) -> Profile:
    """Tiny, made smaller, of our own documents: reading those of all packages takes 20 s."""
    text.mkdir()
    for number, path in enumerate(sorted((REPOSITORY / "docs").rglob("*.md"))):
        shutil.copy(path, text / f"{number}.txt")
    settings = {**small.SETTINGS, **FEWER, "shards.source": "local", "shards.path": text}
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return open_profile("tiny", depth=small.DEPTH, overrides=overrides)


def test_no_stage_of_a_small_run_opens_what_its_fingerprint_does_not_cover(tmp_path):
    profile, home = open_small(tmp_path / "text"), tmp_path / "home"
    home.mkdir()
    placement = make_placement(profile.pace, home=home, gpus=0, settings=small.PLACE)
    placement = replace(placement, store=(home / "store").as_uri())
    context = BuildContext(
        run=profile.run,
        run_id="strict",
        placement=placement,
        store=open_store(placement.store),
        watch=lambda stage, event: None,
        strict=True,
    )
    made: dict[str, Manifest] = {}
    for stage in STAGES:
        inputs = {source.name: made[source.name] for source in stage.inputs}
        made[stage.name] = build(stage, context, inputs, force=False).manifest
