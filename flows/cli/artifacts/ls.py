"""`nanochat ls`: list the artifacts of the store or of a run, or the files of one artifact."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from flows.artifacts.listing import GONE, Listed, Listing, list_artifact, list_newest, list_run
from flows.artifacts.names import check_stage, is_artifact, open_artifact, open_run
from flows.artifacts.runs import Run
from flows.cli.describe import artifact_tree, describe, list_files
from flows.cli.options import AsJson, Positive, StoreOptions
from flows.cli.output import age, print_result, print_unread
from flows.identity.ref import short
from flows.plan.dead_runs import end_dead_runs
from flows.render.table import Column, Table, facts, texts
from flows.render.text import size
from infra.storage.base import Store
from nanochat_core.errors import ConfigError

_COLUMNS = (
    *texts("stage", "fingerprint", "made", "run"),
    *(Column("size", right=True), *texts("names", "")),
)


def ls(
    reference: Annotated[str | None, Parameter(name="REF")] = None,
    /,
    *,
    stage: str | None = None,
    limit: Positive = 3,
    place: StoreOptions = StoreOptions(),
    as_json: AsJson = False,
) -> None:
    """List artifacts: the newest of the store, those of a run, or the files of one.

    Args:
        reference: A name (what its newest finished run made), a tag or a run's id, or an artifact
            (sft@tiny, sft/1a2b3c: what is in it). Default: the newest artifacts of the store.
        stage: Only artifacts of this stage.
        limit: How many of each stage, without REF.
    """
    if stage is not None:
        check_stage(stage)
    store = place.open_store()
    end_dead_runs(store, place.home_path)
    if reference is not None and is_artifact(reference):
        # An artifact is of one stage, so --stage is either superfluous or a mistake.
        if stage is not None:
            raise ConfigError(
                f"--stage {stage} is given with the artifact {reference}", hint="leave it out"
            )
        tree, lines = _of_artifact(store, reference)
    elif reference is not None:
        tree, lines = _of_run(store, open_run(store, reference), stage)
    else:
        tree, lines = _of_store(store, stage, limit)
    print_result(lambda: tree, lines, as_json=as_json)


def _of_store(store: Store, stage: str | None, limit: int) -> tuple[Any, Sequence[str | Table]]:
    listing = list_newest(store, count=limit, stage=stage)
    _warn(listing)
    lines = _table(listing.artifacts)
    if not lines:
        lines = [f"no artifacts{f' of {stage}' if stage else ''} in {store.url}: nanochat run tiny"]
    elif listing.more:
        lines += ["", f"{listing.more} older ones; --limit and --stage show more"]
    return [listed.to_tree() for listed in listing.artifacts], lines


def _of_run(store: Store, run: Run, stage: str | None) -> tuple[Any, Sequence[str | Table]]:
    listing = list_run(store, run, stage=stage)
    _warn(listing)
    head = f"run {run.run}: {run.status}, started {age(run.started)}"
    tree = {"run": asdict(run), "artifacts": [listed.to_tree() for listed in listing.artifacts]}
    return tree, [head, *(_table(listing.artifacts) or ["no artifacts yet"])]


def _of_artifact(store: Store, reference: str) -> tuple[Any, Sequence[str | Table]]:
    manifest = open_artifact(store, reference)
    listing = list_artifact(store, manifest.ref)
    _warn(listing)
    (listed,) = listing.artifacts  # exactly one: its manifest was opened above
    url = f"{store.url}/{manifest.ref.prefix}"
    # The same fields as a row of a list, and more: one format for programs.
    tree = listed.to_tree() | artifact_tree(manifest) | {"url": url}
    about = facts(describe(manifest, url, revoked=listed.revoked, names=listed.names))
    return tree, [f"artifact {manifest.name}:", about, *list_files(manifest)]


def _warn(listing: Listing) -> None:
    # GONE is normal: garbage collection has deleted it. The table shows that already.
    problems = [listed.problem for listed in listing.artifacts if listed.problem not in ("", GONE)]
    print_unread([*listing.unread, *problems])


def _table(artifacts: Sequence[Listed]) -> list[str | Table]:
    return [Table(columns=_COLUMNS, rows=[*map(_row, artifacts)])] if artifacts else []


def _row(listed: Listed) -> tuple[str, ...]:
    made = listed.manifest.provenance if listed.manifest else None
    return (
        listed.ref.stage,
        short(listed.ref.fingerprint),
        age(made.created) if made else "",
        made.run if made else "",
        size(listed.size) if made else "",
        ", ".join(listed.names),
        _state(listed),
    )


def _state(listed: Listed) -> str:
    """Return "gone", "damaged", "revoked: why", "accepted" or ""."""
    if listed.problem:  # of a damaged record the warning above the table has the details
        return listed.problem if listed.problem == GONE else "damaged"
    if listed.revoked is not None:
        return f"revoked: {listed.revoked.revocation.why}"
    return "accepted" if listed.manifest and listed.manifest.accepted else ""
