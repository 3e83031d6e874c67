"""`nanochat fetch`: copy an artifact's files, or convert a model, to a directory."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.download import choose_files, copy_files
from flows.artifacts.names import find_directory, open_model, open_usable
from flows.cli.models import name_in_store
from flows.cli.options import ArtifactName, StoreOptions
from flows.cli.output import (
    count_of,
    describe_transfer,
    interruptible,
    print_line,
    print_lines,
    print_warning,
    show_bytes,
)
from flows.identity.ref import short
from flows.interop.card import model_card
from flows.interop.export_model import Dtype, Form, check_export, export_model
from nanochat_core.errors import ConfigError


def fetch(
    reference: ArtifactName,
    path: str | None = None,
    /,
    *,
    to: Path | None = None,
    model_only: bool = False,
    form: Annotated[Form | None, Parameter(name="--as")] = None,
    dtype: Dtype | None = None,
    place: StoreOptions = StoreOptions(),
) -> None:
    """Copy an artifact's files, or some of them, to a directory, every byte verified.

    Never overwrites a file that differs. After an interruption the same command resumes.

    With --as it writes a model as files that other programs load, into a new directory: whole, or
    not at all.

    Args:
        path: A file or a folder in the artifact. Default: all of it.
        to: Directory the files go to. Default STAGE-FINGERPRINT, here.
        model_only: Leave out the optimizer's state, which only training needs.
        form: Convert a model, also one in a directory. hf: for Hugging Face transformers. nanochat:
            files that nanochat loads. safetensors: weights, settings and tokenizer in our own
            format.
        dtype: With --as hf: precision of the weights, bf16 (the default) or fp32.
    """
    given = f"--as {form}" if form else "a copy without --as"
    for option, is_wrong in {
        "--model-only": form is not None and model_only,
        "--dtype": dtype is not None and form != "hf",
        "PATH": form is not None and path is not None,
    }.items():
        if is_wrong:
            raise ConfigError(f"{given} takes no {option}", hint="leave it out")
    if form is not None:
        target = to or Path(f"{Path(reference).name.replace('@', '-')}-{form}")
        return _convert(reference, target.expanduser(), form, dtype or "bf16", place)
    store = place.open_store()
    reference = name_in_store(place, store, reference)
    manifest = open_usable(store, reference, warn=print_warning)
    files = choose_files(manifest, path, model_only=model_only)
    target = to or Path(f"{manifest.stage}-{short(manifest.fingerprint)}")
    began = time.monotonic()
    with interruptible():
        # Not by the cache: the files would be on this disk twice.
        watch = partial(show_bytes, what=manifest.name)
        fetched = copy_files(store, manifest, files, target.expanduser(), watch=watch)
    size = sum(file.size for file in files)
    text = f"{count_of(len(files), 'file')}, {size:,} bytes, of {manifest.name}"
    sent, kept = sum(file.size for file in fetched), len(files) - len(fetched)
    there = f", {kept} of them there already" if kept else ""
    took = describe_transfer(sent, time.monotonic() - began)
    whole = f"already there, verified: {text}"
    print_line(f"{target}: {f'{text}{there}{took}' if fetched else whole}")


def _convert(model: str, target: Path, form: Form, dtype: Dtype, place: StoreOptions) -> None:
    """Write a model as files that other programs load."""
    # Before the model is fetched and loaded, which may take minutes.
    check_export(target)
    store = place.open_store()
    name, model = model, name_in_store(place, store, model)
    # A directory has no manifest; its model card has no lineage.
    is_stored = find_directory(model) is None
    manifest = open_usable(store, model, warn=print_warning) if is_stored else None
    with place.cache as cache:
        source = open_model(store, model, cache=cache, warn=print_warning)
        card = partial(model_card, store, manifest, name=name)
        files, note = export_model(source, target, form=form, dtype=dtype, card=card)
    print_lines([f"{target}: {', '.join(files)}", note])
