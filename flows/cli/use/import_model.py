"""`nanochat import`: publish a model that was trained elsewhere as an artifact."""

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.runs import check_name
from flows.cli.options import StoreOptions
from flows.cli.output import print_line, print_note, show_bytes
from flows.interop import import_model as interop
from flows.profiles import PROFILES
from flows.stages import PRETRAIN, TOKENIZER
from nanochat_core.errors import ConfigError
from nanochat_core.interop.hub_files import is_on_hub, pin_model


def import_model(
    model: Annotated[str, Parameter(name="MODEL")],
    /,
    *,
    name: str | None = None,
    kind: str | None = None,
    step: int | None = None,
    era: str | None = None,
    tokenizer: Path | None = None,
    place: StoreOptions = StoreOptions(),
) -> None:
    """Take over a model that nanochat trained or that was published: to chat, serve or evaluate.

    Models of the first era and the last can be trained further. Nothing in the files is executed.

    Args:
        model: A directory with nanochat's `model_*.pt` and `meta_*.json` or with what `nanochat
            fetch --as` wrote, or hf://OWNER/NAME on the Hub.
        name: What to call it. Default the directory's or repository's name.
        kind: base, mid, sft or rl. Default what the model's card or files say.
        step: Which checkpoint. Default the last one.
        era: First day of the version that trained it, where its files do not say.
        tokenizer: Its tokenizer.pkl. Default where nanochat stores it.
    """
    pinned = pin_model(model) if is_on_hub(model) else None
    path = Path(model).expanduser()
    found = path.absolute().name if pinned is None else Path(pinned.repository).name
    called = name or interop.NOT_IN_NAMES.sub("-", found)
    # The default comes from a directory, which may have a name that no run can have.
    try:
        check_name(called)
    except ConfigError as error:
        error.hint = f"{error.hint}; choose one with --name"
        raise
    if called in PROFILES:  # checked before the import, which takes minutes
        raise ConfigError(
            f"{called} is the name of a profile: a model called so would hide its runs",
            hint="choose another one with --name",
        )
    store = place.open_store()
    done = interop.import_model(
        store,
        pinned or path,
        name=called,
        kind=kind,
        tokenizer=tokenizer.expanduser() if tokenizer else None,
        step=step,
        era=era,
        home=place.open_home(),
        log=print_note,
        watch=partial(show_bytes, what=called),
    )
    made, known = done.manifest, done.manifest.provenance.metrics
    reference = f"{made.stage}@{called}"
    words = {"from_step": "step", "era": "era", "address": "from"}
    facts = "".join(f", {word} {known[key]}" for key, word in words.items() if key in known)
    # Only a base model's evaluation reads text that the pipeline itself has still to tokenize.
    more = f" --use {TOKENIZER.name}@{called}" if made.stage == PRETRAIN.name else ""
    note = ", imported before" if done.adopted else ""
    print_line(f"{reference}: {made.name}{facts}{note}")
    print_line(f"talk to it     nanochat chat {reference}")
    print_line(f"train further  nanochat run PROFILE --use {reference}{more}")
