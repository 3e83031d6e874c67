"""Read what `transformers_files` wrote: the export of a model for Hugging Face's transformers.

transformers' own conversions of nanochat's January models are read too, if their tokenizer is
nanochat's. The code that an export brings along is neither imported nor executed.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.config import ModelConfig, NumericsConfig, check_channels
from nanochat_core.eras import JANUARY_5, numerics
from nanochat_core.errors import ConfigError, DataError, ModelError
from nanochat_core.interop.nanochat_files import NanochatCheckpoint, check_weights, find_era
from nanochat_core.interop.transformers_files import JANUARY_NAMES
from nanochat_core.interop.transformers_tokenizer import read_transformers_tokenizer
from nanochat_core.model.checkpoint import load_tensors
from nanochat_core.model.gpt import GPT
from nanochat_core.model.shape import value_embed_layers
from nanochat_core.section import from_json, shown
from nanochat_core.tokenizer.bpe import Tokenizer

JANUARY_TYPE, OWN_TYPE = "nanochat", "nanochat_flows"
MODEL_TYPES = (JANUARY_TYPE, OWN_TYPE)
_SHAPE = {
    "depth": "num_hidden_layers",
    "width": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "sequence_len": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
_MAX_DEPTH = 1024  # as of ModelConfig
_PARTS = ("residual_scalars", "smear", "backout")
_NUMBERS = ("qk_scale", "softcap", "gate_scale", "gate_channels", "smear_channels")


def read_export(directory: Path) -> tuple[NanochatCheckpoint, Tokenizer]:
    """Read the model and the tokenizer of an export. Raises ModelError for damaged files."""
    try:
        return _read(directory)
    except ModelError as error:
        error.hint = error.hint or "take the files as they were exported; nothing of them was used"
        raise


def _read(directory: Path) -> tuple[NanochatCheckpoint, Tokenizer]:
    path = directory / "config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    file = directory / "model.safetensors"
    weights = load_tensors(file, torch.device("cpu"))
    is_january = tree["model_type"] == JANUARY_TYPE
    if is_january:
        weights = {_our_name(name): tensor for name, tensor in weights.items()}
    table = weights.get("transformer.wte.weight")
    precision = "bf16" if table is not None and table.dtype == torch.bfloat16 else "fp32"
    try:
        config = _model_of(tree, is_january=is_january)
        values = _numerics_of(tree, precision, is_january=is_january)
        check_channels(config, values)
        if not is_january and tree["value_embed_layers"] != list(value_embed_layers(config)):
            raise ConfigError("its value embeddings are in other layers than ours")
    except (ConfigError, DataError, KeyError, TypeError) as error:
        raise ModelError(f"{path} describes no model of nanochat's: {error}") from error
    # On the meta device: shapes only, no memory for what an untrusted file claims.
    with torch.device("meta"):
        expected = GPT(config, values).state_dict()
    weights = {name: _padded(tensor, expected.get(name)) for name, tensor in weights.items()}
    check_weights(file, weights, expected)
    tokenizer = read_transformers_tokenizer(directory / "tokenizer.json")
    tokenizer.check_model(config.vocab_size)
    era = find_era(config, values)
    checkpoint = NanochatCheckpoint(
        step=None,
        era=era and era[0],
        config=config,
        numerics=values,
        weights=weights,
    )
    return checkpoint, tokenizer


def _model_of(tree: dict[str, Any], *, is_january: bool) -> ModelConfig:
    shape: dict[str, Any] = {ours: tree[theirs] for ours, theirs in _SHAPE.items()}
    if is_january:
        # What transformers' class can also be, and nanochat's model never was.
        if tree["intermediate_size"] != 4 * tree["hidden_size"] or tree["hidden_act"] != "relu2":
            raise ConfigError("its MLP is not of nanochat's shape")
        if tree.get("attention_bias") or tree.get("tie_word_embeddings"):
            raise ConfigError("it has biases or one table for both ends")
        # In range before there is one window a layer: a file of strangers may claim any number.
        if type(shape["depth"]) is not int or not 1 <= shape["depth"] <= _MAX_DEPTH:
            raise ConfigError(f"num_hidden_layers is {shown(shape['depth'])}")
        shape["windows"] = [shape["sequence_len"]] * shape["depth"]
        shape |= dict.fromkeys((*_PARTS, "value_embeds"), False)
    else:
        shape["windows"] = tree["windows"]
        shape |= {part: tree[part] for part in _PARTS}
        shape["value_embeds"] = bool(tree["value_embed_layers"])
    return from_json(ModelConfig, shape, where="the config")


def _numerics_of(tree: dict[str, Any], precision: str, *, is_january: bool) -> NumericsConfig:
    if is_january:
        found = {
            "rotary_base": tree["rope_parameters"]["rope_theta"],
            "softcap": tree["final_logit_softcapping"],
        }
        values = numerics(precision, era=JANUARY_5.first_day)
    else:
        found = {name: tree[name] for name in _NUMBERS}
        found["rotary_base"] = tree["rope_theta"]
        found["rotary_precision"] = "bf16" if tree["rope_in_bf16"] else "compute"
        values = numerics(precision)
    found["norm_eps"] = tree["rms_norm_eps"]
    return from_json(NumericsConfig, {**values.tree(), **found}, where="the config")


def _our_name(name: str) -> str:
    for ours, theirs in JANUARY_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _padded(tensor: Tensor, expected: Tensor | None) -> Tensor:
    """Return a table with the rows that pad it to the model's, zeros; others as they are."""
    missing = 0 if expected is None or tensor.ndim != 2 else len(expected) - len(tensor)
    return F.pad(tensor, (0, 0, 0, missing)) if 0 < missing < 64 else tensor
