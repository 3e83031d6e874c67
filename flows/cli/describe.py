"""Describe one artifact for `nanochat ls` and `nanochat plan PROFILE STAGE`: how it came about."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from flows.artifacts.revocations import Revoked, accepted_from
from flows.cli.output import age, count_of
from flows.identity.manifest import Facts, Manifest
from flows.identity.ref import short
from flows.render.paired import rows_of
from flows.render.table import Table, numbers, texts
from flows.render.text import duration, number


def describe(
    manifest: Manifest,
    url: str,
    *,
    revoked: Revoked | None,
    names: Sequence[str] = (),
    ancestors: Sequence[Revoked] = (),
    others: Sequence[str] = (),
) -> Iterator[tuple[str, str]]:
    """Yield facts of an artifact, each with its name.

    Args:
        manifest: The artifact's manifest.
        url: Where it is.
        revoked: How it was revoked; None if it is valid.
        names: Of the runs that it is found by.
        ancestors: Revoked artifacts that it was made from.
        others: Keys of manifests with the same fingerprint and other contents.
    """
    made = manifest.provenance
    yield "fingerprint", manifest.fingerprint
    yield "digest", manifest.digest
    yield "url", url
    if names:
        yield "names", ", ".join(f"{manifest.stage}@{name}" for name in names)
    if revoked is not None:
        revocation = revoked.revocation
        yield "revoked", f"{age(revocation.when)} by {revocation.who}: {revocation.why}"
    for ancestor in ancestors:
        yield "made from", str(ancestor)
    # An accepted artifact has the bytes of older ones, down the chain of acceptances.
    if accepted := manifest.accepted:
        sources = ", ".join(ref.name for ref in accepted_from(manifest))
        proof = "unproven" if accepted["proof"] is None else "proven"
        yield "accepted", f"{age(accepted['when'])} by {accepted['who']}: {accepted['why']}"
        yield "", f"the bytes of {sources}; {proof}"
    commit = f", commit {short(made.git_commit)}" if made.git_commit else ""
    yield "made", f"{age(made.created)} by run {made.run}{commit}"
    for ref in manifest.input_refs:
        yield "from", ref.name
    for key in others:
        yield "diverged", f"another result of the same work: {key}"
    for metric in _metrics(made.metrics):
        yield "metric", metric
    for segment in made.segments:
        yield "execution", _execution(segment)


def list_files(manifest: Manifest) -> Iterator[str | Table]:
    """Yield the files and the logs of an artifact."""
    for what, files in (("file", manifest.files), ("log", manifest.logs)):
        if files:
            yield from ("", f"{count_of(len(files), what)}, {sum(f.size for f in files):,} bytes:")
            rows = [(file.path, f"{file.size:,}", short(file.sha256)) for file in files]
            columns = (*texts("file"), *numbers("bytes"), *texts("sha256"))
            yield Table(columns=columns, rows=rows, head=False, indent="  ")


def artifact_tree(manifest: Manifest) -> dict[str, Any]:
    """Return what is in an artifact, as JSON values."""
    return {
        "digest": manifest.digest,
        "inputs": {name: asdict(source) for name, source in manifest.inputs.items()},
        "files": [asdict(file) for file in manifest.files],
        "logs": [asdict(file) for file in manifest.logs],
    }


def _metrics(metrics: Facts) -> Iterator[str]:
    for name, value, between in rows_of(metrics):
        shown = number(value) if isinstance(value, float) else value
        yield f"{name} = {shown}" + (f" ({between})" if between else "")


def _execution(segment: Facts) -> str:
    """Return one execution of the job as text: steps, device, host, time and dollars.

    Fields are optional: a stage without steps has no last_step, a killed execution no end.
    """
    steps = f"steps {segment.get('first_step')} to {segment.get('last_step')}"
    processes = segment.get("processes", 1)
    several = f"{processes} processes" if processes > 1 else "1 process"
    device = f" on {segment['device']}" if "device" in segment else ""
    host = f" of {segment['host']}" if "host" in segment else ""
    took = duration(segment["ended"] - segment["started"]) if "ended" in segment else ""
    paid = f"${segment['dollars']:.2f}" if "dollars" in segment else ""
    started = steps if segment.get("last_step") else ""
    return ", ".join(filter(None, (started, f"{several}{device}{host}", took, paid)))
