"""Runs of a series as they lie in a store when their models were trained and evaluated."""

from typing import Any

from flows.artifacts.runs import Run
from flows.profiles import open_profile
from flows.stages import BASE_EVAL, PRETRAIN
from infra.storage.base import Store
from nanochat_core.section import Section
from tests.support.flows.shelf import make_manifest, put_artifact, put_run

SECONDS = 90.0


def put_evaluated(
    store: Store,
    depth: int,
    val_bpb: float | None,
    *,
    name: str = "tiny",
    text: str = "text",
    overrides: tuple[str, ...] = (),
    metrics: dict[str, Any] | None = None,
    **changes: Any,
) -> Run:
    """A run of tiny at this depth, evaluated on rows with this text."""
    run = open_profile("tiny", depth=depth, overrides=overrides).run
    rows = put_artifact(store, make_manifest("rows", files={"rows": text}))
    trained = put_artifact(
        store,
        make_manifest(
            PRETRAIN.name,
            config=config_of(run, PRETRAIN.config),
            files={"model": f"{depth} {overrides}"},
            inputs={"rows": rows},
            segments=({"started": 0.0, "ended": SECONDS},),
        ),
    )
    told = {} if val_bpb is None else {"val_bpb": val_bpb}
    evaluated = put_artifact(
        store,
        make_manifest(
            BASE_EVAL.name,
            config=config_of(run, BASE_EVAL.config),
            inputs={"pretrain": trained, "rows": rows},
            metrics={**told, **(metrics or {})},
        ),
    )
    made = {"overrides": overrides, "depth": depth, **changes}
    return put_run(
        store,
        f"{name}-d{depth}-20261121t06000{depth % 10}z-abcd",
        *(rows, trained, evaluated),
        name=f"{name}-d{depth}",
        **made,
    )


def config_of(run: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Sections as a pre-image has them."""
    sections = {name: getattr(run, name) for name in names}
    return {n: s.canonical() if isinstance(s, Section) else s for n, s in sections.items()}
