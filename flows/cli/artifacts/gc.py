"""`nanochat gc`: delete artifacts and records that nothing in the store refers to."""

import contextlib
from collections.abc import Collection, Generator, Iterable, Iterator
from typing import Any

from flows.artifacts.runs import timestamp
from flows.cli.options import CHANGES, AsJson, ExitCode, Positive, StoreOptions
from flows.cli.output import count_of, print_note, print_result, screen
from flows.gc.collect import Collected, collect, plan_collection
from flows.gc.inventory import Kind, Piece
from flows.gc.reach import Records, Rules, Survey
from flows.gc.sweep import Watch
from flows.identity.ref import ArtifactRef
from flows.render.table import Table, numbers, texts
from flows.render.text import duration, size

_COUNTS = ("number", "objects")
_COLUMNS = (*texts("stage", "what"), *numbers(*_COUNTS, "size", "last written"))
_DAY, _HOUR = 86400.0, 3600.0  # seconds
_NAMED = 20  # artifacts listed by name; --json has all
_NAMES: dict[Kind, str] = {
    "run record": "records of runs",
    "name": "names of runs",
    "pin": "pins",
    "artifact": "artifacts",
    "divergent": "artifacts that came too late",
    "files": "attempts' files",
    "logs": "attempts' logs",
    "checkpoints": "jobs' checkpoints",
    "revocation": "revocations",
    "lease": "leases",
    "index entry": "index entries",
}


def gc(
    *,
    apply: bool = False,
    keep_days: Positive = 30,
    # Positive: with no grace a collection could delete files of an upload in progress.
    grace_hours: Positive = 24,
    place: StoreOptions = StoreOptions(),
    exit_code: ExitCode = False,
    as_json: AsJson = False,
) -> int:
    """Find what nothing in the store refers to, and with --apply delete it.

    What a tag, a run of the last days, the newest finished run of a name or a live lease reaches is
    in use. The first --apply only marks; one that comes after the grace deletes.

    With --exit-code it exits with 3 when there is something to mark or delete.

    Args:
        apply: Mark garbage, and delete what was marked long enough ago.
        keep_days: How long what only an old run refers to is kept, and unfinished work.
        grace_hours: How old garbage gets, and how long it is marked, before it goes.
    """
    rules = Rules(keep=keep_days * _DAY, grace=grace_hours * _HOUR)
    store = place.open_store()
    # collect() plans by itself: a plan of its own would list the store twice.
    with _progress() as watch:
        done = collect(store, rules, watch=watch, log=print_note) if apply else None
        survey = done.survey if done else plan_collection(Records(store), rules, watch=watch)
    lines = _describe_collected(done) if done else _describe(survey, keep_days)
    print_result(lambda: _to_tree(store.url, survey, done), lines, as_json=as_json)
    return CHANGES if exit_code and not apply and not survey.is_empty else 0


def _describe(survey: Survey, keep_days: int) -> Iterator[str | Table]:
    if survey.deletable:
        yield "garbage that --apply deletes:"
        yield from _table(survey.deletable.values(), survey)
    if waiting := _waiting(survey):
        marked = len(waiting) - len(survey.fresh)
        yield f"garbage that has to wait ({marked} marked already, --apply marks the rest):"
        yield from _table(waiting, survey)
    # The most surprising deletions are those of old runs, so the way to keep one is named.
    if any(piece.kind == "run record" for piece in survey.garbage.values()):
        yield (
            f"Runs not heard of for {keep_days} days are forgotten, and what only they reach goes: "
            "tag a run to keep it."
        )
    yield _summary(survey)


def _describe_collected(done: Collected) -> Iterator[str | Table]:
    swept, survey = done.swept, done.survey
    garbage = survey.garbage
    if swept.names:
        yield "deleted:"
        yield from _table([garbage[name] for name in sorted(swept.names)], survey)
        yield f"freed {size(swept.size)} in {swept.objects:,} objects"
    if done.unfinished:
        yield f"aborted {done.unfinished:,} unfinished uploads"
    left = len(garbage) - len(swept.names)
    # `due` is when the first marked piece has waited long enough; None if nothing is marked.
    if done.due is not None:
        yield (
            f"marked {count_of(left, 'piece')} of garbage, {len(survey.fresh):,} of them new; "
            f"--apply deletes the first of them after {timestamp(done.due)}"
        )
    elif not swept.names:
        yield "nothing was marked, nothing was deleted"
    yield _summary(survey)


def _summary(survey: Survey) -> str:
    used = _used(survey)
    # Objects with unknown keys may be another program's: counted, never deleted.
    stages = sum(piece.kind == "artifact" for piece in used)
    text = (
        f"in use: {stages:,} artifacts, {sum(p.objects for p in used):,} objects, "
        f"{size(sum(p.size for p in used))}"
    )
    if unknown := survey.inventory.unknown:
        text += f"; {unknown:,} objects that are not ours are left alone"
    return text if survey.garbage else f"no garbage; {text}"


def _used(survey: Survey) -> list[Piece]:
    pieces = survey.inventory.pieces
    return [piece for name, piece in pieces.items() if name not in survey.garbage]


def _waiting(survey: Survey) -> list[Piece]:
    """Return the garbage in its grace period: not marked yet, or marked too recently."""
    return [piece for name, piece in survey.garbage.items() if name not in survey.deletable]


def _rows(pieces: Iterable[Piece], survey: Survey) -> list[dict[str, Any]]:
    """Return a row for the pieces of each kind of each stage, as in --json."""
    groups: dict[tuple[str, Kind], list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.stage, piece.kind), []).append(piece)
    return [
        {
            "stage": stage or None,
            "what": _NAMES[kind],
            "number": len(group),
            "objects": sum(piece.objects for piece in group),
            "bytes": sum(piece.size for piece in group),
            "seconds_since_written": round(survey.now - max(piece.newest for piece in group)),
        }
        for (stage, kind), group in sorted(groups.items())
    ]


def _artifacts(pieces: Iterable[Piece], survey: Survey) -> list[dict[str, Any]]:
    """Return a row for each artifact among `pieces`, as in --json; the largest first."""
    # Count only files that are garbage themselves: others are used by another artifact and stay.
    garbage = survey.garbage.keys()
    found = [
        {
            **piece.place._asdict(),
            "bytes": sum(p.size for p in survey.inventory.places[piece.place] if p.name in garbage),
            # Objects may be newer than the survey.
            "seconds_since_written": round(max(0.0, survey.now - piece.newest)),
        }
        for piece in pieces
        if piece.kind == "artifact" and piece.place
    ]
    return sorted(found, key=lambda row: (-row["bytes"], row["stage"], row["fingerprint"]))


def _table(pieces: Collection[Piece], survey: Survey) -> Iterator[str | Table]:
    """Yield the rows, the names of the largest artifacts and an empty line."""

    def row_of(row: dict[str, Any], *head: str) -> tuple[str, ...]:
        ago = f"{duration(max(0, row['seconds_since_written']))} ago"
        return (*head, size(row["bytes"]), ago)

    rows, artifacts = _rows(pieces, survey), _artifacts(pieces, survey)
    counted = ((r, r["stage"] or "", r["what"], *(f"{r[n]:,}" for n in _COUNTS)) for r in rows)
    yield Table(columns=_COLUMNS, rows=[row_of(*row) for row in counted], indent="  ")
    named = ((r, ArtifactRef(r["stage"], r["fingerprint"]).name) for r in artifacts[:_NAMED])
    columns = (*texts("artifact"), *numbers("size", "last written"))
    yield Table(columns=columns, rows=[row_of(*r) for r in named], head=False, indent="  ")
    if len(artifacts) > _NAMED:
        yield f"  and {len(artifacts) - _NAMED:,} more artifacts; --json has all"
    yield ""


def _to_tree(url: str, survey: Survey, done: Collected | None) -> dict[str, Any]:
    used, waiting = _used(survey), _waiting(survey)
    tree: dict[str, Any] = {
        "store": url,
        "deletes": _rows(survey.deletable.values(), survey),
        "waits": _rows(waiting, survey),
        "deletes_artifacts": _artifacts(survey.deletable.values(), survey),
        "waiting_artifacts": _artifacts(waiting, survey),
        "unmarked": len(survey.fresh),
        "in_use": {"objects": sum(p.objects for p in used), "bytes": sum(p.size for p in used)},
        "not_ours": survey.inventory.unknown,
    }
    if done is not None:
        gone = [survey.garbage[name] for name in sorted(done.swept.names)]
        tree |= {
            "deleted": _rows(gone, survey),
            "deleted_artifacts": _artifacts(gone, survey),
            "freed_bytes": done.swept.size,
            "half_written": done.unfinished,
            "next": None if done.due is None else timestamp(done.due),
        }
    return tree


@contextlib.contextmanager
def _progress() -> Generator[Watch]:
    """Yield a callback that shows the progress on a terminal; elsewhere it does nothing."""
    console = screen(stderr=True)
    if not console.is_terminal:
        yield lambda what, count: None
        return
    # Listing a large store takes minutes.
    with console.status("looking") as status:
        yield lambda what, count: status.update(f"{what}: {count:,}")
