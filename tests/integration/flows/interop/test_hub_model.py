"""Models on the Hub: `chat hf://OWNER/NAME` and its like, of every form in which one is published.

The server is a local one that answers as the Hub does.
"""

import json
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.artifacts.cache import Cache
from flows.artifacts.names import open_artifact, open_model, open_run
from flows.interop import card
from flows.interop.import_model import run_name
from infra.storage.base import Store
from nanochat_core.interop.hub_files import HubModel
from nanochat_core.interop.pickled_tokenizer import write_tokenizer
from nanochat_core.model.checkpoint import load_model
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_flows.client import open_client
from tests.support.flows.shelf import make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal
from tests.support.nanochat_core.data.hub_server import HubServer, talking_to_hub
from tests.support.nanochat_core.interop.models import (
    a_checkpoint,
    a_model,
    a_tokenizer,
)

pytestmark = pytest.mark.torch

NAME = "me/my-model"
ADDRESS = f"hf://{NAME}"
ERAS = ("2026-01-05", "2026-03-14")
FORMS = ("hf", "nanochat", "safetensors")
NOTES = ("importing ", "reading the checkpoint", "its README.md is left out", "model")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[HubServer]:
    with talking_to_hub(tmp_path / "hf-home", monkeypatch) as server:
        yield server


def publish(hub: HubServer, directory: Path, *, name: str = NAME) -> str:
    """Commit all files of a directory to a model's repository; returns the commit."""
    files = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    return hub.add(name, files, kind="model")


def asked(terminal: Terminal, model: str) -> str:
    """What `chat` prints: notes, and an answer of a few tokens."""
    return terminal.hears("chat", model, "-p", "Hello", "--max-tokens", "4")


def fails(terminal: Terminal, *words: str) -> tuple[str, str]:
    """Error and hint of a command that must fail, after its notes."""
    return terminal.fails(*words, notes=NOTES)


@pytest.fixture
def export(store: Store, tmp_path: Path, terminal: Terminal) -> Callable[..., Path]:
    """Return a function that exports a chat model, of a run called `mine`, with its evaluation."""

    def make(form: str, era: str = ERAS[1]) -> Path:
        folder = a_checkpoint(tmp_path / "made" / "chatsft_checkpoints" / "d4", era)
        terminal.hears("import", str(folder), "--name", "mine")
        model = open_artifact(store, "sft@mine")
        scores = {"chatcore": 0.25, "chatcore_low": 0.2, "chatcore_high": 0.3}
        evaluation = put_artifact(store, make_manifest("chat_eval_sft", metrics=scores))
        put_run(store, model.provenance.run, model, evaluation, name="mine")
        out = tmp_path / "out"
        terminal.hears("fetch", "sft@mine", "--to", str(out), "--as", form)
        return out

    return make


def opened(store: Store, name: str, directory: Path) -> Path:
    """The files of a model."""
    with Cache(directory / "cache", 10**9) as held:
        return open_model(store, name, cache=held, warn=print)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("form", FORMS)
def test_an_exported_model_is_used_from_the_hub_and_its_card_has_its_scores(
    form, era, hub, store, tmp_path, terminal, export
):
    out = export(form, era)
    card = (out / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card
    assert "| chatcore | 0.25 | 0.2 to 0.3 |" in card
    assert "$ nanochat chat hf://OWNER/NAME" in card
    assert ("AutoModelForCausalLM" in card) == (form == "hf")
    commit = publish(hub, out)
    err = asked(terminal, ADDRESS)
    assert f"importing {ADDRESS}@{commit} into {store.url}" in err
    name = f"hf-me-my-model-{commit[:12]}"
    facts = open_artifact(store, f"sft@{name}").provenance.metrics
    if form != "nanochat":  # of the same bytes as the import that made `mine`: one artifact
        assert facts == {
            "address": f"{ADDRESS}@{commit}",
            "era": era,
            "published": {"chatcore": 0.25, "chatcore_low": 0.2, "chatcore_high": 0.3},
        }
    # An export for transformers is in bf16, and without the rows that pad the vocabulary.
    found, rows = opened(store, f"sft@{name}", tmp_path), 300
    dtype = torch.bfloat16 if form == "hf" else torch.float32
    theirs = load_model(found, torch.device("cpu")).state_dict()
    for key, tensor in a_model(era).state_dict().items():
        assert torch.equal(theirs[key][:rows], tensor[:rows].to(dtype).float())
    assert Tokenizer.load(found / "tokenizer").digest() == a_tokenizer().digest()
    # The second time nothing is downloaded and nothing imported.
    before = len(hub.downloads())
    run = open_run(store, name).run
    assert "importing" not in asked(terminal, f"{ADDRESS}@main")
    assert (len(hub.downloads()), open_run(store, name).run) == (before, run)
    # A new commit is another model; the old one stays reachable.
    (out / "NOTES").write_text("x")
    assert publish(hub, out) != commit
    assert "importing" in asked(terminal, ADDRESS)
    assert "importing" not in asked(terminal, f"{ADDRESS}@{commit}")
    hub.close()
    assert "importing" not in asked(terminal, f"{ADDRESS}@{commit}")


def test_python_takes_an_address_too(hub, store, export):
    commit = publish(hub, export("safetensors"))
    session = open_client().chat(ADDRESS, max_tokens=4)
    assert session.parameters == sum(p.numel() for p in a_model(ERAS[1]).parameters())
    assert open_run(store, f"hf-me-my-model-{commit[:12]}").status == "finished"


def test_of_several_models_one_is_named(hub, tmp_path, terminal):
    files = tmp_path / "files"
    for kind in ("base", "chatsft"):
        directory = a_checkpoint(files / f"{kind}_checkpoints" / "d4", step=7)
        shutil.rmtree(directory / "tokenizer")
    (files / "tokenizer").mkdir()
    write_tokenizer(a_tokenizer(), files / "tokenizer" / "tokenizer.pkl")
    publish(hub, files)
    message, hint = fails(terminal, "chat", ADDRESS)
    assert message.endswith("has 2 models")
    folders = [f"{ADDRESS}/{kind}_checkpoints/d4" for kind in ("base", "chatsft")]
    assert hint == f"name one: {', '.join(folders)}"
    assert "\npretrain@b: pretrain/" in terminal.hears("import", folders[0], "--name", "b")
    assert "\nsft@c: sft/" in terminal.hears("import", folders[1], "--name", "c")
    assert "has no step 8" in fails(terminal, "import", folders[1], "--step", "8")[0]
    assert "no model in elsewhere" in fails(terminal, "chat", f"{ADDRESS}/elsewhere")[0]


def test_mistakes_are_one_line_and_import_nothing(hub, store, terminal):
    hub_words = ("serve", "chat", "import", "fetch", "bench")
    assert {fails(terminal, word, "hf://nowhere")[0] for word in hub_words} == {
        "hf://nowhere is not the address of a model"
    }
    message, hint = fails(terminal, "chat", "hf://me/nothing")
    assert message == f"there is no model me/nothing at {hub.endpoint}, or it is private"
    assert hint == "a name is OWNER/NAME; for a private model set HF_TOKEN"
    # A model of another architecture: its weights are not downloaded.
    config = json.dumps({"model_type": "gpt2"}).encode()
    files = {"config.json": config, "model.safetensors": b"x" * 100_000}
    commit = hub.add("me/gpt2", files, kind="model")
    message, hint = fails(terminal, "chat", "hf://me/gpt2")
    assert message == (
        f"hf://me/gpt2@{commit} is a model of architecture 'gpt2', which only transformers can run"
    )
    assert hint.startswith("nanochat evals can evaluate it")
    assert not hub.downloads("safetensors")
    hub.add("me/text", {"README.md": b"# Text"}, kind="model")
    assert "has no model that can be read" in fails(terminal, "chat", "hf://me/text")[0]
    assert "no such revision" in fails(terminal, "chat", "hf://me/gpt2@other")[0]
    assert not list(store.list("runs/"))


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_file_is_one_line(form, hub, tmp_path, terminal, export):
    out = export(form)
    file = "model_000000.pt" if form == "nanochat" else "model.safetensors"
    publish(hub, out)
    # In transit: it is downloaded once more, then given up.
    hub.spoil(file, times=None)
    assert f"{file} of {NAME} came out wrong twice" in fails(terminal, "chat", ADDRESS)[0]
    hub.heal()
    # By its author: half of a file, with a digest that is right.
    (out / file).write_bytes((out / file).read_bytes()[: (out / file).stat().st_size // 2])
    publish(hub, out)
    message = fails(terminal, "chat", ADDRESS)[0]
    assert file in message
    assert "is not a checkpoint" in message or "cannot be read" in message
    assert [path.name for path in (tmp_path / "home").glob("scratch-*")] == []


MISFITS: tuple[tuple[dict[str, object], str], ...] = (
    ({"vocab_size": "300"}, "describes no model of nanochat's"),
    ({"windows": [1]}, "describes no model of nanochat's"),
    ({"value_embed_layers": [0]}, "value embeddings are in other layers"),
    ({"hidden_size": 128}, "expected"),
    ({"model_type": "nanochat"}, "describes no model of nanochat's"),
)


def test_a_config_that_does_not_fit_is_one_line(hub, terminal, export):
    out = export("hf")
    config = json.loads((out / "config.json").read_text())
    for change, message in MISFITS:
        (out / "config.json").write_text(json.dumps(config | change))
        publish(hub, out)
        assert message in fails(terminal, "chat", ADDRESS)[0]


def test_a_strangers_card_decides_nothing(hub, terminal, export):
    out = export("nanochat")
    for text in ("---\n: [\n---\n", "# No metadata\n", "---\nnanochat_flows: {kind: x}\n---\n"):
        (out / "README.md").write_text(text)
        publish(hub, out)
        assert fails(terminal, "chat", ADDRESS)[0].startswith("the kind of the model at ")


NESTED = "---\na: " + "[" * 3000 + "\n---\n"
HUGE = f"---\nmodel-index: [{{results: [{{metrics: [{{name: x, value: 1{'0' * 400}}}]}}]}}]\n---\n"
MANY = (
    "---\nm: &m [{name: x, value: 1}]\nr: &r {metrics: *m}\nmodel-index:\n"
    + "- {results: [*r, *r, *r, *r, *r, *r, *r, *r]}\n" * 4000
    + "---\n"
)


@pytest.mark.parametrize("text", [NESTED, HUGE, MANY], ids=["nested", "huge", "many"])
def test_a_card_that_is_an_attack_is_left_out_or_cut(text, tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text(text)
    published, seen, lines = card._published, [], []  # pyright: ignore[reportPrivateUsage]

    def counted(index: Any) -> Iterator[tuple[str, Any]]:
        for found in published(index):
            seen.append(found)
            yield found

    monkeypatch.setattr(card, "_published", counted)
    found = card.read_card(tmp_path, log=lines.append)
    assert len(seen) <= 1000
    assert bool(lines) == (not found.scores)


def test_each_address_has_a_name_of_its_own() -> None:
    addresses = [("me/a", "d/sft"), ("me/a", "d-sft"), ("me/a-d", "sft"), ("me/a-d", "")]
    models = [HubModel(repository=r, folder=f, commit="0" * 40) for r, f in addresses]
    assert len({run_name(model) for model in models}) == 4
