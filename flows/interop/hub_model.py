"""Names of models that are addresses on the Hugging Face Hub: imported once for each commit."""

import hashlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from flows.artifacts.pins import Log
from flows.artifacts.runs import newest_runs
from flows.interop.card import KINDS
from flows.interop.import_model import Import, import_model
from infra.storage.base import OnBytes, Store
from nanochat_core.errors import ConfigError
from nanochat_core.interop.hub_files import HubModel, download_model, is_on_hub, pin_model

NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


def name_in_store(
    store: Store,
    model: str,
    *,
    is_foreign: bool = False,
    scratch: Path,
    log: Log,
    watch: Callable[[int], AbstractContextManager[OnBytes]],
) -> str:
    """Return the name by which the store has `model`; an address on the Hub is imported first.

    Other names are returned as they are. The commit that the address means today is in the name of
    the import's run, so the next command finds it without a download. With `is_foreign` a model
    that only transformers can run is imported too. Raises like `pin_model`, `download_model` and
    `import_model`.
    """
    if not is_on_hub(model):
        return model
    pinned = pin_model(model)
    name = run_name(pinned)
    for run in newest_runs(store, name):
        for stage in KINDS.values():
            if stage in run.stages:
                return f"{stage}@{name}"
    log(f"importing {pinned.address} into {store.url}")
    try:
        done = import_from_hub(
            store, pinned, name=name, is_foreign=is_foreign, scratch=scratch, log=log, watch=watch
        )
    except ConfigError as error:  # of a choice for which only `import` has options
        again = f"with nanochat import {model} --name NAME"
        error.hint = "; ".join(filter(None, (error.hint, again)))
        raise
    return f"{done.model.stage}@{name}"


def import_from_hub(
    store: Store,
    model: HubModel,
    *,
    name: str,
    kind: str | None = None,
    tokenizer: Path | None = None,
    step: int | None = None,
    era: str | None = None,
    is_foreign: bool = False,
    scratch: Path,
    log: Log,
    watch: Callable[[int], AbstractContextManager[OnBytes]],
) -> Import:
    """Download a model and import it; the options are those of `import_model`."""
    return import_model(
        store,
        download_model(model, step=step, is_foreign=is_foreign, log=log),
        name=name,
        kind=kind,
        tokenizer=tokenizer,
        step=step,
        era=era,
        origin={"address": model.address},
        is_foreign=is_foreign,
        scratch=scratch,
        log=log,
        watch=watch,
    )


def run_name(model: HubModel) -> str:
    """Return the name of the run that imports a model at its commit: another for each address."""
    words = NOT_IN_NAMES.sub("-", model.repository)
    if model.folder:  # by a digest: a/b, a-b and a repository b of a owner's a- differ
        words += f"-{hashlib.sha256(model.folder.encode()).hexdigest()[:8]}"
    return f"hf-{words}-{model.commit[:12]}"
