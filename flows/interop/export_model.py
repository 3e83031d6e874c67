"""Export a model of ours as files that other programs load. An export is complete or absent."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from flows.interop.card import FILE
from infra.storage.files import writing
from nanochat_core.errors import ConfigError

Form: TypeAlias = Literal["hf", "nanochat", "safetensors"]
Dtype: TypeAlias = Literal["bf16", "fp32"]  # not fp16: the residual stream leaves its range


@dataclass(frozen=True, kw_only=True)
class Export:
    """The files of an export, and notes for the person who uses them."""

    directory: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]


def check_export(to: Path) -> None:
    """Raise ConfigError if `to` exists or cannot."""
    if os.path.lexists(to):  # also a link to nothing, which no directory could replace
        raise ConfigError(f"{to} exists already", hint="name a directory that does not")
    above = next(path for path in to.absolute().parents if path.exists())
    if not above.is_dir():
        raise ConfigError(f"{above} is a file", hint="name a directory that is not below it")


def export_model(
    model: Path, to: Path, *, form: Form, dtype: Dtype, card: Callable[..., str]
) -> Export:
    """Write the model in the directory `model` as `form` into `to`, which must not exist yet.

    `dtype` is that of the weights as hf. `card` returns the text of README.md, given `form`, the
    model's `era` and `is_own_code`: see `model_card`. Raises ModelError, and ConfigError if `to`
    exists.
    """
    check_export(to)
    with writing(to, ConfigError, hint="name another directory"):
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        # A temporary directory on the same file system, so that the rename at the end is atomic.
        scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.absolute().parent))
    try:
        notes = _write(model, scratch, form=form, dtype=dtype, card=card)
        files = sorted(p.relative_to(scratch).as_posix() for p in scratch.rglob("*") if p.is_file())
        # mkdtemp makes a directory and safetensors a file that only their owner may read.
        for path in (scratch, *scratch.rglob("*")):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())
        scratch.rename(to)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return Export(directory=to, files=tuple(files), notes=notes)


def _write(
    model: Path, to: Path, *, form: Form, dtype: Dtype, card: Callable[..., str]
) -> tuple[str, ...]:
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
    return (note,)


def _umask() -> int:
    """Return this process's umask, which can be read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
