"""`nanochat fetch`: copy an artifact's files, or some of them, to a directory."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.download import choose_files, copy_files
from flows.artifacts.names import open_usable
from flows.cli.options import ArtifactName, StoreOptions
from flows.cli.output import print_line, print_note, print_warning
from flows.cli.progress import count_of, describe_transfer, show_bytes
from flows.identity.ref import short


def fetch(
    reference: ArtifactName,
    path: Annotated[
        str | None, Parameter(help="A file or a folder in the artifact. Default: all of it.")
    ] = None,
    /,
    *,
    to: Annotated[
        Path | None,
        Parameter(help="Directory the files go to. Default STAGE-FINGERPRINT, here."),
    ] = None,
    model_only: Annotated[
        bool,
        Parameter(negative="", help="Leave out the optimizer's state, which only training needs."),
    ] = False,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
) -> int:
    """Copy an artifact's files, or some of them, to a directory, every byte verified.

    Never overwrites a file that differs. After an interruption the same command resumes.
    """
    store = place.open_store()
    manifest = open_usable(store, reference, warn=print_warning)
    files = choose_files(manifest, path, model_only=model_only)
    target = to or Path(f"{manifest.stage}-{short(manifest.fingerprint)}")
    began = time.monotonic()
    try:
        with place.cache as cache:
            # Taken from the cache where possible, but nothing is added to it: the files would be
            # on this disk twice.
            cached = cache.find_copy(manifest)
            copied = copy_files(
                store,
                manifest,
                files,
                target.expanduser(),
                cached=cached / "files" if cached else None,
                watch=partial(show_bytes, what=manifest.name),
            )
    except KeyboardInterrupt:
        print_note("interrupted; the same command resumes from here")
        raise
    size = sum(file.size for file in files)
    text = f"{count_of(len(files), 'file')}, {size:,} bytes, of {manifest.name}"
    if not copied.fetched:
        print_line(f"{target}: already there, verified: {text}")
        return 0
    sent = sum(file.size for file in copied.fetched)
    there = f", {len(copied.kept)} of them there already" if copied.kept else ""
    took = describe_transfer(sent, time.monotonic() - began)
    print_line(f"{target}: {text}{there}{took}")
    return 0
