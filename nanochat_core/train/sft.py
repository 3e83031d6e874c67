"""Stage `sft`: the mid model becomes a chat model on a small mixture of the best conversations."""

from typing import Any

from nanochat_core.job import Job
from nanochat_core.train.chat import train_on_conversations


def run(job: Job) -> dict[str, Any]:
    """Train the mid model on the SFT mixture, and write the chat model."""
    return train_on_conversations(job, "sft")
