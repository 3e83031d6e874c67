"""`nanochat import`: publish a checkpoint that nanochat trained as an artifact."""

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.runs import check_name
from flows.cli.options import StoreOptions
from flows.cli.output import print_lines, print_note
from flows.cli.progress import show_bytes
from flows.interop.import_model import import_checkpoint, kind_of
from flows.profiles import PROFILES
from flows.stages import TOKENIZER
from nanochat_core.errors import ConfigError


def import_model(
    path: Annotated[
        Path, Parameter(name="PATH", help="Directory with model_*.pt and meta_*.json.")
    ],
    /,
    *,
    name: Annotated[
        str | None, Parameter(help="What to call it. Default the directory's name.")
    ] = None,
    kind: Annotated[
        str | None,
        Parameter(help="base, mid, sft or rl. Default what nanochat's folder is called after."),
    ] = None,
    step: Annotated[int | None, Parameter(help="Which checkpoint. Default the last one.")] = None,
    era: Annotated[
        str | None,
        Parameter(help="First day of the version that trained it, where its files do not say."),
    ] = None,
    tokenizer: Annotated[
        Path | None, Parameter(help="Its tokenizer.pkl. Default where nanochat stores it.")
    ] = None,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
) -> int:
    """Take over a model that nanochat trained: to chat, serve or evaluate.

    Models of the first era and the last can be trained further. Nothing in the files is executed.
    """
    path = path.expanduser()
    called = name or path.absolute().name
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
    kind = kind_of(path, kind)
    store = place.open_store()
    done = import_checkpoint(
        store,
        path,
        kind=kind,
        name=called,
        tokenizer=tokenizer.expanduser() if tokenizer else None,
        step=step,
        era=era,
        scratch=place.open_home(),
        log=print_note,
        watch=partial(show_bytes, what=called),
    )
    reference = f"{done.model.stage}@{called}"
    # Only a base model's evaluation reads text that the pipeline itself has still to tokenize.
    words = f" --use {TOKENIZER.name}@{called}" if kind == "base" else ""
    note = ", imported before" if done.was_there else ""
    lines = [
        f"{reference}: {done.model.name}, step {done.step}, era {done.era}{note}",
        f"talk to it     nanochat chat {reference}",
        f"train further  nanochat run PROFILE --use {reference}{words}",
    ]
    print_lines(lines)
    return 0
