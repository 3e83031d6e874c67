"""Logits of nanochat's own models, with random weights, against ours with the same weights.

Its versions are the checkouts that NANOCHAT_DIR (of since 14 March 2026) and NANOCHAT_JAN_DIR (of
5 January 2026) name; without one, what needs it is skipped. They run in processes of their own.
"""

import pytest
import torch
from safetensors.torch import load_file

from nanochat_core.eras import ERAS, numerics, of_era
from nanochat_core.model.gpt import GPT
from tests.support.nanochat_core.random_gpt import shape_of
from tests.support.tasks.peer import run_nanochat

pytestmark = pytest.mark.torch

PEERS = {"2026-01-05": "NANOCHAT_JAN_DIR", "2026-03-14": "NANOCHAT_DIR"}
SHAPE = shape_of(*[512] * 5)
# Longer than a short window. Every weight is random, those that start at zero too.
_CODE = """
import os, sys, torch
from safetensors.torch import save_file
sys.path.insert(0, os.getcwd())
from nanochat.gpt import GPT, GPTConfig
out, precision = sys.argv[1:]
shape = {"n_layer": 5, "n_head": 4, "n_kv_head": 2, "n_embd": 64}
model = GPT(GPTConfig(sequence_len=512, vocab_size=300, **shape))
model.init_weights()
torch.manual_seed(7)
with torch.no_grad():
    for name, p in model.named_parameters():
        p.copy_(torch.randn(p.shape) * (1.0 if "wte" in name else 0.3))
january = not hasattr(model, "smear_lambda")
if january and precision == "bf16":  # as on a GPU; later versions do without autocast
    model.transformer.wte.to(torch.bfloat16)
tokens = torch.randint(300, (2, 400))
autocast = torch.autocast("cpu", torch.bfloat16, enabled=january and precision == "bf16")
with torch.no_grad(), autocast:
    logits = model(tokens)
tensors = {"weights/" + name: p.detach() for name, p in model.named_parameters()}
save_file(tensors | {"tokens": tokens, "logits": logits}, out)
"""


@pytest.fixture(scope="module", params=PEERS)
def era(request):
    return request.param


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def peer(request, era, tmp_path_factory):
    """The precision, and what the peer had and gave in it."""
    out = tmp_path_factory.mktemp("peer") / "model.safetensors"
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[request.param]
    place = {"variable": PEERS[era], "NANOCHAT_DTYPE": dtype}
    run_nanochat(_CODE, out, request.param, **place)
    return request.param, load_file(out)


def our_model(era, precision, weights):
    pattern = "SSSL" if ERAS[era].short_window else "L"
    model = GPT(of_era(SHAPE, era, pattern=pattern), numerics(precision, era=era))
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def test_our_logits_are_nanochats(era, peer):
    precision, tensors = peer
    prefix = "weights/"
    weights = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    expected = tensors["logits"]
    assert expected.std() > 0.5
    model = our_model(era, precision, weights)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == weights[name].dtype, name
    difference = (model(tensors["tokens"]) - expected).abs().max()
    # Bf16 rounds alike because the operations come in the same order. In fp32 both sides are up to
    # 2.5e-5 from the same model in fp64, of logits up to 9.
    assert difference <= (5e-5 if precision == "fp32" else 0.0), difference
