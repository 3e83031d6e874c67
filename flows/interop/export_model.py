"""Export a model of ours as files that other programs load. An export is complete or absent."""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from flows.interop.card import FILE
from infra.storage.files import writing
from nanochat_core.errors import ConfigError

Form: TypeAlias = Literal["hf", "nanochat", "safetensors"]
Dtype: TypeAlias = Literal["bf16", "fp32"]  # not fp16: the residual stream leaves its range


def check_export(to: Path) -> None:
    """Raise ConfigError if `to` exists or cannot."""
    if os.path.lexists(to):  # also a link to nothing, which no directory could replace
        raise ConfigError(f"{to} exists already", hint="name a directory that does not")
    above = next(path for path in to.absolute().parents if path.exists())
    if not above.is_dir():
        raise ConfigError(f"{above} is a file", hint="name a directory that is not below it")


def export_model(
    model: Path, to: Path, *, form: Form, dtype: Dtype, card: Callable[..., str]
) -> tuple[list[str], str]:
    """Write the model in the directory `model` as `form` into `to`: see `check_export`.

    Returns the names of the files, and a note for the person who uses them. `dtype` is that of the
    weights as hf. `card` returns the text of README.md, given `form`, the model's `era` and
    `is_own_code`: see `model_card`. Raises ModelError.
    """
    with writing(to, ConfigError, hint="name another directory"):
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        # A temporary directory on the same file system, so that the rename at the end is atomic.
        scratch = to.with_name(f".{to.name}-{uuid.uuid4().hex[:8]}")
        scratch.mkdir()
    try:
        note = _write(model, scratch, form=form, dtype=dtype, card=card)
        files = sorted(p.relative_to(scratch).as_posix() for p in scratch.rglob("*") if p.is_file())
        # safetensors makes a file that only its owner may read, and a copy has its source's mode.
        for path in scratch.rglob("*"):
            path.chmod((scratch if path.is_dir() else scratch / FILE).stat().st_mode)
        scratch.rename(to)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return files, note


def _write(model: Path, to: Path, *, form: Form, dtype: Dtype, card: Callable[..., str]) -> str:
    # Imported late: torch takes seconds, and `flows` is imported by every command.
    import torch

    from nanochat_core.interop.nanochat_files import find_era, write_checkpoint
    from nanochat_core.interop.read_model import copy_model
    from nanochat_core.interop.transformers_files import write_transformers_model
    from nanochat_core.model.checkpoint import load_model
    from nanochat_core.tokenizer.bpe import Tokenizer

    loaded = load_model(model, torch.device("cpu"))
    is_own_code = False
    if form == "safetensors":
        copy_model(model, to)
        note = "a model directory: `nanochat chat`, `serve` and any program that reads safetensors"
    else:
        tokenizer = Tokenizer.load(model / "tokenizer")
        if form == "nanochat":
            commit = write_checkpoint(to, loaded, tokenizer, step=0, extra={})
            note = f"nanochat's version {commit} computes what this model does"
        else:
            kind = torch.bfloat16 if dtype == "bf16" else torch.float32
            is_own_code = write_transformers_model(to, loaded, tokenizer, dtype=kind)
            note = (
                "load it with trust_remote_code=True: it brings the file that computes it"
                if is_own_code
                else "transformers' own NanoChatForCausalLM loads it"
            )
    found = find_era(loaded.config, loaded.numerics)
    text = card(form=form, era=found and found[0], is_own_code=is_own_code)
    (to / FILE).write_text(text, encoding="utf-8")
    return note
