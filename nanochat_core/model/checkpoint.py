"""Save and load models: safetensors for tensors, JSON for the rest, never a pickle.

A model directory can be used for inference or trained further:

    config.json             format, model and numerics sections, and which stage made it
    model.safetensors       weights, one entry per parameter, nanochat's names
    tokenizer/              see tokenizer/bpe.py
    optimizer.safetensors   optimizer state per parameter, independent of world size (optional)
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanochat_core.config import ModelConfig, NumericsConfig, check_channels
from nanochat_core.errors import ConfigError, ModelError
from nanochat_core.job import write_json
from nanochat_core.model.gpt import GPT
from nanochat_core.section import from_json, shown

FORMAT = 1
DTYPES = (torch.float32, torch.bfloat16)  # of weights and of an optimizer's state
WEIGHT = "weight/"  # key prefix of the fp32 masters in an optimizer's state

# Not check_lfs of tasks/user_files.py: the code of a training does not read text of users.
_LFS = b"version https://git-lfs.github.com/spec/"

Tensors: TypeAlias = dict[str, torch.Tensor]


def save_model(
    directory: Path, model: GPT, *, tokenizer: Path, optimizer: Tensors | None, made_by: str
) -> None:
    """Write a model directory. The same weights give the same bytes.

    `optimizer` is its whole state; None means the model has none. Its masters are saved as the
    weights, in preference to the model's own.
    """
    # The model's parameters are working weights, perhaps bf16; the masters are the fp32 values.
    state = optimizer or {}
    masters = {k.removeprefix(WEIGHT): v for k, v in state.items() if k.startswith(WEIGHT)}
    config = {
        "format": FORMAT,
        "made_by": made_by,
        "model": model.config.tree(),
        "numerics": model.numerics.tree(),
    }
    save_file(_on_host(model.state_dict() | masters), directory / "model.safetensors")
    if optimizer is not None:
        rest = {k: v for k, v in state.items() if not k.startswith(WEIGHT)}
        save_file(_on_host(rest), directory / "optimizer.safetensors")
    copy = directory / "tokenizer"
    if tokenizer.resolve() != copy.resolve():
        shutil.rmtree(copy, ignore_errors=True)  # a killed attempt may have copied half of it
        shutil.copytree(tokenizer, copy, copy_function=shutil.copyfile)
    # Last: a directory without config.json is not a model, so a half-written one is not loaded.
    write_json(directory / "config.json", config)


def load_model(directory: Path, device: torch.device) -> GPT:
    """Load the model of a model directory, in evaluation mode.

    Raises ModelError if the directory is not a model or the weights do not fit the config.
    """
    model_config, numerics = load_config(directory)
    with torch.device("meta"):
        model = GPT(model_config, numerics)
    # Checked before memory is allocated: a damaged config may ask for any amount of it.
    weights = load_tensors(directory / "model.safetensors", device)
    _check_shapes(directory, model.state_dict(), weights)
    model.to_empty(device=device)
    model.load_state_dict(weights)
    return model.eval()


def load_config(directory: Path) -> tuple[ModelConfig, NumericsConfig]:
    """Load the config of a model directory. Raises ModelError if it is not one."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} is not a model: it has no config.json",
            hint="give the directory of a base, mid or chat model (see `nanochat fetch --help`)",
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ConfigError(f"it is {shown(tree)}, expected a group of settings")
        if (version := tree.get("format")) != FORMAT:
            raise ModelError(f"{path} is of format {shown(version)}, this version reads {FORMAT}")
        model = from_json(ModelConfig, tree.get("model"), where="model")
        numerics = from_json(NumericsConfig, tree.get("numerics"), where="numerics")
        check_channels(model, numerics)
        return model, numerics
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not the config of a model: {error}") from error


def has_state(directory: Path) -> bool:
    """Return whether a model directory has optimizer state. Imported models have none."""
    return (directory / "optimizer.safetensors").exists()


def load_state(directory: Path) -> Tensors:
    """Load weights and optimizer state of a model directory, by the optimizer's keys, on the CPU.

    Raises ModelError if it has no optimizer state.
    """
    cpu = torch.device("cpu")
    weights = load_tensors(directory / "model.safetensors", cpu)
    state = load_tensors(directory / "optimizer.safetensors", cpu)
    return {f"{WEIGHT}{name}": tensor for name, tensor in weights.items()} | state


def load_tensors(path: Path, device: torch.device) -> Tensors:
    """Return the tensors of a safetensors file. Raises ModelError if it cannot be read."""
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        reason, hint = shown(str(error)), "fetch the model again: `nanochat fetch --help`"
        if _begins_with(path, _LFS):
            reason, hint = "it is a pointer of Git LFS", "get the file: git lfs pull"
        raise ModelError(f"{path} cannot be read: {reason}", hint=hint) from error


def _begins_with(path: Path, data: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(data)) == data
    except OSError:
        return False


def _check_shapes(directory: Path, expected: Tensors, actual: Tensors) -> None:
    for name, message in _mismatches(expected, actual):
        raise ModelError(f"weights in {directory} do not fit its config: {name} {message}")


def _mismatches(expected: Tensors, actual: Tensors) -> Iterator[tuple[str, str]]:
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            yield name, "is missing"
        elif name not in expected:
            yield shown(name), "is not part of the model"
        elif expected[name].shape != actual[name].shape:
            yield name, f"is {tuple(actual[name].shape)}, expected {tuple(expected[name].shape)}"
        elif actual[name].dtype not in DTYPES:
            yield name, f"is {actual[name].dtype}, expected fp32 or bf16"


def _on_host(tensors: Tensors) -> Tensors:
    """Copy the tensors to contiguous CPU memory, sorted by name."""
    # clone: safetensors refuses tensors that share memory, and parameters are views of one buffer.
    return {name: tensors[name].detach().cpu().contiguous().clone() for name in sorted(tensors)}
