"""Stage `midtrain`: the base model learns the form of conversations, and tools, from a mixture."""

from typing import Any

from nanochat_core.job import Job
from nanochat_core.train.chat import train_on_conversations


def run(job: Job) -> dict[str, Any]:
    """Train the base model on the midtraining mixture, and write the mid model."""
    return train_on_conversations(job, "midtrain")
