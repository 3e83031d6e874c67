"""What a model was taught with, told beside its weights, so that it is not trained on with another.

    taught.json    {format, tokenizer, layout}   digests of the tokenizer and of the chat layout

A base model has met no conversation: its layout is null.
"""

import json
from pathlib import Path

from nanochat_core.errors import ModelError
from nanochat_core.job import write_json

FORMAT = 1
FILE = "taught.json"


def write_lineage(directory: Path, *, tokenizer: str, layout: str | None) -> None:
    """Say in a model directory what its model was taught with: digests, of 64 hex digits."""
    facts = {"format": FORMAT, "tokenizer": tokenizer, "layout": layout}
    write_json(directory / FILE, facts)


def check_lineage(directory: Path, *, tokenizer: str, layout: str) -> None:
    """Raises ModelError when a model was taught with another tokenizer or another chat layout.

    A model from elsewhere says nothing of either: nothing is checked.
    """
    path = directory / FILE
    if not path.exists():
        return
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        taught = {"tokenizer": facts["tokenizer"], "chat layout": facts["layout"] or layout}
        short = {what: digest[:12] for what, digest in taught.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}", hint="fetch the model again: `nanochat fetch --help`"
        ) from error
    for what, ours in (("tokenizer", tokenizer), ("chat layout", layout)):
        if taught[what] != ours:
            raise ModelError(
                f"the model in {directory} was taught with {what} {short[what]}, "
                f"this is {ours[:12]}",
                hint="train on with the tokenizer and the version it was made with, or make the "
                "model again: `nanochat run --help`, at --from-stage",
            )
