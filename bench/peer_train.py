"""The peer's side of `bench/train.py` and `bench/parity.py`: nanochat's own script, unchanged.

`peer_train.py OPTIONS` with JSON: `checkout`, `arguments` of scripts/base_train.py, `threads`,
`seed`, and perhaps `case` (the bench: random tokens, held by the gate), `rows` (a file of batches
instead of its loader's) with `device`, `buffer` (the documents that its loader chooses from) or
`start` (a file of initial weights). The script is run as the program; all else is its
own, but for its attention where the case names a backend of ours for it (`peer_attention`). Where
the module wandb is not installed, which it imports and does not use here, an empty one takes its
place.
"""

import functools
import json
import os
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CPU_DTYPE = {"fp32": "float32", "bf16": "bfloat16"}  # of a case; on a GPU it takes bf16 by itself
LOADER = "tokenizing_distributed_data_loader_with_state_bos_bestfit"
STATE = {"pq_idx": 0, "rg_idx": 0, "epoch": 1}  # the place in the data that it prints
NUM_BATCHES = 8  # random ones, one after another for ever


def main() -> None:
    """Run the script until it ends or the driver has enough."""
    options = json.loads(sys.argv[1])
    checkout = Path(options["checkout"])
    sys.path[0] = str(checkout)
    sys.argv = ["base_train", *options["arguments"]]
    if not installed("wandb"):
        sys.modules["wandb"] = types.ModuleType("wandb")
    import torch

    torch.set_num_threads(options["threads"])
    seed = torch.manual_seed
    torch.manual_seed = lambda _: seed(options["seed"])
    if (case := options.get("case")) is not None:
        prepare(case)
    if (rows := options.get("rows")) is not None:
        give_rows(rows, options["device"])
    elif (buffer := options.get("buffer")) is not None:
        use_buffer(buffer)
    if (start := options.get("start")) is not None:
        start_from(start)
    runpy.run_module("scripts.base_train", run_name="__main__")


def installed(module: str) -> bool:
    """Whether a module can be imported."""
    import importlib.util

    return importlib.util.find_spec(module) is not None


def prepare(case: dict[str, Any]) -> None:
    """Random tokens, sections and the gate."""
    from bench.train_gate import open_gate

    gate = open_gate(case["device"], "peer")
    if case["device"] == "cpu":
        os.environ["NANOCHAT_DTYPE"] = CPU_DTYPE[case["precision"]]  # before it is imported
    # A checkout is not a package of ours: nothing can be said of its types.
    import nanochat.common as common  # pyright: ignore[reportMissingImports]
    import nanochat.dataloader as dataloader  # pyright: ignore[reportMissingImports]
    import nanochat.gpt as gpt  # pyright: ignore[reportMissingImports]
    import nanochat.optim as optim  # pyright: ignore[reportMissingImports]
    import nanochat.tokenizer as tokenizer  # pyright: ignore[reportMissingImports]
    import torch

    if case["peer_attention"] != "shipped":
        use_our_attention(case["peer_attention"], case["device"])
    vocabulary = types.SimpleNamespace(get_vocab_size=lambda: case["vocab_size"])
    tokenizer.get_tokenizer = lambda: vocabulary
    tokenizer.get_token_bytes = lambda device: torch.ones(case["vocab_size"], device=device)
    setattr(dataloader, LOADER, lambda *_, **__: Timed(random_batches(case), gate))
    log = common.print0

    def print0(text: str = "", **named: Any) -> None:
        log(text, **named)
        if text.startswith("step "):
            gate.after_step()

    common.print0 = print0
    optim.MuonAdamW.step = gate.wrap(optim.MuonAdamW.step, "optimizer")
    torch.Tensor.backward = gate.wrap(
        torch.Tensor.backward, "backward" if case["compile"] else "loss"
    )
    if not case["compile"]:
        mark_loss(gpt.GPT, gate)


def use_our_attention(name: str, device: str) -> None:
    """Make the peer's model call our attention backend `name`, under the peer's interface."""
    import nanochat.common as common  # pyright: ignore[reportMissingImports]
    import nanochat.flash_attention as peer  # pyright: ignore[reportMissingImports]
    import torch

    from nanochat_core.model.attention import attend, choose

    choose(name, torch.device(device), common.COMPUTE_DTYPE)

    def call(q: Any, k: Any, v: Any, *, causal: bool, window_size: tuple[int, int]) -> Any:
        length = q.size(1)
        return attend(q, k, v, window=window_size[0] if window_size[0] >= 0 else length)

    peer.flash_attn.flash_attn_func = call


def give_rows(path: str, device: str) -> None:
    """The loader gives the batches of a file, (steps, B, T+1), again and again."""
    import nanochat.dataloader as dataloader  # pyright: ignore[reportMissingImports]
    import numpy as np
    import torch

    steps = np.load(path)

    def batches(*_: Any, **__: Any) -> Iterator[Any]:
        while True:
            for step in steps:
                tokens = torch.from_numpy(step).to(device)
                yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), STATE

    setattr(dataloader, LOADER, batches)


def use_buffer(documents: int) -> None:
    """The loader chooses from so many documents."""
    import nanochat.dataloader as dataloader  # pyright: ignore[reportMissingImports]

    loader = functools.partial(getattr(dataloader, LOADER), buffer_size=documents)
    setattr(dataloader, LOADER, loader)


def start_from(path: str) -> None:
    """The model starts from the weights of a file."""
    import nanochat.gpt as gpt  # pyright: ignore[reportMissingImports]
    import torch

    draw = gpt.GPT.init_weights

    def init_weights(model: Any) -> None:
        draw(model)
        model.load_state_dict(torch.load(path, map_location=model.get_device()))

    gpt.GPT.init_weights = init_weights


class Timed:
    """An iterator whose work counts as data."""

    def __init__(self, batches: Iterator[Any], gate: Any) -> None:
        self._next = gate.wrap(lambda: next(batches), "data")

    def __iter__(self) -> "Timed":
        return self

    def __next__(self) -> Any:
        """The next batch."""
        return self._next()


def random_batches(case: dict[str, Any]) -> Iterator[Any]:
    """Inputs and targets (B, T) as the peer's loader gives them: from pinned memory, in place."""
    import torch

    shape = (NUM_BATCHES, case["rows"], case["sequence_len"] + 1)
    tokens = torch.randint(case["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    while True:
        for rows in tokens:
            batch = rows.to(case["device"], non_blocking=True)
            yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), STATE


def mark_loss(model: Any, gate: Any) -> None:
    """The last matrix, the soft cap and the cross-entropy count as loss, forward and backward."""
    build = model.setup_optimizer

    def with_marks(self: Any, *arguments: Any, **named: Any) -> Any:
        def begin(_: Any, inputs: Any) -> None:
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda grad: gate.switch("backward") and None)
                gate.switch("loss")

        self.lm_head.register_forward_pre_hook(begin)
        return build(self, *arguments, **named)

    model.setup_optimizer = with_marks
    model.forward = gate.wrap(model.forward, "forward")


if __name__ == "__main__":
    main()
