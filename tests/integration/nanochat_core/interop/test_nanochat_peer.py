"""nanochat itself loads what is exported: the same logits, the same token ids.

Its versions are the checkouts that NANOCHAT_DIR (of since 14 March 2026) and NANOCHAT_JAN_DIR (of
5 January 2026) name; without one, what needs it is skipped. They run in processes of their own.
"""

import pytest
import torch
from safetensors.torch import load_file

from nanochat_core.interop.nanochat_files import read_checkpoint, write_checkpoint
from tests.support.nanochat_core.interop.models import a_model, a_tokenizer
from tests.support.tasks.peer import run_nanochat

pytestmark = pytest.mark.torch

PEERS = {"2026-01-05": "NANOCHAT_JAN_DIR", "2026-03-14": "NANOCHAT_DIR"}
TEXT = "In the theory of 1234 things, the rest is 'theirs'.\n\n  <|bos|> Ångström"
_CODE = """
import os, sys, torch
from pathlib import Path
from safetensors.torch import save_file
sys.path.insert(0, os.getcwd())
from nanochat.checkpoint_manager import build_model, save_checkpoint
directory, out, text, precision = sys.argv[1:]
model, tokenizer, meta = build_model(directory, 3, torch.device("cpu"), "eval")
weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
january = not hasattr(model, "smear_lambda")
if january and precision == "bf16":  # as on a GPU; later versions do without autocast
    model.transformer.wte.to(torch.bfloat16)
tokens = torch.randint(300, (2, 200), generator=torch.Generator().manual_seed(1))
autocast = torch.autocast("cpu", torch.bfloat16, enabled=january and precision == "bf16")
with torch.no_grad(), autocast:
    logits = model(tokens)
save_checkpoint(str(Path(out).parent / "again"), 3, weights, None, meta)
save_file({"logits": logits, "ids": torch.tensor(tokenizer.encode(text))}, out)
"""


# Bf16 rounds alike because the operations come in the same order.
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-5), ("bf16", 0.0)])
@pytest.mark.parametrize("era", PEERS)
def test_nanochat_loads_what_is_exported(tmp_path, era, precision, error):
    model, tokenizer = a_model(era, precision=precision), a_tokenizer()
    write_checkpoint(tmp_path, model, tokenizer, step=3, extra={"val_bpb": 1.0})
    out = tmp_path / "out.safetensors"
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    place = {"NANOCHAT_BASE_DIR": str(tmp_path), "NANOCHAT_DTYPE": dtype, "PYTHONPATH": ""}
    run_nanochat(_CODE, tmp_path, out, TEXT, precision, variable=PEERS[era], **place)
    got = load_file(out)
    tokens = torch.randint(300, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)
    assert expected.std() > 0.5
    torch.testing.assert_close(got["logits"].float(), expected, atol=error, rtol=0)
    assert got["ids"].tolist() == tokenizer.encode(TEXT)
    again = read_checkpoint(tmp_path / "again")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.weights[name].to(tensor.dtype), tensor), name
