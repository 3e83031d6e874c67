"""Export models in the format of Hugging Face's transformers.

transformers has a class for January's architecture (NanoChatForCausalLM), which other programs
support too. Later models are exported with their own code (transformers_model.py), which is loaded
with trust_remote_code=True.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanochat_core.config import ModelConfig
from nanochat_core.errors import ModelError
from nanochat_core.interop.transformers_tokenizer import write_transformers_tokenizer
from nanochat_core.job import write_json
from nanochat_core.model.gpt import GPT
from nanochat_core.model.shape import value_embed_layers
from nanochat_core.tokenizer.bpe import Tokenizer

_OWN_CODE = Path(__file__).with_name("transformers_model.py")
JANUARY_NAMES = {  # ours, and those of transformers' own class
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.h.": "model.layers.",
    ".attn.c_q.": ".self_attn.q_proj.",
    ".attn.c_k.": ".self_attn.k_proj.",
    ".attn.c_v.": ".self_attn.v_proj.",
    ".attn.c_proj.": ".self_attn.o_proj.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}


def write_transformers_model(
    directory: Path, model: GPT, tokenizer: Tokenizer, *, dtype: torch.dtype
) -> bool:
    """Write a directory that transformers loads; return whether it needs trust_remote_code.

    Weights are written in `dtype`, fp32 or bf16. Raises ModelError for fp16, whose range is too
    small for these models.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(
            f"these models are not exported as {str(dtype).removeprefix('torch.')}: relu^2 and the "
            "residual stream leave the range of fp16",
            hint="take bf16, which has the range of fp32",
        )
    is_january = _is_january(model)
    config = _january_config(model) if is_january else _own_config(model)
    # Padding needs an id, and ours has none of its own: <|assistant_end|> is masked there anyway.
    special = tokenizer.special
    config |= {
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": tokenizer.bos,
        "eos_token_id": special("<|assistant_end|>"),
        "pad_token_id": special("<|assistant_end|>"),
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    weights = _weights(model, dtype, is_january=is_january)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config)
    # Generation also stops at <|bos|>, which would begin another document.
    ends = [special("<|assistant_end|>"), tokenizer.bos]
    write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": tokenizer.bos,
            "eos_token_id": ends,
            "pad_token_id": special("<|assistant_end|>"),
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 50,
            "max_length": model.config.sequence_len,
        },
    )
    write_transformers_tokenizer(tokenizer, directory, context=model.config.sequence_len)
    if not is_january:
        shutil.copyfile(_OWN_CODE, directory / _OWN_CODE.name)
    return not is_january


def _is_january(model: GPT) -> bool:
    """Return whether transformers' own class can compute this model."""
    config, values = model.config, model.numerics
    plain = not (config.residual_scalars or config.value_embeds or config.smear or config.backout)
    whole = all(window >= config.sequence_len for window in config.windows)
    # NanoChatForCausalLM has no windows, no optional parts, and no scale after QK-norm.
    return plain and whole and values.qk_scale == 1.0


def _january_config(model: GPT) -> dict[str, Any]:
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        **_shape(model.config),
        "intermediate_size": 4 * model.config.width,
        "hidden_act": "relu2",
        "rms_norm_eps": model.numerics.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.numerics.rotary_base},
        "final_logit_softcapping": model.numerics.softcap,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def _own_config(model: GPT) -> dict[str, Any]:
    config, values = model.config, model.numerics
    module = _OWN_CODE.stem
    return {
        "architectures": ["NanochatFlowsForCausalLM"],
        "model_type": "nanochat_flows",
        "auto_map": {
            "AutoConfig": f"{module}.NanochatFlowsConfig",
            "AutoModelForCausalLM": f"{module}.NanochatFlowsForCausalLM",
        },
        **_shape(config),
        "windows": list(config.windows),
        "value_embed_layers": list(value_embed_layers(config)),
        "residual_scalars": config.residual_scalars,
        "smear": config.smear,
        "backout": config.backout,
        "rope_theta": values.rotary_base,
        "rope_in_bf16": values.rotary_precision == "bf16",
        "qk_scale": values.qk_scale,
        "softcap": values.softcap,
        "gate_scale": values.gate_scale,
        "gate_channels": values.gate_channels,
        "smear_channels": values.smear_channels,
        "rms_norm_eps": values.norm_eps,
    }


def _shape(config: ModelConfig) -> dict[str, int]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.sequence_len,
    }


def _weights(model: GPT, dtype: torch.dtype, *, is_january: bool) -> dict[str, Tensor]:
    """Return the parameters under their exported names, without the padding of the vocabulary."""
    config = model.config
    result: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu()
        # Tables are padded to a multiple of 64 rows; transformers expects vocab_size of them.
        if name == "lm_head.weight" or "wte" in name or name.startswith("value_embeds."):
            values = values[: config.vocab_size]
        for ours, theirs in JANUARY_NAMES.items() if is_january else ():
            name = name.replace(ours, theirs)
        # A slice is copied: safetensors refuses a tensor that is a part of a larger storage.
        whole = len(values) == len(tensor) if tensor.ndim else True
        result[name] = values.to(dtype) if whole else values.to(dtype, copy=True)
    return result
