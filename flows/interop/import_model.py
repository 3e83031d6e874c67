"""Import models from elsewhere as artifacts, usable wherever a stage's own artifact is.

An imported model is an artifact of the stage that makes such models. Its fingerprint covers its
files alone: how they were made is unknown. A run with the chosen name is recorded that made this
model and its tokenizer and nothing else, so that sft@NAME finds it.
"""

import hashlib
import re
import time
from dataclasses import replace
from pathlib import Path

from flows.artifacts.pins import Log, pin
from flows.artifacts.publish import Published, publish
from flows.artifacts.runs import (
    check_name,
    find_tag,
    new_run,
    new_run_id,
    newest_runs,
    timestamp,
    write_run,
)
from flows.artifacts.transfer import Watch
from flows.identity.fingerprint import Identity, fingerprint_of
from flows.identity.manifest import Provenance
from flows.interop.card import KINDS, read_card
from flows.leases.file_lock import scratch_directory
from flows.stages import TOKENIZER
from infra.storage.base import Store
from infra.storage.files import sha256_of
from nanochat_core.errors import ConfigError, ModelError
from nanochat_core.interop.hub_files import HubModel, download_model, is_on_hub, pin_model
from nanochat_core.section import Tree

NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
IMPORTED = "(imported)"  # instead of a profile's name, none of which has parentheses
# The directories in which nanochat stores its checkpoints, of both of its eras.
_FOLDERS = {
    "base_checkpoints": "base",
    "mid_checkpoints": "mid",
    "chatsft_checkpoints": "sft",
    "chatrl_checkpoints": "rl",
}


def import_model(
    store: Store,
    model: Path | HubModel,
    *,
    name: str,
    kind: str | None = None,
    tokenizer: Path | None = None,
    step: int | None = None,
    era: str | None = None,
    is_foreign: bool = False,
    home: Path,
    log: Log,
    watch: Watch,
) -> Published:
    """Import a model, in a directory or downloaded from the Hub, as a run called `name`.

    It is in any form of `read_model`. `kind`, `tokenizer`, `step` and `era` are taken from the
    files and the model's card where they are not given. With `is_foreign` a model that only
    transformers can run is imported too, as a base model. `home` is where there is room for it;
    `watch` gets the number of bytes to upload. No code in the files is executed. Raises
    ModelError for files that are no such model, ConfigError for a choice that a person has to make,
    and StoreError; of the Hub also as `download_model`.
    """
    from nanochat_core.interop.read_model import form_of, read_model

    check_name(name)
    if find_tag(store, name) is not None:  # it wins over a run's name
        raise ConfigError(
            f"{name} is a tag: a model called so could not be found by its name",
            hint="choose another name with --name",
        )
    if isinstance(model, Path):
        path, address = model, None
    else:
        path = download_model(model, step=step, is_foreign=is_foreign, log=log)
        address = model.address
    card = read_card(path, log=log)
    is_other = is_foreign and path.is_dir() and form_of(path) == "other"
    stage = KINDS["base" if is_other else _kind_of(path, kind or card.kind)]
    log("reading the checkpoint")
    found = read_model(
        path, step=step, era=era or card.era, tokenizer=tokenizer, is_foreign=is_foreign
    )
    known = {
        "era": found.era,
        "from_step": found.step,
        "architecture": found.architecture,
        "published": dict(card.scores) or None,
        "address": address,
    }
    facts = {key: value for key, value in known.items() if value is not None}
    run = new_run_id(name, timestamp(time.time()))
    with scratch_directory(home) as scratch:
        folders = {stage: scratch / "model"}
        folders[stage].mkdir()
        found.write(folders[stage])
        if found.tokenizer is not None:
            folders[TOKENIZER.name] = scratch / "tokenizer"
            folders[TOKENIZER.name].mkdir()
            found.tokenizer.save(folders[TOKENIZER.name])
        identities = {made: _identify(made, folder) for made, folder in folders.items()}
        refs = [identity.ref for identity in identities.values()]
        size = sum(p.stat().st_size for p in scratch.rglob("*") if p.is_file())
        # Pinned until the run's record names them: a garbage collection in between would delete the
        # new artifacts, which nothing refers to yet.
        with (
            pin(store, refs, why=f"import of {name}", log=log, pause=time.sleep),
            watch(size) as on_bytes,
        ):
            provenance = Provenance(
                run=run,
                owner=run,
                epoch=0,
                created=timestamp(time.time()),
                git_commit=None,
                metrics=facts,
                segments=(),
            )
            parts = {
                made: publish(
                    store,
                    identity,
                    folders[made],
                    logs=[],
                    inputs={},
                    provenance=provenance,
                    on_bytes=on_bytes,
                )
                for made, identity in identities.items()
            }
            fingerprints = {made: part.manifest.fingerprint for made, part in parts.items()}
            record = new_run(run, name, profile=IMPORTED, depth=None)
            record = replace(record, status="finished", ended=record.started, stages=fingerprints)
            write_run(store, record)
    return parts[stage]


def _kind_of(path: Path, kind: str | None) -> str:
    """Return `kind` if it is given, else what nanochat's folder or meta file says.

    Raises ConfigError if neither names a kind, ModelError if there is no such directory.
    """
    if not path.is_dir():
        raise ModelError(
            f"{path} is a file" if path.exists() else f"there is no directory {path}",
            hint="give a directory with nanochat's model_*.pt, meta_*.json and tokenizer.pkl",
        )
    if kind is not None:
        if kind not in KINDS:
            raise ConfigError(f"--kind is '{kind}'", hint=f"one of: {', '.join(KINDS)}")
        return kind
    from nanochat_core.interop.nanochat_files import find_kind
    from nanochat_core.interop.read_model import form_of

    found = _FOLDERS.get(path.absolute().parent.name)
    if found is None and form_of(path) == "nanochat":
        found = find_kind(path)
    if found is None:
        raise ConfigError(
            f"the kind of the model at {path} is unknown",
            hint=f"name it with --kind: {', '.join(KINDS)}",
        )
    return found


def _identify(stage: str, files: Path) -> Identity:
    """Return the identity of an imported artifact, computed from its files alone."""
    digests: dict[str, Tree] = {
        path.relative_to(files).as_posix(): sha256_of(path)
        for path in sorted(files.rglob("*"))
        if path.is_file()
    }
    # The shape of a stage's pre-image, so that readers need no other case. No inputs and no code:
    # equal files give an equal fingerprint, and importing them again finds the artifact.
    preimage: dict[str, Tree] = {
        "stage": stage,
        "format": 1,
        "config": {"imported": digests},
        "inputs": {},
        "code": {},
    }
    return Identity(stage=stage, fingerprint=fingerprint_of(preimage), preimage=preimage)


# Models that are addresses on the Hugging Face Hub: imported once for each commit.


def name_in_store(
    store: Store, model: str, *, is_foreign: bool = False, home: Path, log: Log, watch: Watch
) -> str:
    """Return the name by which the store has `model`; an address on the Hub is imported first.

    Other names are returned as they are. The commit that the address means today is in the name of
    the import's run, so the next command finds it without a download. With `is_foreign` a model
    that only transformers can run is imported too. `home` and `watch` are as of `import_model`.
    Raises like `pin_model`, `download_model` and `import_model`.
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
        done = import_model(
            store, pinned, name=name, is_foreign=is_foreign, home=home, log=log, watch=watch
        )
    except ConfigError as error:  # of a choice for which only `import` has options
        again = f"with nanochat import {model} --name NAME"
        error.hint = "; ".join(filter(None, (error.hint, again)))
        raise
    return f"{done.manifest.stage}@{name}"


def run_name(model: HubModel) -> str:
    """Return the name of the run that imports a model at its commit: another for each address."""
    words = NOT_IN_NAMES.sub("-", model.repository)
    if model.folder:  # by a digest: a/b, a-b and a repository b of a owner's a- differ
        words += f"-{hashlib.sha256(model.folder.encode()).hexdigest()[:8]}"
    return f"hf-{words}-{model.commit[:12]}"
