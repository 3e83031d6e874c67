"""The tokenizer and chat layout a model was trained with, and its loss on a fixed text, recorded.

They are compared before the model is trained further: with other ids for the same words, or another
layout of conversations, training runs without an error and the model is ruined.

    taught.json    {format, tokenizer, layout, loss, text}   digests of the tokenizer and of the
                                                             chat layout; nats a token on the fixed
                                                             text, and a digest of that text

A base model has seen no conversation: its layout is null. The loss is null if no stage of ours has
made the weights.
"""

import json
from pathlib import Path

from nanochat_core.errors import ModelError
from nanochat_core.job import write_json
from nanochat_core.train.loop.fixed_text import fixed_text_digest

FORMAT = 2
FILE = "taught.json"


def write_lineage(
    directory: Path, *, tokenizer: str, layout: str | None, loss: float | None
) -> None:
    """Record in a model directory what its model was trained with: digests, of 64 hex digits."""
    facts = {"format": FORMAT, "tokenizer": tokenizer, "layout": layout, "loss": loss}
    write_json(directory / FILE, {**facts, "text": fixed_text_digest()})


def check_lineage(directory: Path, *, tokenizer: str, layout: str) -> float | None:
    """Raise ModelError if a model was trained with another tokenizer or another chat layout.

    Returns the recorded loss; None means unknown, as if it is of another text. A model from
    elsewhere has no such record: then nothing is checked.
    """
    path = directory / FILE
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        # A base model fits every layout: it has seen none.
        taught = {"tokenizer": facts["tokenizer"], "chat layout": facts["layout"] or layout}
        short = {what: digest[:12] for what, digest in taught.items()}
        is_known = facts.get("loss") is not None and facts.get("text") == fixed_text_digest()
        loss = float(facts["loss"]) if is_known else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}", hint="fetch the model again: `nanochat fetch --help`"
        ) from error
    for what, ours in (("tokenizer", tokenizer), ("chat layout", layout)):
        if taught[what] != ours:
            raise ModelError(
                f"the model in {directory} was trained with {what} {short[what]}, "
                f"this is {ours[:12]}",
                hint="train on with the tokenizer and the version it was made with, or make the "
                "model again: `nanochat run --help`, at --from-stage",
            )
    return loss
