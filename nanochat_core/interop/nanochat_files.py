"""Read and write nanochat's checkpoints: model_{step}.pt, meta_{step}.json, and the tokenizer.

Nothing in them is executed: tensors are read by torch's restricted loader, the tokenizer by ours
(pickled_tokenizer.py). Names, shapes, dtypes and values are validated. A checkpoint does not record
the constants it was trained with: these are its era's (nanochat_core/eras.py), which is detected
from its tensors, or given by the user where two eras have the same tensors.
"""

import json
import math
import re
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat_core.config import ModelConfig, NumericsConfig
from nanochat_core.eras import ERAS, HEAD, eras_with, numerics, of_era, open_era, windows_of
from nanochat_core.errors import ConfigError, ModelError, first_line, reason_of
from nanochat_core.interop.pickled_tokenizer import read_tokenizer, write_tokenizer
from nanochat_core.model.checkpoint import save_model
from nanochat_core.model.gpt import GPT
from nanochat_core.model.shape import padded_vocab_size
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train.loop.lineage import write_lineage
from tasks.user_files import FileFault, check_lfs

_MODEL_FILE = re.compile(r"model_(\d{1,9})\.pt")
_COMPILED = "_orig_mod."  # torch.compile prefixes the names of a module that it wraps
_KEYS = {
    "depth": "n_layer",
    "width": "n_embd",
    "num_heads": "n_head",
    "num_kv_heads": "n_kv_head",
    "sequence_len": "sequence_len",
    "vocab_size": "vocab_size",
}
_MOST = 2**20  # limit of each of these numbers, so that a forged one cannot exhaust memory
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class NanochatCheckpoint:
    """One checkpoint of nanochat's, or an export of ours, validated."""

    step: int | None  # None: the files do not record it
    era: str | None  # None: no version of nanochat computes this model
    config: ModelConfig
    numerics: NumericsConfig
    weights: dict[str, Tensor]  # nanochat's names, dtypes as on disk, mapped from the file


def read_checkpoint(
    directory: Path, *, step: int | None = None, era: str | None = None
) -> NanochatCheckpoint:
    """Read the checkpoint of `step` in `directory`; None means the last step.

    `era` selects among the eras with such tensors. Raises ModelError for files that are not, or
    only seem to be, a checkpoint, and ConfigError if the era is ambiguous or impossible.
    """
    try:
        return _read(directory, step, era)
    except ModelError as error:
        if error.hint is None:
            error.hint = "take the files as nanochat saved them; nothing of them was used"
        raise


def _read(directory: Path, step: int | None, era: str | None) -> NanochatCheckpoint:
    path = _find_model(directory, step)
    step = int(path.stem.removeprefix("model_"))
    meta = _read_meta(path.with_name(f"meta_{path.stem.removeprefix('model_')}.json"))
    weights = _read_weights(path)
    found = _choose_era(path, weights, era)
    config = _config_of(path, meta, weights, found)
    table = weights["transformer.wte.weight"].dtype
    values = numerics("bf16" if table == torch.bfloat16 else "fp32", era=found)
    # On the meta device: shapes only, no memory for what an untrusted file claims.
    with torch.device("meta"):
        expected = GPT(config, values).state_dict()
    check_weights(path, weights, expected)
    return NanochatCheckpoint(step=step, era=found, config=config, numerics=values, weights=weights)


def find_kind(directory: Path) -> str | None:
    """Return the kind of the last checkpoint: base, mid, sft or rl; None if it does not say.

    nanochat records it in no version. Its scripts write different keys into the meta file.
    """
    path = _find_model(directory, None)
    meta = _read_meta(path.with_name(f"meta_{path.stem.removeprefix('model_')}.json"))
    if "device_batch_size" in meta:
        return "base"
    if "val_loss" in meta:
        return "sft"
    if "val_bpb" in meta:  # midtraining until January, since then SFT, which records the windows
        return "sft" if "window_pattern" in meta["model_config"] else "mid"
    return "rl" if set(meta) == {"model_config"} else None


def find_tokenizer(directory: Path) -> Path | None:
    """Return the tokenizer.pkl of a checkpoint: next to it, or in nanochat's own location."""
    directory = directory.absolute()
    places = (directory, directory / "tokenizer", directory.parent.parent / "tokenizer")
    return next((p / "tokenizer.pkl" for p in places if (p / "tokenizer.pkl").is_file()), None)


def read_checkpoint_tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    """Read the tokenizer at `path`. Raises ModelError unless it has as many tokens as the model."""
    tokenizer = read_tokenizer(path)
    tokenizer.check_model(config.vocab_size)
    return tokenizer


def write_model(directory: Path, checkpoint: NanochatCheckpoint, tokenizer: Tokenizer) -> None:
    """Write a model directory (nanochat_core/model/checkpoint.py) without optimizer state."""
    with torch.device("meta"):
        model = GPT(checkpoint.config, checkpoint.numerics)
    model.to_empty(device="cpu")
    model.load_state_dict(checkpoint.weights)
    write_lineage(directory, tokenizer=tokenizer.digest(), layout=None, loss=None)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        tokenizer.save(Path(scratch))
        save_model(
            directory,
            model,
            tokenizer=Path(scratch),
            optimizer=None,
            made_by=f"nanochat, era {checkpoint.era}" if checkpoint.era else "nanochat-flows",
        )


def write_checkpoint(
    directory: Path, model: GPT, tokenizer: Tokenizer, *, step: int, extra: dict[str, Any]
) -> str:
    """Write the files that nanochat loads; return the nanochat commit that computes the same.

    `directory` gets model, meta (with `extra` in it) and tokenizer/. Matrices keep their dtype,
    embedding tables the compute dtype, as in nanochat. Raises ModelError for a model whose windows
    or constants no version of nanochat has.
    """
    found = find_era(model.config, model.numerics)
    if found is None:
        raise ModelError(
            "no version of nanochat computes what this model does",
            hint="its constants or windows are its own; export it as hf instead",
        )
    era, pattern = found
    assert len(model.lm_head.weight) == padded_vocab_size(model.config)
    number = f"{step:06d}"
    config: dict[str, Any] = {key: getattr(model.config, ours) for ours, key in _KEYS.items()}
    if open_era(era).short_window is not None:
        config["window_pattern"] = pattern
    meta = {"step": step, "model_config": config, "user_config": {}, **extra}
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    tables = directory / "tokenizer"
    tables.mkdir(parents=True, exist_ok=True)
    torch.save(weights, directory / f"model_{number}.pt")
    write_tokenizer(tokenizer, tables / "tokenizer.pkl")
    # nanochat's evaluation reads it for bits per byte.
    torch.save(torch.from_numpy(tokenizer.token_bytes()), tables / "token_bytes.pt")
    text = json.dumps(meta, indent=2) + "\n"
    (directory / f"meta_{number}.json").write_text(text, encoding="utf-8")
    return open_era(era).commit or f"of {era}"


def _find_model(directory: Path, step: int | None) -> Path:
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        reason = reason_of(error)
        raise ModelError(f"{directory} cannot be read: {reason}") from error
    steps = {int(match[1]): name for name in names if (match := _MODEL_FILE.fullmatch(name))}
    if not steps:
        raise ModelError(
            f"{directory} has no model_*.pt",
            hint="give the directory that nanochat saved a checkpoint to, base_checkpoints/d20 say",
        )
    if step is None:
        step = max(steps)  # by number: names sort differently beyond six digits
    if step not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise ModelError(f"{directory} has no checkpoint of step {step}", hint=f"it has: {known}")
    return directory / steps[step]


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or not isinstance(meta.get("model_config"), dict):
            raise ValueError("it has no model_config")
    except OSError as error:
        reason = reason_of(error)
        raise ModelError(f"{path} cannot be read: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} does not describe a model: {error}") from error
    return meta


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a torch archive, memory-mapped. Raises ModelError for anything else."""
    try:
        check_lfs(path)
        # A compressed archive could expand to any size, and cannot be mapped.
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ModelError(f"{path} is compressed, which torch's archives are not")
        # weights_only: nothing is executed. mmap: no memory is taken before the checks.
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        reason = reason_of(error)
        raise ModelError(f"{path} cannot be read: {reason}") from error
    except FileFault as error:
        raise ModelError(str(error), hint=error.hint) from error
    except ModelError:
        raise
    # torch.load raises many types: for what weights_only forbids, and for any kind of damage.
    except Exception as error:
        raise ModelError(
            f"{path} is not a checkpoint: {type(error).__name__}: {first_line(error)}",
            hint="nothing of it was executed; is the file whole, and from nanochat?",
        ) from error
    if not isinstance(tree, dict) or not tree:
        raise ModelError(f"{path} holds no named tensors")
    weights = {name.removeprefix(_COMPILED): tensor for name, tensor in _named(path, tree)}
    if len(weights) != len(tree):
        raise ModelError(f"{path} has tensors twice, with and without the prefix {_COMPILED}")
    return weights


def _named(path: Path, tree: dict[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors. Raises ModelError for anything but plain stored tensors."""
    # A sparse or strided view could claim far more elements than the file holds.
    for name, tensor in tree.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelError(f"{path} holds {name!r}, which is not a named tensor")
        if tensor.is_nested or tensor.device.type != "cpu":
            raise ModelError(f"{path}: {name} is a tensor without values of its own")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ModelError(f"{path}: {name} is not stored as it is, element after element")
        yield name, tensor


def _choose_era(path: Path, weights: dict[str, Tensor], asked: str | None) -> str:
    found = eras_with({name: tuple(tensor.shape) for name, tensor in weights.items()})
    if asked is not None:
        open_era(asked)
        if asked not in found:
            raise ConfigError(
                f"{path} is not of era {asked}: its tensors are of {' or '.join(found)}",
                hint=f"leave --era out, or give {' or '.join(found)}",
            )
        return asked
    first, *others = found
    if others:
        values = " or ".join(f"{era} (softcap {ERAS[era].softcap:g})" for era in found)
        raise ConfigError(
            f"{path} may be of era {values}: they differ in constants that no file records",
            hint=f"say when it was trained: --era {first} or --era {others[-1]}",
        )
    return first


def _config_of(
    path: Path, meta: dict[str, Any], weights: dict[str, Tensor], era: str
) -> ModelConfig:
    """Return the model's shape from its meta file, checked against the tensors."""
    tree = meta["model_config"]
    numbers: dict[str, int] = {}
    for ours, key in _KEYS.items():
        value = tree.get(key)
        if type(value) is not int or not 1 <= value <= _MOST:
            raise ModelError(f"{path}: {key} is {value!r} in its meta file, which cannot be")
        numbers[ours] = value
    layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    if len(layers) != numbers["depth"]:
        raise ModelError(f"{path} has {len(layers)} layers, its meta file says {numbers['depth']}")
    wte = weights.get("transformer.wte.weight")
    if wte is None or wte.ndim != 2 or wte.size(1) != numbers["width"]:
        shape = tuple(wte.shape) if wte is not None else "missing"
        raise ModelError(
            f"{path}: transformer.wte.weight is {shape}, its meta file says {numbers['width']} "
            "channels"
        )
    pattern = tree.get("window_pattern", "L")
    if not isinstance(pattern, str) or len(pattern) > numbers["depth"] + 64:
        raise ModelError(f"{path}: its window_pattern is {pattern!r:.60}")
    try:
        # With all parts: `of_era` keeps those that the era has.
        windows = (numbers["sequence_len"],) * numbers["depth"]
        shape = ModelConfig.from_tree({**numbers, "windows": windows})
        return of_era(shape, era, pattern=pattern.upper())
    except ConfigError as error:
        raise ModelError(f"{path}: its meta file describes no model: {error}") from error


def check_weights(path: Path, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ModelError unless these are the tensors of such a model, with numbers in them."""
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights:
            raise ModelError(f"{path}: {name} is missing")
        if name not in expected:
            raise ModelError(f"{path}: {name} is not part of such a model")
        tensor, shape = weights[name], tuple(expected[name].shape)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{path}: {name} is {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype == torch.float16:
            raise ModelError(
                f"{path}: {name} is fp16, whose range loses what these models compute",
                hint="take the checkpoint as nanochat saved it: fp32 and bf16",
            )
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"{path}: {name} is {tensor.dtype}, expected fp32 or bf16")
        # The precision is chosen by the embedding table; loading would round the others silently.
        if tensor.dtype == torch.float32 and expected[name].dtype == torch.bfloat16:
            raise ModelError(
                f"{path}: {name} is fp32 next to bf16 embeddings, which would round it",
                hint="nanochat keeps all embeddings in one precision; take the file as it saved it",
            )
        # The largest absolute value is NaN or infinite if any value is.
        if not math.isfinite(float(tensor.abs().amax())):
            raise ModelError(
                f"{path}: {name} has values that are not numbers",
                hint="the run that saved it had failed; take an earlier step",
            )


def find_era(config: ModelConfig, values: NumericsConfig) -> tuple[str, str] | None:
    """Return the era with a model's constants, and its windows as letters, one per layer.

    None means that no version of nanochat computes this model.
    """
    whole = config.sequence_len
    pattern = "".join("L" if window >= whole else "S" for window in config.windows)
    # nanochat's current version first: it can continue to train the model.
    for era in (HEAD, *(name for name in reversed(ERAS) if name != HEAD)):
        try:
            same_windows = windows_of(pattern, config.depth, whole, era=era) == config.windows
            is_shaped = of_era(config, era, pattern=pattern) == config
        except ConfigError:
            continue
        is_same = _arithmetic(values) == _arithmetic(numerics(values.precision, era=era))
        if same_windows and is_shaped and is_same:
            return era, pattern
    return None


def _arithmetic(values: NumericsConfig) -> dict[str, Any]:
    """Return the constants of the forward pass, without those of initialisation."""
    return {
        name: value
        for name, value in asdict(values).items()
        if name != "precision" and not name.startswith("init_")
    }
