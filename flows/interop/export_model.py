"""Export a model of ours as files that other programs load. An export is complete or absent."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import find_run
from flows.artifacts.transfer import read_file
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.stages import REPORT, stage_named
from infra.storage.base import Store
from infra.storage.files import writing
from nanochat_core.errors import ConfigError, ModelError

Form: TypeAlias = Literal["hf", "nanochat", "safetensors"]
_SHOWN_METRICS = 12
_DTYPES = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class Export:
    """The files of an export, and notes for the person who uses them."""

    directory: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]


def check_export(to: Path, *, dtype: str) -> None:
    """Raise ConfigError if `to` exists or cannot, or no model is exported in this precision."""
    if os.path.lexists(to):  # also a link to nothing, which no directory could replace
        raise ConfigError(f"{to} exists already", hint="name a directory that does not")
    above = next(path for path in to.absolute().parents if path.exists())
    if not above.is_dir():
        raise ConfigError(f"{above} is a file", hint="name a directory that is not below it")
    if dtype not in _DTYPES:
        why = ": relu^2 and the residual stream leave the range of fp16" if dtype == "fp16" else ""
        raise ConfigError(
            f"--dtype is '{dtype}'{why}", hint="bf16, which has fp32's range, or fp32"
        )


def export_model(
    model: Path, to: Path, *, form: Form, dtype: str, card: Callable[[bool], str]
) -> Export:
    """Write the model in the directory `model` as `form` into `to`, which must not exist yet.

    `dtype` is that of the weights as hf: "bf16" or "fp32". `card` returns the model card's text,
    given whether the export contains code of its own. Raises ModelError, and ConfigError if
    `to` exists or the precision is none of these.
    """
    check_export(to, dtype=dtype)
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


def model_card(
    store: Store | None, manifest: Manifest | None, *, name: str, is_own_code: bool
) -> str:
    """Return an export's README.md: what it is, how to load it, and the report card if any."""
    trust = ", trust_remote_code=True" if is_own_code else ""
    title = name.replace("\n", " ")  # a line break would end the heading
    kind = "chat" if manifest is None else stage_named(manifest.stage).model
    lines = [
        "---",  # YAML that the Hub reads
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [nanochat, nanochat-flows]",
        "---",
        "",
        f"# {title}",
        "",
        f"A nanochat-style {kind} model, trained by nanochat-flows.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY"{trust})',
        f'model = AutoModelForCausalLM.from_pretrained("DIRECTORY", dtype="auto"{trust})',
        'messages = [{"role": "user", "content": "Hello"}]',
        "inputs = tokenizer.apply_chat_template(",
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
        ")",
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
        "```",
        "",
    ]
    if is_own_code:
        lines += [
            "Its architecture is not one of transformers' own: the file `transformers_model.py`",
            "beside the weights computes it; it runs only where trust_remote_code=True allows it.",
            "",
        ]
    lines += [
        "transformers turns special tokens that are spelled out in a text, such as `<|bos|>`, into",
        "special ids. Remove them from text of untrusted users first.",
        "",
    ]
    if manifest is not None:
        lines += _facts(manifest)
        lines += _report(store, manifest) if store is not None else []
    return "\n".join(lines).rstrip() + "\n"


def _facts(manifest: Manifest) -> list[str]:
    numbers = {
        name: value
        for name, value in manifest.provenance.metrics.items()
        if type(value) in (int, float, str)
    }
    return [
        "## Where it is from",
        "",
        f"- artifact `{manifest.name}`, digest `{manifest.digest}`",
        f"- made by run `{manifest.provenance.run}` at {manifest.provenance.created}",
        *(f"- {name}: {value}" for name, value in list(numbers.items())[:_SHOWN_METRICS]),
        "",
    ]


def _report(store: Store, manifest: Manifest) -> list[str]:
    """Return the report card of the run that made the model as lines; empty if it has none."""
    run = find_run(store, manifest.provenance.run)
    fingerprint = run.stages.get(REPORT.name) if run else None
    report = find_manifest(store, ArtifactRef(REPORT.name, fingerprint)) if fingerprint else None
    data = read_file(store, report, "report.md") if report else None
    if data is None:
        return []
    text = data.decode("utf-8", errors="replace")
    # Its headings move one level down, below the model card's own.
    return ["## Report card", "", *(f"#{x}" if x.startswith("#") else x for x in text.splitlines())]


def _write(
    model: Path, to: Path, *, form: Form, dtype: str, card: Callable[[bool], str]
) -> tuple[str, ...]:
    # Imported late: torch takes seconds, and `flows` is imported by every command.
    import torch

    from nanochat_core.model.checkpoint import load_model
    from nanochat_core.tokenizer.bpe import Tokenizer

    if form == "safetensors":
        return _copy_files(model, to)
    loaded = load_model(model, torch.device("cpu"))
    tokenizer = Tokenizer.load(model / "tokenizer")
    if form == "nanochat":
        from nanochat_core.interop.nanochat_files import write_checkpoint

        commit = write_checkpoint(to, loaded, tokenizer, step=0, extra={})
        return (f"nanochat's version {commit} computes what this model does",)
    from nanochat_core.interop.transformers_files import write_transformers_model

    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    is_own_code = write_transformers_model(to, loaded, tokenizer, card=card, dtype=kind)
    if is_own_code:
        return ("load it with trust_remote_code=True: it brings the file that computes it",)
    return ("transformers' own NanoChatForCausalLM loads it",)


def _copy_files(model: Path, to: Path) -> tuple[str, ...]:
    """Copy the model directory, except for files that only training needs."""
    for name in ("config.json", "model.safetensors"):
        if not (model / name).is_file():
            raise ModelError(f"{model} is not a model: it has no {name}")
        shutil.copyfile(model / name, to / name)
    shutil.copytree(model / "tokenizer", to / "tokenizer", copy_function=shutil.copyfile)
    return ("a model directory: `nanochat chat`, `serve` and any program that reads safetensors",)


def _umask() -> int:
    """Return this process's umask, which can be read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
