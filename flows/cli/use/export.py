"""`nanochat export`: write a model as files that other programs load."""

import contextlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.names import find_directory, open_model, open_usable
from flows.cli.options import ModelName, StoreOptions
from flows.cli.output import print_line, print_warning
from flows.interop.export_model import Form, check_export, export_model, model_card


def export(
    model: ModelName,
    directory: Annotated[Path, Parameter(name="DIR", help="Directory to make for the files.")],
    /,
    *,
    to: Annotated[
        Form,
        Parameter(
            help="hf: Hugging Face transformers. nanochat: files that nanochat loads. safetensors: "
            "weights, settings and tokenizer in our own format."
        ),
    ] = "hf",
    dtype: Annotated[str, Parameter(help="Precision of the weights as hf: bf16 or fp32.")] = "bf16",
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
) -> int:
    """Write a model as files that other programs load: whole, or not at all."""
    # Before the model is fetched and loaded, which may take minutes.
    check_export(directory.expanduser(), dtype=dtype)
    store = place.open_store()
    # A directory has no manifest; its model card has no lineage.
    manifest = None
    if find_directory(model) is None:
        manifest = open_usable(store, model, warn=print_warning)
    with contextlib.closing(place.cache) as cache:
        source = open_model(store, model, cache=cache, warn=print_warning)
        done = export_model(
            source,
            directory.expanduser(),
            form=to,
            dtype=dtype,
            card=lambda is_own_code: model_card(
                store, manifest, name=model, is_own_code=is_own_code
            ),
        )
    print_line(f"{done.directory}: {', '.join(done.files)}")
    for note in done.notes:
        print_line(note)
    return 0
