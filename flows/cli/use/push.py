"""`nanochat push`: copy artifacts to another store, with the run records that name them."""

import functools
import time
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import StoreOptions
from flows.cli.output import (
    count_of,
    describe_transfer,
    interruptible,
    print_lines,
    print_note,
    print_warning,
    show_bytes,
)
from flows.interop.push import Chosen, Pushed, choose
from flows.interop.push import push as push_artifacts
from flows.leases.file_lock import scratch_directory
from infra.storage.open import open_store
from nanochat_core.errors import ConfigError

_A_URL = "s3://bucket/prefix"


def push(
    *references: Annotated[str, Parameter(name="REF")],
    to: str | None = None,
    place: StoreOptions = StoreOptions(),
) -> None:
    """Copy artifacts to another store, verified, with their run's record, so that names work there.

    Files that the other store has are not sent again: after an interruption the same command
    resumes.

    Revocations of what was sent, or of what it was made from, are copied too.

    Args:
        references: A name (its newest finished run), a run's id or a tag: all artifacts of that
            run; or one artifact: sft@tiny, sft/1a2b3c.
        to: URL of the store they go to.
    """
    if not references:
        raise ConfigError("push what?", hint=f"for example: nanochat push tiny --to {to or _A_URL}")
    if to is None:
        raise ConfigError("push where?", hint=f"give the URL of a store: --to {_A_URL}")
    source, target = place.open_store(), open_store(to)
    if source.url == target.url:
        raise ConfigError(
            f"{to} is the store they are in", hint="name another one with --to or --store"
        )
    chosen = choose(source, references)
    for line in chosen.left_out:
        print_warning(f"left out: {line}")
    for revoked in chosen.made_from:
        print_warning(f"made from {revoked}")
    began = time.monotonic()
    with interruptible(), scratch_directory(place.home_path) as scratch:
        pushed = push_artifacts(
            source,
            target,
            chosen,
            scratch=scratch,
            watch=functools.partial(show_bytes, what="push"),
            log=print_note,
            pause=time.sleep,
        )
    print_lines(_lines(chosen, pushed, to, time.monotonic() - began))


def _lines(chosen: Chosen, pushed: Pushed, to: str, seconds: float) -> Sequence[str]:
    """Return the lines that say what was sent, adopted, moved and replaced."""
    ours = {manifest.ref: manifest.digest for manifest in chosen.manifests}
    lines = [
        f"{theirs.name} is in {to} already, made by run {theirs.provenance.run}, with "
        f"{'the same' if theirs.digest == ours[theirs.ref] else 'other'} contents: that one stays"
        for theirs in pushed.adopted
    ]
    lines += [
        f"tag {name} of {to} is moved: {before} -> {chosen.tags[name]}"
        for name, before in pushed.moved.items()
    ]
    sent = len(chosen.manifests) - len(pushed.adopted)
    what = f"{count_of(sent, 'artifact')}, {count_of(len(pushed.items), 'file')}"
    took = describe_transfer(pushed.size, seconds)
    there = f"; {count_of(len(pushed.there), 'file')} there already" if pushed.there else ""
    if pushed.damaged:
        there += f"; {count_of(pushed.damaged, 'damaged file')} replaced"
    lines.append(f"{to}: {what}, {pushed.size:,} bytes{took}{there}")
    return lines
