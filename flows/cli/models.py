"""The one way in which commands resolve a model: in the store, in a directory or on the Hub."""

from functools import partial
from pathlib import Path
from typing import Any

from flows.artifacts.names import find_directory, open_model
from flows.cli.options import StoreOptions
from flows.cli.output import print_note, print_warning, show_bytes
from flows.interop import import_model as interop
from infra.storage.base import Store
from nanochat_core.interop.hub_files import is_on_hub


def name_in_store(
    where: StoreOptions, store: Store, model: str, *, is_foreign: bool = False
) -> str:
    """Return the name by which the store has `model`; one on the Hub is imported first.

    With `is_foreign`, for an evaluation, so are a model that only transformers can run and one in a
    directory.
    """
    watch = partial(show_bytes, what=model)
    options: dict[str, Any] = {"home": where.open_home(), "log": print_note, "watch": watch}
    path = find_directory(model) if is_foreign and not is_on_hub(model) else None
    if path is None:
        return interop.name_in_store(store, model, is_foreign=is_foreign, **options)
    name = f"local-{interop.NOT_IN_NAMES.sub('-', path.name)}"
    done = interop.import_model(store, path, name=name, is_foreign=True, **options)
    return f"{done.manifest.stage}@{name}"


def open_named_model(where: StoreOptions, model: str) -> Path:
    """Return a verified local directory with the model, as `flows.artifacts.names.open_model`."""
    store = where.open_store()
    name = name_in_store(where, store, model)
    watch = partial(show_bytes, what=model)
    return open_model(store, name, cache=where.cache, warn=print_warning, watch=watch)
