"""Read a model in any form in which one is published: nanochat's files, or an export of ours.

    nanochat      model_*.pt, meta_*.json and tokenizer.pkl, of any era
    hf            config.json, model.safetensors and tokenizer.json, as for transformers
    safetensors   a model directory of ours
    other         a model of transformers that is not nanochat's, for evaluation only

Nothing in the files is executed. Names, shapes, dtypes and values are validated.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch

from nanochat_core.errors import ModelError, reason_of
from nanochat_core.interop import nanochat_files
from nanochat_core.interop.transformers_import import MODEL_TYPES, read_export
from nanochat_core.model.checkpoint import load_model
from nanochat_core.tokenizer.bpe import Tokenizer

Form: TypeAlias = Literal["nanochat", "hf", "safetensors", "other"]
FOREIGN_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # of form other
MODEL_FILES = ("config.json", "model.safetensors")  # of a model directory, next to tokenizer/


@dataclass(frozen=True, kw_only=True)
class ReadModel:
    """A model that was read and validated."""

    tokenizer: Tokenizer | None  # None: it is transformers' own
    era: str | None  # of nanochat; None: no version of nanochat computes this model
    step: int | None  # None: the files do not record it
    write: Callable[[Path], None]  # writes a model directory without optimizer state
    architecture: str | None = None  # of transformers; None: nanochat's


def read_model(
    path: Path,
    *,
    step: int | None,
    era: str | None,
    tokenizer: Path | None,
    is_foreign: bool = False,
) -> ReadModel:
    """Read the model in the directory `path`; one of form other only with `is_foreign`.

    `step`, `era` and `tokenizer` choose among what nanochat's files leave open; see
    `nanochat_files`. Raises ModelError for files that are no such model, ConfigError for a choice
    that a person has to make.
    """
    form = form_of(path)
    if form == "nanochat":
        return _read_nanochat(path, step=step, era=era, tokenizer=tokenizer)
    if form == "hf":
        checkpoint, words = read_export(path)
        return ReadModel(
            tokenizer=words,
            era=checkpoint.era,
            step=None,
            write=lambda to: nanochat_files.write_model(to, checkpoint, words),
        )
    if form == "other" and not is_foreign:
        raise foreign(path)
    if form == "other":
        return ReadModel(
            tokenizer=None,
            era=None,
            step=None,
            write=lambda to: _copy_foreign(path, to),
            architecture=_architecture(path),
        )
    model = load_model(path, torch.device("cpu"))
    words = Tokenizer.load(path / "tokenizer")
    words.check_model(model.config.vocab_size)
    era_and_windows = nanochat_files.find_era(model.config, model.numerics)
    return ReadModel(
        tokenizer=words,
        era=era_and_windows and era_and_windows[0],
        step=None,
        write=lambda to: copy_model(path, to),
    )


def form_of(path: Path) -> Form:
    """Return the form of the files in a directory. Raises ModelError if they are no model."""
    config = path / "config.json"
    # First: nanochat's files may lie next to a config of a later conversion.
    if any(path.glob("model_*.pt")) or not config.exists():
        return "nanochat"
    tree = _read_config(config)
    if {"made_by", "model", "numerics"} <= tree.keys():
        return "safetensors"
    return "hf" if tree.get("model_type") in MODEL_TYPES else "other"


def foreign(path: Path, *, name: str | None = None) -> ModelError:
    """Return the error for a model called `name` that only transformers can run."""
    return ModelError(
        f"{name or path} is a model of architecture {_architecture(path)!a}, which only "
        "transformers can run",
        hint="nanochat evals can evaluate it, with the questions of a profile: --profile d12",
    )


def _architecture(path: Path) -> str:
    return str(_read_config(path / "config.json").get("model_type"))[:40]


def _copy_foreign(path: Path, to: Path) -> None:
    """Copy the files of a transformers model; code that came with it is left behind.

    Raises ModelError if it has no weights.
    """
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no *.safetensors", hint="weights of other kinds are not read")
    for file in sorted(path.iterdir()):
        # An adapter names another model, which transformers would load with it.
        is_wanted = file.name != "adapter_config.json" and any(map(file.match, FOREIGN_FILES))
        if file.is_file() and is_wanted:
            shutil.copyfile(file, to / file.name)


def copy_model(path: Path, to: Path) -> None:
    """Copy a model directory, except for files that only training needs."""
    for name in MODEL_FILES:
        if not (path / name).is_file():
            raise ModelError(f"{path} is not a model: it has no {name}")
        shutil.copyfile(path / name, to / name)
    shutil.copytree(path / "tokenizer", to / "tokenizer", copy_function=shutil.copyfile)


def _read_nanochat(
    path: Path, *, step: int | None, era: str | None, tokenizer: Path | None
) -> ReadModel:
    checkpoint = nanochat_files.read_checkpoint(path, step=step, era=era)
    pickled = tokenizer or nanochat_files.find_tokenizer(path)
    if pickled is None:
        raise ModelError(
            f"{path} has no tokenizer.pkl next to it", hint="say where it is with --tokenizer"
        )
    words = nanochat_files.read_checkpoint_tokenizer(pickled, checkpoint.config)
    return ReadModel(
        tokenizer=words,
        era=checkpoint.era,
        step=checkpoint.step,
        write=lambda to: nanochat_files.write_model(to, checkpoint, words),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not the config of a model: {error}") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{path} is not the config of a model")
    return cast("dict[str, Any]", tree)
