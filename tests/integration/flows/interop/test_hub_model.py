"""Models on the Hub: `chat hf://OWNER/NAME` and its like, of every form in which one is published.

The server is a local one that answers as the Hub does. The checkpoints of nanochat itself are
written by its own code, in the checkouts that NANOCHAT_DIR and NANOCHAT_JAN_DIR name.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.artifacts.cache import Cache
from flows.artifacts.names import open_artifact, open_model, open_run
from flows.cli.app import main
from flows.interop import card
from flows.interop.import_model import run_name
from infra.storage.base import Store
from nanochat_core.interop.hub_files import HubModel
from nanochat_core.interop.nanochat_files import write_checkpoint
from nanochat_core.interop.pickled_tokenizer import write_tokenizer
from nanochat_core.model.checkpoint import load_model, save_model
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_flows.client import open_client
from tests.support.flows.shelf import make_manifest, put_artifact, put_run
from tests.support.nanochat_core.data.hub_server import HubServer, talking_to_hub
from tests.support.nanochat_core.interop.models import a_model, a_tokenizer

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


def save(directory: Path, era: str) -> Path:
    """Write a model directory."""
    for part in ("words", "model"):
        (directory / part).mkdir(parents=True)
    a_tokenizer().save(directory / "words")
    save_model(
        directory / "model",
        a_model(era),
        tokenizer=directory / "words",
        optimizer=None,
        made_by="sft",
    )
    return directory / "model"


@pytest.fixture(params=ERAS)
def era(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass(frozen=True)
class Commands:
    """Runs commands in this process."""

    capsys: pytest.CaptureFixture[str]

    def said(self, *words: str) -> str:
        """What a command that ends with 0 prints to both streams."""
        code = main(words)
        out, err = self.capsys.readouterr()
        assert code == 0, err
        return err + out

    def asked(self, model: str) -> str:
        """What `chat` prints: notes, and an answer of a few tokens."""
        return self.said("chat", model, "-p", "Hello", "--max-tokens", "4")

    def fails(self, *words: str) -> tuple[str, str]:
        """Error and hint of a command that must fail, after its notes."""
        assert main(words) == 1
        out, err = self.capsys.readouterr()
        *notes, error, hint = err.splitlines()
        assert (out, error[:7], hint[:6]) == ("", "error: ", "hint: ")
        assert all(note.startswith(NOTES) for note in notes), notes
        return error.removeprefix("error: "), hint.removeprefix("hint: ")


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


def put_chat_model(store: Store, directory: Path, commands: Commands, era: str = ERAS[1]) -> None:
    """Put a model and its evaluation into a store, in a run called `mine`."""
    folder = directory / "chatsft_checkpoints" / "d4"
    folder.mkdir(parents=True)
    write_checkpoint(folder, a_model(era), a_tokenizer(), step=1, extra={})
    commands.said("import", str(folder), "--name", "mine")
    model = open_artifact(store, "sft@mine")
    scores = {"chatcore": 0.25, "chatcore_low": 0.2, "chatcore_high": 0.3}
    evaluation = put_artifact(store, make_manifest("chat_eval_sft", metrics=scores))
    put_run(store, model.provenance.run, model, evaluation, name="mine")


def weights(store: Store, name: str, cache: Path) -> dict[str, torch.Tensor]:
    with Cache(cache, 10**9) as held:
        directory = open_model(store, name, cache=held, warn=print)
        return load_model(directory, torch.device("cpu")).state_dict()


@pytest.mark.parametrize("form", FORMS)
def test_an_exported_model_is_published_and_used_from_there(
    form: str, hub: HubServer, store: Store, tmp_path: Path, commands: Commands
) -> None:
    model = save(tmp_path / "made", "2026-03-14")
    out = tmp_path / "out"
    wide = ("--dtype", "fp32") if form == "hf" else ()
    commands.said("fetch", str(model), "--to", str(out), "--as", form, *wide)
    commit = publish(hub, out)
    # A directory has no stage, so its card says no kind.
    message, hint = commands.fails("chat", ADDRESS, "-p", "Hello")
    assert message.startswith("the kind of the model at ")
    assert hint.endswith(f"nanochat import {ADDRESS} --name NAME")
    text = commands.said("import", ADDRESS, "--kind", "sft", "--name", "theirs")
    assert "\nsft@theirs: sft/" in text
    assert f"era 2026-03-14, from {ADDRESS}@{commit}\n" in text
    found, made = weights(store, "theirs", tmp_path / "cache"), a_model("2026-03-14").state_dict()
    rows = 300  # of a vocabulary that is padded to 320: an export for transformers has no more
    assert all(torch.equal(found[name][:rows], made[name][:rows]) for name in made)


@pytest.mark.parametrize("form", FORMS)
def test_a_models_card_has_its_scores_and_an_import_reads_them(
    form: str, era: str, hub: HubServer, store: Store, tmp_path: Path, commands: Commands
) -> None:
    put_chat_model(store, tmp_path / "made", commands, era)
    out = tmp_path / "out"
    commands.said("fetch", "sft@mine", "--to", str(out), "--as", form)
    card = (out / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card
    assert "| chatcore | 0.25 | 0.2 to 0.3 |" in card
    assert "$ nanochat chat hf://OWNER/NAME" in card
    assert ("AutoModelForCausalLM" in card) == (form == "hf")
    commit = publish(hub, out)
    err = commands.asked(ADDRESS)
    assert f"importing {ADDRESS}@{commit} into {store.url}" in err
    name = f"hf-me-my-model-{commit[:12]}"
    facts = open_artifact(store, f"sft@{name}").provenance.metrics
    if form != "nanochat":  # of the same bytes as the import that made `mine`: one artifact
        assert facts == {
            "address": f"{ADDRESS}@{commit}",
            "era": era,
            "published": {"chatcore": 0.25, "chatcore_low": 0.2, "chatcore_high": 0.3},
        }
    # The second time nothing is downloaded and nothing imported.
    before = len(hub.downloads())
    run = open_run(store, name).run
    assert "importing" not in commands.asked(f"{ADDRESS}@main")
    assert (len(hub.downloads()), open_run(store, name).run) == (before, run)
    # A new commit is another model; the old one stays reachable.
    (out / "NOTES").write_text("x")
    assert publish(hub, out) != commit
    assert "importing" in commands.asked(ADDRESS)
    assert "importing" not in commands.asked(f"{ADDRESS}@{commit}")
    hub.close()
    assert "importing" not in commands.asked(f"{ADDRESS}@{commit}")


_PEERS = {"2026-01-05": "NANOCHAT_JAN_DIR", "2026-03-14": "NANOCHAT_DIR"}
_CODE = """
import os, sys, torch
sys.path.insert(0, os.getcwd())
from dataclasses import asdict
from nanochat.checkpoint_manager import save_checkpoint
from nanochat.gpt import GPT, GPTConfig
torch.manual_seed(1)
config = GPTConfig(sequence_len=256, vocab_size=300, n_layer=4, n_head=4, n_kv_head=4, n_embd=64)
with torch.device("meta"):
    model = GPT(config)
model.to_empty(device="cpu")
model.init_weights()
for parameter in model.parameters():
    parameter.data += 0.1 * torch.randn(parameter.shape)
meta = {"step": 3, "val_loss": 1.0, "model_config": asdict(config)}
save_checkpoint(sys.argv[1], 3, model.state_dict(), None, meta)
"""


@pytest.mark.parametrize("era", _PEERS)
@pytest.mark.parametrize("folder", ["", "chatsft_checkpoints/d4"])
def test_a_checkpoint_that_nanochat_wrote_is_talked_to(
    era: str, folder: str, hub: HubServer, store: Store, tmp_path: Path, commands: Commands
) -> None:
    if _PEERS[era] not in os.environ:
        pytest.skip(f"{_PEERS[era]} names no checkout of nanochat")
    files = tmp_path / "files"
    subprocess.run(
        [sys.executable, "-c", _CODE, str(files / folder)],
        cwd=os.environ[_PEERS[era]],
        env={**os.environ, "PYTHONPATH": "", "NANOCHAT_DTYPE": "float32"},
        check=True,
        capture_output=True,
    )
    words = files / "tokenizer" if folder else files
    words.mkdir(exist_ok=True)
    write_tokenizer(a_tokenizer(), words / "tokenizer.pkl")
    commit = publish(hub, files)
    assert "importing" in commands.asked(ADDRESS)
    name = f"sft@hf-me-my-model-{commit[:12]}"
    assert open_artifact(store, name).provenance.metrics["era"] == era
    saved = torch.load(files / folder / "model_000003.pt", weights_only=True)
    found = weights(store, name, tmp_path / "cache")
    assert all(torch.equal(found[key], saved[key].to(found[key].dtype)) for key in found)


def test_python_takes_an_address_too(
    hub: HubServer, store: Store, tmp_path: Path, commands: Commands
) -> None:
    put_chat_model(store, tmp_path / "made", commands)
    commands.said("fetch", "sft@mine", "--to", str(tmp_path / "out"), "--as", "safetensors")
    commit = publish(hub, tmp_path / "out")
    session = open_client().chat(ADDRESS, max_tokens=4)
    assert session.parameters == sum(p.numel() for p in a_model(ERAS[1]).parameters())
    assert open_run(store, f"hf-me-my-model-{commit[:12]}").status == "finished"


def test_of_several_models_one_is_named(
    hub: HubServer, store: Store, tmp_path: Path, commands: Commands
) -> None:
    files = tmp_path / "files"
    for kind in ("base", "chatsft"):
        directory = files / f"{kind}_checkpoints" / "d4"
        directory.mkdir(parents=True)
        write_checkpoint(directory, a_model("2026-03-14"), a_tokenizer(), step=7, extra={})
        shutil.rmtree(directory / "tokenizer")
    (files / "tokenizer").mkdir()
    write_tokenizer(a_tokenizer(), files / "tokenizer" / "tokenizer.pkl")
    publish(hub, files)
    message, hint = commands.fails("chat", ADDRESS)
    assert message.endswith("has 2 models")
    folders = [f"{ADDRESS}/{kind}_checkpoints/d4" for kind in ("base", "chatsft")]
    assert hint == f"name one: {', '.join(folders)}"
    assert "\npretrain@b: pretrain/" in commands.said("import", folders[0], "--name", "b")
    assert "\nsft@c: sft/" in commands.said("import", folders[1], "--name", "c")
    assert "has no step 8" in commands.fails("import", folders[1], "--step", "8")[0]
    assert "no model in elsewhere" in commands.fails("chat", f"{ADDRESS}/elsewhere")[0]


def test_mistakes_are_one_line_and_import_nothing(
    hub: HubServer, store: Store, tmp_path: Path, commands: Commands
) -> None:
    hub_words = ("serve", "chat", "import", "fetch", "bench")
    assert {commands.fails(word, "hf://nowhere")[0] for word in hub_words} == {
        "hf://nowhere is not the address of a model"
    }
    message, hint = commands.fails("chat", "hf://me/nothing")
    assert message == f"there is no model me/nothing at {hub.endpoint}, or it is private"
    assert hint == "a name is OWNER/NAME; for a private model set HF_TOKEN"
    # A model of another architecture: its weights are not downloaded.
    config = json.dumps({"model_type": "gpt2"}).encode()
    files = {"config.json": config, "model.safetensors": b"x" * 100_000}
    commit = hub.add("me/gpt2", files, kind="model")
    message, hint = commands.fails("chat", "hf://me/gpt2")
    assert message == (
        f"hf://me/gpt2@{commit} is a model of architecture 'gpt2', which only transformers can run"
    )
    assert hint.startswith("nanochat evals can evaluate it")
    assert not hub.downloads("safetensors")
    hub.add("me/text", {"README.md": b"# Text"}, kind="model")
    assert "has no model that can be read" in commands.fails("chat", "hf://me/text")[0]
    assert "no such revision" in commands.fails("chat", "hf://me/gpt2@other")[0]
    assert not list(store.list("runs/"))


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_file_is_one_line(
    form: str, hub: HubServer, store: Store, tmp_path: Path, commands: Commands
) -> None:
    put_chat_model(store, tmp_path / "made", commands)
    out = tmp_path / "out"
    commands.said("fetch", "sft@mine", "--to", str(out), "--as", form)
    file = "model_000000.pt" if form == "nanochat" else "model.safetensors"
    publish(hub, out)
    # In transit: it is downloaded once more, then given up.
    hub.spoil(file, times=None)
    assert f"{file} of {NAME} came out wrong twice" in commands.fails("chat", ADDRESS)[0]
    hub.heal()
    # By its author: half of a file, with a digest that is right.
    (out / file).write_bytes((out / file).read_bytes()[: (out / file).stat().st_size // 2])
    publish(hub, out)
    message = commands.fails("chat", ADDRESS)[0]
    assert file in message
    assert "is not a checkpoint" in message or "cannot be read" in message
    assert [path.name for path in (tmp_path / "home").glob("scratch-*")] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "300"}, "describes no model of nanochat's"),
        ({"windows": [1]}, "describes no model of nanochat's"),
        ({"value_embed_layers": [0]}, "value embeddings are in other layers"),
        ({"hidden_size": 128}, "expected"),
        ({"model_type": "nanochat"}, "describes no model of nanochat's"),
    ],
)
def test_a_config_that_does_not_fit_is_one_line(
    change: dict[str, object],
    message: str,
    hub: HubServer,
    store: Store,
    tmp_path: Path,
    commands: Commands,
) -> None:
    put_chat_model(store, tmp_path / "made", commands)
    out = tmp_path / "out"
    commands.said("fetch", "sft@mine", "--to", str(out), "--as", "hf")
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    publish(hub, out)
    assert message in commands.fails("chat", ADDRESS)[0]


def test_a_strangers_card_decides_nothing(
    hub: HubServer, store: Store, tmp_path: Path, commands: Commands
) -> None:
    put_chat_model(store, tmp_path / "made", commands)
    out = tmp_path / "out"
    commands.said("fetch", "sft@mine", "--to", str(out), "--as", "nanochat")
    for text in ("---\n: [\n---\n", "# No metadata\n", "---\nnanochat_flows: {kind: x}\n---\n"):
        (out / "README.md").write_text(text)
        publish(hub, out)
        assert commands.fails("chat", ADDRESS)[0].startswith("the kind of the model at ")


NESTED = "---\na: " + "[" * 3000 + "\n---\n"
HUGE = f"---\nmodel-index: [{{results: [{{metrics: [{{name: x, value: 1{'0' * 400}}}]}}]}}]\n---\n"
MANY = (
    "---\nm: &m [{name: x, value: 1}]\nr: &r {metrics: *m}\nmodel-index:\n"
    + "- {results: [*r, *r, *r, *r, *r, *r, *r, *r]}\n" * 4000
    + "---\n"
)


@pytest.mark.parametrize("text", [NESTED, HUGE, MANY], ids=["nested", "huge", "many"])
def test_a_card_that_is_an_attack_is_left_out_or_cut(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_tokenizer_of_an_export_is_the_same(tmp_path: Path, commands: Commands) -> None:
    from nanochat_core.interop.transformers_tokenizer import read_transformers_tokenizer

    model = save(tmp_path / "made", "2026-03-14")
    commands.said("fetch", str(model), "--to", str(tmp_path / "out"), "--as", "hf")
    found = read_transformers_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert found.digest() == Tokenizer.load(model / "tokenizer").digest()
