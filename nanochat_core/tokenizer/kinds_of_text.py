"""Read kinds_of_text.txt: short texts of ours in ten languages, science, programs and maths."""

import re
from pathlib import Path


def read_kinds() -> dict[str, str]:
    """Return kind -> text, in the order of the file."""
    parts = re.split(r"^=== (\w+)\n", read_texts(), flags=re.MULTILINE)[1:]
    return {kind: text.strip("\n") for kind, text in zip(parts[::2], parts[1::2], strict=True)}


def read_texts() -> str:
    """Return the content of kinds_of_text.txt."""
    return Path(__file__).with_name("kinds_of_text.txt").read_text(encoding="utf-8")
