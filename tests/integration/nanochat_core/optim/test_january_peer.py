"""nanochat of January 2026 trained for some steps on the CPU, against our model and optimizer.

Its checkout is the one that NANOCHAT_JAN_DIR names; it runs in a process of its own.
"""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from nanochat_core.eras import numerics
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.schedule import lr_multiplier, muon_momentum
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.scaling_january import january_model, january_optimizer, january_run
from tests.support.tasks.peer import run_nanochat

pytestmark = pytest.mark.torch

STEPS = 12
# Muon's iteration runs in bf16 there, where the last bits decide; in fp32 the two can be compared.
_CODE = """
import os, sys, json, torch
from safetensors.torch import save_file
sys.path.insert(0, os.getcwd())
from nanochat.gpt import GPT, GPTConfig
out, steps, schedule = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
shape = {"n_layer": 2, "n_head": 1, "n_kv_head": 1, "n_embd": 128}
model = GPT(GPTConfig(sequence_len=64, vocab_size=256, **shape))
torch.manual_seed(1)
model.init_weights()
torch.Tensor.bfloat16 = lambda tensor: tensor
tensors = {"first/" + n: p.detach().clone() for n, p in model.named_parameters()}
adamw, muon = model.setup_optimizers(unembedding_lr=0.004, embedding_lr=0.3, matrix_lr=0.02)
tokens = torch.randint(256, (steps, 4, 65))
losses, norms = [], []
for step in range(steps):
    rows = tokens[step]
    loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.9))
    for group in adamw.param_groups + muon.param_groups:
        group["lr"] = group["initial_lr"] * schedule["lr"][step]
    for group in muon.param_groups:
        group["momentum"] = schedule["momentum"][step]
    adamw.step()
    muon.step()
    model.zero_grad(set_to_none=True)
    losses.append(loss.detach())
tensors |= {"last/" + n: p.detach() for n, p in model.named_parameters()}
tensors |= {"tokens": tokens, "losses": torch.stack(losses), "norms": torch.stack(norms)}
save_file(tensors, out)
"""


def test_training_takes_nanochats_steps(tmp_path):
    schedule = january_run(2).pretrain.schedule
    multipliers = [lr_multiplier(step, STEPS, schedule) for step in range(STEPS)]
    momenta = [muon_momentum(step, STEPS, schedule) for step in range(STEPS)]
    out = tmp_path / "steps.safetensors"
    rates_at = json.dumps({"lr": multipliers, "momentum": momenta})
    place = {"variable": "NANOCHAT_JAN_DIR", "TORCHDYNAMO_DISABLE": "1"}
    run_nanochat(_CODE, out, STEPS, rates_at, **place)
    peer = load_file(out)
    config = january_model(2, sequence_len=64, vocab_size=256)
    model = GPT(config, numerics("fp32", era="2026-01-05"))
    weights = {n.removeprefix("first/"): t for n, t in peer.items() if n.startswith("first/")}
    model.load_state_dict(weights)
    assert peer["norms"].min() < 0.9 < peer["norms"].max()  # some steps are clipped
    rates = dataclasses.replace(january_optimizer(config), grad_clip=0.9)
    optimizer = Optimizer(model, rates, precision="fp32", world=ALONE)
    losses = []
    for step in range(STEPS):
        tokens = peer["tokens"][step]
        loss = model.token_losses(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step(lr_multiplier=multipliers[step], momentum=momenta[step], weight_decay=0.0)
        losses.append(float(loss.detach()))
    torch.testing.assert_close(torch.tensor(losses), peer["losses"], atol=2e-5, rtol=0)
    for name, parameter in model.named_parameters():
        expected, first = peer[f"last/{name}"], weights[name]
        moved = (expected - first).abs().max()
        assert (parameter - expected).abs().max() < 1e-3 * moved, name
