"""`nanochat fetch --as`: files that other programs load, whole or not at all."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flows.interop import export_model
from flows.interop.card import model_card
from tests.support.flows.shelf import make_manifest, put_artifact, put_run
from tests.support.nanochat_core.interop.models import a_directory

pytestmark = pytest.mark.torch
ERAS = ("2026-01-05", "2026-03-14")


def export(model: str, to: str, *more: str) -> list[str]:
    """The words that convert a model, as hf unless others say."""
    return ["fetch", model, "--to", to, *([] if "--as" in more else ["--as", "hf"]), *more]


@pytest.fixture(params=ERAS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model directory."""
    return a_directory(tmp_path, request.param)


def test_as_transformers_load_it(model, tmp_path, terminal):
    out = tmp_path / "out"
    first, note = terminal.said(*export(str(model), str(out)))
    is_own = "transformers_model.py" in first
    assert ("trust_remote_code=True" in note) == is_own
    names = ("", "generation_", "tokenizer_")
    assert {path.name for path in out.iterdir()} >= {
        *("README.md", "chat_template.jinja", "model.safetensors", "tokenizer.json"),
        *(f"{name}config.json" for name in names),
    }
    assert ("trust_remote_code=True)" in (out / "README.md").read_text()) == is_own
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    terminal.said(*export(str(model), str(tmp_path / "wide"), "--dtype", "fp32"))
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}


@pytest.mark.parametrize("form", ["hf", "nanochat", "safetensors"])
def test_every_user_whom_the_umask_admits_may_read_it(form, model, tmp_path, terminal):
    (model / "model.safetensors").chmod(0o600)
    mask = os.umask(0o027)
    try:
        terminal.said(*export(str(model), str(tmp_path / "out"), "--as", form))
    finally:
        os.umask(mask)
    paths = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    modes = {path.name: path.stat().st_mode & 0o777 for path in paths}
    assert modes == {path.name: 0o750 if path.is_dir() else 0o640 for path in paths}


def test_first_mistakes_are_one_line_and_leave_nothing(tmp_path, terminal):
    model, out, link = str(a_directory(tmp_path, ERAS[0])), tmp_path / "out", tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    # Found before the model is looked up.
    for dtype in ("fp16", "int3"):
        terminal.refuses(*export("sft@unknown", str(out), "--dtype", dtype), code=2)
    for to in (tmp_path, link, Path(model) / "config.json" / "out"):
        terminal.refuses(*export("sft@unknown", str(to)))
    terminal.refuses(*export(model, str(out), "--as", "safetensors", "--dtype", "fp32"))
    terminal.refuses(*export(model, str(out), "--model-only"))
    terminal.refuses(*export(model, "/proc/x"))
    assert not out.exists()
    out.mkdir()
    terminal.refuses(*export(model, str(out)))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_an_export_that_fails_half_way_leaves_nothing(model, tmp_path, monkeypatch):
    def fail(**_: object) -> str:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        export_model.export_model(model, tmp_path / "out", form="hf", dtype="bf16", card=fail)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out-*"))


def test_the_card_says_where_the_model_is_from_and_how_it_did(store):
    report = make_manifest("report", files={"report.md": "# tiny\n\n- sums 74 %\n"}, run="tiny-1")
    store.put(report.files[0].key, b"# tiny\n\n- sums 74 %\n")
    put_artifact(store, report)
    sft = make_manifest("sft", run="tiny-1", metrics={"val_loss": 1.5})
    put_run(store, "tiny-1", report, sft)
    text = model_card(store, sft, name="me/mine", form="hf", era=None, is_own_code=True)
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "A nanochat-style chat model" in text
    base = model_card(store, make_manifest("pretrain"), name="b", form="nanochat", era=None)
    assert "A nanochat-style base model" in base
    assert "# me/mine" in text
    assert f"digest `{sft.digest}`" in text
    assert "- val_loss: 1.5" in text
    assert "## tiny\n\n- sums 74 %" in text
