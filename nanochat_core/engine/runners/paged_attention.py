"""FlashAttention over a device runner's pages, if one of its packages is installed.

No GPU has run it yet.

Shapes: B rows of a step, H query heads, D head dim.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from torch import Tensor

from nanochat_core.engine.runners.torch_runner import TorchRunner

# (group, layer, q (B, H, D), positions (B,), table (B, pages)) -> (B, H, D), over a layer's pages,
# in which the keys and values of `positions` are by now.
Attend: TypeAlias = Callable[[int, int, Tensor, Tensor, Tensor], Tensor]


def find_paged_attention(runner: TorchRunner) -> tuple[str, Attend] | None:
    """Return FlashAttention's name and its call over the runner's pages; None if not installed."""
    # Not from packages that download kernels: a server may have no network. Written-out imports,
    # which a stage's fingerprint can follow.
    with suppress(ImportError):
        from flash_attn_interface import flash_attn_with_kvcache as fa3  # pyright: ignore

        return "fa3", _paged_call(runner, fa3, "page_table")
    with suppress(ImportError):  # FlashAttention 4 alone is a folder of this name without it
        from flash_attn import flash_attn_with_kvcache as fa2  # pyright: ignore

        return "fa2", _paged_call(runner, fa2, "block_table")
    return None


def _paged_call(runner: TorchRunner, attention: Callable[..., Any], table_name: str) -> Attend:
    """Return FlashAttention's call as an `Attend`."""

    def attend(group: int, layer: int, q: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        pool = runner.pools[group]
        at, window = pool.place[layer], pool.group.window
        result = attention(
            q.unsqueeze(1),
            pool.keys[at],
            pool.values[at],
            cache_seqlens=(positions + 1).int(),
            softmax_scale=runner.weights.softmax_scale,
            causal=True,
            # As ours, a window counts keys to the left without the query's own; -1: no limit.
            window_size=(window, 0) if window < runner.max_len - 1 else (-1, -1),
            **{table_name: table},
        )
        # Some versions return the log-sum-exp along with the output.
        return (result[0] if isinstance(result, tuple) else result).squeeze(1)

    return attend
