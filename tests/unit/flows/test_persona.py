"""A run with a persona: its mixtures and evaluation, and what a file of settings says of them."""

import functools
import json
from pathlib import Path

import pytest

from flows.persona import make_persona, persona_lines, slug, slug_reason, with_persona
from flows.profile_file import changes_to_toml, read_profile_file
from flows.profiles import open_profile
from flows.run_request import RunRequest
from nanochat_core.errors import ConfigError
from tasks.generated.persona import Persona
from tests.support.transcripts import Transcript

JUNIPER = Persona(name="Juniper", maker="Ada")


@pytest.mark.parametrize("profile", ["tiny", "d12", "d20_seed"])
def test_the_file_takes_the_place_of_the_tasks_that_say_who_the_model_is(
    profile: str, transcript: Transcript
) -> None:
    found = with_persona(open_profile(profile, snapshots=False).run, JUNIPER, "juniper.jsonl")
    request = RunRequest(profile=profile)
    transcript.check(profile, changes_to_toml(request, found, name="juniper", about=["a persona"]))


def test_a_stage_without_such_a_task_gets_the_whole_file() -> None:
    sft = 'sft.mixture=[{"task":"arithmetic","num_examples":50,"epochs":1}]'
    run = open_profile("tiny", overrides=(sft,), snapshots=False).run
    found = with_persona(run, JUNIPER, "juniper.jsonl")
    assert [(e.task, e.num_examples) for e in found.sft.mixture] == [
        ("juniper", None),
        ("arithmetic", 50),
    ]


def test_other_profiles_get_conversations_about_the_persona_alone() -> None:
    run = open_profile("d12", snapshots=False).run
    lines = [json.loads(line) for line in persona_lines(run, JUNIPER)]
    assert len(lines) == 1100
    assert not [line for line in lines if "spell" in json.dumps(line)]


@pytest.mark.parametrize(("profile", "depth"), [("tiny", None), ("tiny", 4), ("d20_seed", None)])
def test_the_file_of_settings_gives_the_same_run(
    profile: str, depth: int | None, tmp_path: Path
) -> None:
    run = open_profile(profile, depth=depth, snapshots=False).run
    path = str(tmp_path / "juniper.jsonl")
    wanted = with_persona(run, JUNIPER, path)
    request = RunRequest(profile=profile, depth=depth)
    text = changes_to_toml(request, wanted, name="juniper", about=["one", "two"])
    (tmp_path / "juniper.toml").write_text(text, encoding="utf-8")
    read = read_profile_file(tmp_path / "juniper.toml")
    found = open_profile(read.profile, depth=read.depth, overrides=read.overrides, snapshots=False)
    assert found.run == wanted
    assert read.run_name == "juniper"
    assert text.startswith("# one\n# two\n")


def test_files_have_a_name_that_nothing_else_has_and_a_reason_if_it_is_another_word(
    transcript: Transcript,
) -> None:
    for name in ("Juniper", "Zo\u00eb & Co.", "\u5c0f\u660e", "Tiny", "SFT", "Spelling"):
        transcript.check(name, f"{slug(name)}\n{slug_reason(name) or ''}")
    transcript.refused(".", ConfigError, slug, ".")


def test_a_fact_is_about_something_of_the_models() -> None:
    found = make_persona(
        " Juniper ",
        maker="Ada",
        character="a gardener.",
        facts=("My best friend = a hedgehog.", "your home=Oslo"),
    )
    assert found.facts == (("best friend", "a hedgehog"), ("home", "Oslo"))
    assert (found.name, found.character) == ("Juniper", "a gardener")


def test_a_wrong_persona_is_refused_with_a_hint(transcript: Transcript) -> None:
    values = {"name": "Juniper", "maker": "Ada", "character": "a gardener", "facts": ()}
    for changes in (
        *({"facts": (fact,)} for fact in ("green", "=green", "color=")),
        {"facts": ("home=a", "my home=b")},
        {"facts": ("best friend=Otto", "best  friend=Ben")},
        {"facts": ("color=red", "colour=blue")},
        {"facts": ("hobby=chess", "my  Hobbies=tea")},
        *({"name": ""}, {"maker": "a{b}"}, {"character": "a\nb"}),
    ):
        make = functools.partial(make_persona, **(values | changes))
        transcript.refused(str(changes), ConfigError, make)
