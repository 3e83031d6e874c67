"""What `nanochat run` says while it runs, and at its end."""

from pathlib import Path

import pytest

from flows.artifacts.cache import Cache
from flows.building.build import uri_of
from flows.cli.train.run import ending, first_chat
from flows.identity.manifest import Manifest
from infra.storage.local import LocalStore
from tests.support.flows.reported import make_inputs, run_report
from tests.support.flows.rows import publish_files
from tests.support.flows.shelf import make_manifest


def test_thefirst_chat_is_with_the_model_that_sft_has_just_made(tmp_path):
    model = make_manifest("sft")
    event = {"kind": "finished", "uri": uri_of(LocalStore(tmp_path), model)}

    line = first_chat(("--home", "here"), "sft", event)

    assert line.endswith(f": nanochat chat {model.name} --home here")
    assert first_chat((), "rl", event) is None
    assert first_chat((), "sft", {**event, "kind": "cached"}) is None


def ending_of(made: dict[str, Manifest], store: LocalStore, directory: Path) -> list[str]:
    with Cache(directory / "cache", 10**9) as cache:
        table = ending(made, store, cache, "mine", ("--home", "here"))
        return [f"{name!s:<13}  {text}" for name, text in table.rows]


def test_a_run_ends_with_bits_per_byte_scores_by_stage_losses_the_card_and_the_next_command(
    tmp_path, transcript
):
    store = LocalStore(tmp_path / "store")
    inputs = make_inputs(tmp_path / "made")
    page, text = run_report(tmp_path / "job", inputs)
    card = {"report.html": page.encode(), "report.md": text.encode()}
    report = publish_files(store, "report", card, tmp_path)
    made = {"pretrain": make_manifest("pretrain", metrics={"val_bpb_first": 3.2, "val_bpb": 1.6})}
    for name in ("chat_eval_midtrain", "chat_eval_sft", "chat_eval_rl"):
        files = {file.name: file.read_bytes() for file in inputs[name].iterdir()}
        made[name] = publish_files(store, name, files, tmp_path)
    lines = ending_of({**made, "report": report}, store, tmp_path)
    assert Path(lines[3].removeprefix("report card    ")).read_text() == page
    assert f"- {lines[1].replace('       ', ': ')}" in text  # the card says the same

    def ends(what: str, *names: str) -> None:
        found = ending_of({name: made[name] for name in names}, store, tmp_path)
        transcript.check(what, "\n".join(found))

    made |= {"report": report, "tokens": make_manifest("tokens")}
    ends("a whole run", *made)
    ends("a run with --use", "pretrain", "chat_eval_midtrain", "chat_eval_sft", "chat_eval_rl")
    ends("a run from sft on", "chat_eval_sft", "chat_eval_rl")
    ends("a run until chat_eval_sft", "chat_eval_sft")
    ends("a run until pretrain", "pretrain")
    ends("a run until tokens", "tokens")


@pytest.mark.parametrize("scores", ["none", "gone", "not_json", "[1]"])
def test_a_finished_run_with_a_damaged_evaluation_still_ends_with_its_card(
    tmp_path, capsys, transcript, scores
):
    store = LocalStore(tmp_path / "store")
    name = "examples.parquet" if scores == "none" else "scores.json"
    evaluation = publish_files(store, "chat_eval_sft", {name: scores.encode()}, tmp_path)
    if scores == "gone":
        store.delete(evaluation.files[0].key)
    report = publish_files(store, "report", {"report.html": b"card"}, tmp_path)
    card, after = ending_of({"chat_eval_sft": evaluation, "report": report}, store, tmp_path)
    assert Path(card.removeprefix("report card    ")).read_text() == "card"
    assert after == "next           nanochat chat mine --home here"
    transcript.check("warning", capsys.readouterr().err)
