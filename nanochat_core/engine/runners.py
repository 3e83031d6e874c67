"""Which runner a model gets here, and the memory it takes.

Memory is stated and checked before any of it is taken.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nanochat_core.config import ModelConfig
from nanochat_core.engine.runner import PageGroup, Runner
from nanochat_core.engine.torch_runner import TorchRunner
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.device import compute_dtype


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What was chosen, and why; printable."""

    runner: str
    precision: str
    reason: str


def open_runner(
    model: GPT,
    *,
    park_tokens: Iterable[int],
    precision: str = "model",
    num_slots: int = 32,
    max_len: int | None = None,
) -> Runner:
    """A runner of `model` on the model's device."""
    device = model.lm_head.weight.device
    size = 16 if device.type == "cpu" else 256
    max_len = min(max_len or model.config.sequence_len, model.config.sequence_len)
    return TorchRunner(
        model,
        dtype=model.dtype if precision == "model" else compute_dtype(precision),
        groups=page_groups(model.config, num_pages=1 + num_slots * -(-max_len // size)),
        page_size=size,
        num_slots=num_slots,
        max_len=max_len,
        park_tokens=park_tokens,
    )


def page_groups(config: ModelConfig, *, num_pages: int) -> tuple[PageGroup, ...]:
    """A group for each window, in the order of their first layers."""
    windows = tuple(dict.fromkeys(config.windows))
    return tuple(
        PageGroup(
            window=window,
            layers=tuple(i for i, w in enumerate(config.windows) if w == window),
            num_pages=num_pages,
        )
        for window in windows
    )
