"""lm-evaluation-harness reads an export and scores continuations as our model does."""

import pytest
import torch

from nanochat_core.interop.transformers_files import write_transformers_model
from tests.support.nanochat_core.interop.models import a_model, a_tokenizer

pytestmark = pytest.mark.torch
huggingface = pytest.importorskip(
    "lm_eval.models.huggingface", reason="the harness is missing: pip install 'lm-eval[hf]'"
)
Instance = pytest.importorskip("lm_eval.api.instance").Instance

CONTEXT, CONTINUATION = "The capital of France is", " Paris, I think."


def test_the_harness_scores_a_continuation_as_we_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    model, tokenizer, directory = a_model("2026-03-14"), a_tokenizer(), tmp_path / "out"
    directory.mkdir()
    write_transformers_model(directory, model, tokenizer, dtype=torch.float32)
    harness = huggingface.HFLM(
        pretrained=str(directory), trust_remote_code=True, dtype="float32", device="cpu"
    )
    asked = Instance("loglikelihood", {}, (CONTEXT, CONTINUATION), 0)
    ((theirs, _),) = harness.loglikelihood([asked], disable_tqdm=True)

    context, whole = (tokenizer.encode(text) for text in (CONTEXT, CONTEXT + CONTINUATION))
    assert whole[: len(context)] == context
    with torch.no_grad():
        tokens = torch.tensor([whole])
        scores = model(tokens)[0].log_softmax(-1)
    learnt = scores[len(context) - 1 : -1].gather(1, tokens[0, len(context) :, None])
    assert theirs == pytest.approx(float(learnt.sum()), abs=1e-3)
