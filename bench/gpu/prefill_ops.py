"""Count the operations of a prompt's prefill, ours and nanochat's, without a GPU.

    [NANOCHAT_DIR=/path/to/nanochat] python -m bench.gpu.prefill_ops [--depth 20] [--tokens 2048]

Runs the passes over one prompt on torch's meta device, in bf16, and counts what is dispatched and
computes or copies: views and casts to the dtype a tensor has are left out. Each is a kernel on a
GPU, or a few; nothing is run. Ours: with one call of attention a layer; the same in a CUDA graph,
of a whole prompt and of the rest of one; chunk by chunk, as where torch's varlen_attn cannot run.
nanochat: without a package of FlashAttention.
"""

import argparse
import os
import sys
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu.report import result, say
from nanochat_core.engine.runner import Capacity, Chunk
from nanochat_core.engine.runners.choose import PAGE_SIZE, PREFILL_TOKENS, page_groups
from nanochat_core.engine.runners.device_runner import DeviceRunner
from nanochat_core.engine.runners.prefill_attention import Varlen, varlen
from nanochat_core.engine.runners.prefill_graphs import MAX_BEFORE, PassKind, padding
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import model_for_depth, numerics

META = torch.device("meta")


class Operations(TorchDispatchMode):
    """Counts what is dispatched and is more than another view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` and count it."""
        out = func(*args, **(kwargs or {}))
        given = _storages((args, kwargs))
        if func._schema.is_mutable or not _storages(out) <= given or not _storages(out):
            self.counts[func.overloadpacket.__name__] += 1
        return out


class Memory(TorchDispatchMode):
    """Adds up the bytes of tensors that are alive, `most` at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` and count what it allocates until that is freed."""
        out = func(*args, **(kwargs or {}))
        given = _storages((args, kwargs))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and not _storages(value) <= given:
                storage = value.untyped_storage()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _free(self, size: int) -> None:
        self.now -= size


def main() -> None:
    """Count, and print a line for each side."""
    parser = argparse.ArgumentParser(description="Operations of a prefill.")
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    say(f"torch {torch.__version__}, depth {options.depth}, {options.tokens} tokens; not run")
    show("ours", ours(options.depth, options.tokens, varlen))
    if options.tokens <= MAX_BEFORE:
        for name, kind in {"whole": False, "rest": True}.items():
            counts, most = captured(options.depth, PassKind(options.tokens, continues=kind))
            show(f"ours in a graph, {name}", counts)
            say(f"ours in a graph, {name}: {most / 1e6:,.0f} MB at once beside weights and pages")
    show("ours, chunk by chunk", ours(options.depth, options.tokens, None))
    if "NANOCHAT_DIR" in os.environ:
        show("nanochat", nanochats(options.depth, options.tokens))


def show(side: str, counts: Counter[str]) -> None:
    """Print one side's sum and its most frequent operations."""
    most = ", ".join(f"{name} {count}" for name, count in counts.most_common(12))
    say(f"{side}: {counts.total()} operations: {most}")
    result("prefill operations", side=side, operations=counts.total())


def ours(depth: int, tokens: int, call: Varlen | None) -> Counter[str]:
    """Return the operations of our passes, of as many tokens each as on a GPU."""
    runner = open_runner(depth, call)
    with Operations() as operations:
        for start in range(0, tokens, PREFILL_TOKENS["cuda"]):
            count = min(PREFILL_TOKENS["cuda"], tokens - start)
            runner.prefill(
                [
                    Chunk(
                        slot=0,
                        start=start,
                        prev_token=0 if start else -1,
                        tokens=[0] * count,
                        wants_logits=start + count == tokens,
                    )
                ]
            )
    return operations.counts


def captured(depth: int, kind: PassKind) -> tuple[Counter[str], int]:
    """Return the operations of a pass that a graph holds, and the most bytes that it allocates."""
    runner = open_runner(depth, varlen)
    packed = padding(kind, runner.pools, META)
    with torch.inference_mode(), Memory() as memory, Operations() as operations:
        runner.read_packed(kind, packed)
    return operations.counts, memory.most


def open_runner(depth: int, call: Varlen | None) -> DeviceRunner:
    """Return a runner without memory, with one slot and all of its pages."""
    with META:
        model = GPT(model_for_depth(depth), numerics("bf16"))
    size, longest = PAGE_SIZE["cuda"], model.config.sequence_len
    groups = page_groups(model.config, num_pages=1 + -(-longest // size))
    capacity = Capacity(groups=groups, page_size=size, num_slots=1, max_len=longest)
    runner = DeviceRunner(model, dtype=torch.bfloat16, capacity=capacity, stop_tokens=[])
    runner._varlen = call  # pyright: ignore[reportPrivateUsage]
    for group, pages in enumerate(groups):
        runner.set_table(group, 0, 0, range(1, pages.num_pages))
    return runner


def nanochats(depth: int, tokens: int) -> Counter[str]:
    """Return the operations of its one pass."""
    os.environ.setdefault("NANOCHAT_DTYPE", "bfloat16")  # before it is imported
    sys.path.insert(0, os.environ["NANOCHAT_DIR"])
    from nanochat.engine import KVCache  # pyright: ignore[reportMissingImports]
    from nanochat.gpt import GPT as Peer  # pyright: ignore[reportMissingImports]
    from nanochat.gpt import GPTConfig  # pyright: ignore[reportMissingImports]

    config = model_for_depth(depth)
    shape = {"n_head": config.num_heads, "n_kv_head": config.num_kv_heads}
    with META:
        peer: Any = Peer(
            GPTConfig(
                sequence_len=config.sequence_len,
                vocab_size=config.vocab_size,
                n_layer=depth,
                n_embd=config.width,
                **shape,
            )
        )
    cache: Any = KVCache(
        batch_size=1,
        num_heads=config.num_kv_heads,
        seq_len=tokens,
        head_dim=config.width // config.num_heads,
        num_layers=depth,
        device="meta",
        dtype=torch.bfloat16,
    )
    # It reads the position on the host, and a meta tensor has no value.
    cache.cache_seqlens = torch.zeros(1, dtype=torch.int32)
    with torch.inference_mode(), Operations() as operations:
        peer(torch.zeros(1, tokens, dtype=torch.int64, device="meta"), kv_cache=cache)
    return operations.counts


def _storages(values: Any) -> set[int]:
    return {
        value.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        for value in tree_leaves(values)
        if isinstance(value, Tensor)
    }


if __name__ == "__main__":
    main()
