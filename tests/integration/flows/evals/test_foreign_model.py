"""`nanochat evals` of a model of transformers: in the store, evaluated, and next to others."""

import json
import shutil
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import pytest

from flows.artifacts.names import open_artifact
from flows.artifacts.runs import newest_runs
from tests.support.nanochat_core.data.hub_server import talking_to_hub
from tests.support.nanochat_core.data.web_server import WebServer
from tests.support.nanochat_core.evaluate.core_reference import write_bundle
from tests.support.nanochat_core.evaluate.gpt2 import write_gpt2

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.torch,
    pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed"),
]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("models") / "gpt2", window=256)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[str]:
    """The setting that asks the questions of a bundle on a server."""
    write_bundle(tmp_path / "bundle")
    data = BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for path in sorted((tmp_path / "bundle").rglob("*")):
            archive.write(path, f"eval_bundle/{path.relative_to(tmp_path / 'bundle')}")
    with WebServer(data.getvalue()) as web:
        yield f"task_data.core_bundle={web.url}"


NOTES = ("importing ", "reading the checkpoint", "model")  # of progress


def test_it_is_evaluated_once_and_compared(
    gpt2, core, store, server, tmp_path, monkeypatch, terminal
):
    monkeypatch.setenv("PREFECT_API_URL", server.api_url)
    other = tmp_path / "other"
    shutil.copytree(gpt2, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"activation_function": "relu"}))
    words = ("--profile", "tiny", "--set", core)
    for model in (gpt2, other):
        name = f"pretrain@local-{model.name}"
        assert f"{name}: core " in terminal.hears("evals", str(model), *words)
        assert open_artifact(store, name).architecture == "gpt2"
    monkeypatch.chdir(gpt2.parents[1])
    assert " cached, in " in terminal.hears("evals", f"{gpt2.parent.name}/gpt2", *words)
    evaluation = open_artifact(store, "base_eval@eval-local-gpt2")
    model = open_artifact(store, "pretrain@local-gpt2")
    assert evaluation.inputs["pretrain"].fingerprint == model.fingerprint
    compared = terminal.read("compare", "eval-local-gpt2", "eval-local-other")
    stages = {stage["stage"]: stage for stage in compared["stages"]}
    [score] = [s for s in stages["base_eval"]["scores"] if s["metric"] == "core"]
    first, second = score["of"]
    assert first["low"] < first["value"] < first["high"]
    # Paired: the interval of the difference is that of the same questions.
    assert second["delta"]["low"] <= second["delta"]["value"] <= second["delta"]["high"]
    assert stages["base_eval"]["not_paired"] == [None, None]
    # No other command takes it for a model of ours.
    for words in ("chat", "plan tiny --until midtrain --use"):
        terminal.refuses(*words.split(), "pretrain@local-gpt2", notes=NOTES)


def test_mistakes_are_one_line_before_anything_is_started(
    gpt2, store, tmp_path, monkeypatch, terminal, transcript
):
    transcript.replace(str(gpt2.parent), "MODELS")

    def refuses(*words: str) -> None:
        terminal.refuses(*words, notes=NOTES)

    tiny = ("evals", str(gpt2), "--profile", "tiny")
    bundle = ("--set", "task_data.core_bundle=http://127.0.0.1:9/x.zip")
    # What no import is needed to see, before the model is read or imported.
    for model in (str(gpt2), "hf://me/gpt2"):
        refuses("evals", model)
    refuses("evals", str(gpt2), "--profile", "nothing")
    refuses(*tiny, "--set", "chat_eval.nothing=1")
    assert list(newest_runs(store, "local-gpt2")) == []
    refuses(*tiny)
    for wrong in ("--metric val_bpb", "--pool gpu", "--set pretrain.num_steps=1"):
        refuses(*tiny, *bundle, *wrong.split())
    refuses("evals", f"{gpt2}x", "--profile", "d12")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        refuses(*tiny, *bundle)
    with talking_to_hub(tmp_path / "hf-home", monkeypatch) as hub:
        hub.add("me/gpt2", {p.name: p.read_bytes() for p in gpt2.iterdir()}, kind="model")
        refuses("evals", "hf://me/gpt2", "--profile", "tiny")
        assert hub.downloads("model.safetensors")
        before = len(hub.downloads())
        refuses("chat", "hf://me/gpt2")
        assert len(hub.downloads()) == before
