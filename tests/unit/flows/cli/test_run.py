"""What `nanochat run` says while it runs."""

from pathlib import Path

from flows.building.build import uri_of
from flows.cli.train.run import first_chat
from infra.storage.local import LocalStore
from tests.support.flows.shelf import make_manifest


def test_thefirst_chat_is_with_the_model_that_sft_has_just_made(tmp_path: Path) -> None:
    model = make_manifest("sft")
    event = {"kind": "finished", "uri": uri_of(LocalStore(tmp_path), model)}

    line = first_chat(("--home", "here"), "sft", event)

    assert line is not None
    assert line.endswith(f": nanochat chat {model.name} --home here")
    assert first_chat((), "rl", event) is None
    assert first_chat((), "sft", {**event, "kind": "cached"}) is None
