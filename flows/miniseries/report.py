"""The report of a series: its findings as a table, sentences, plots and numbers."""

from flows.miniseries.findings import HEADER, SIZES, Findings, rows, sentences, to_tree
from flows.miniseries.picture import pictures
from flows.sweep.files import GroupReport

_FOOTER = """In brackets and as bars the 95 % interval of what other held-out text would change;
another seed of training is not in it. Ranges of the law are what the scatter of these points
allows, at 95 %. A prediction is an extrapolation: nothing says that the law continues."""


def report_of(findings: Findings) -> GroupReport:
    """Return all that is shown of a series."""
    return GroupReport(
        kind="miniseries",
        file="series",
        name=findings.name,
        heading=f"{findings.name}: {len(findings.points)} depths",
        profile=findings.profile,
        overrides=findings.overrides,
        store=findings.store,
        pictures=pictures(findings) if findings.points else (),
        sentences=list(sentences(findings)),
        header=HEADER,
        rows=list(rows(findings)),
        num_numbers=SIZES - 1,
        footer=_FOOTER,
        tree=to_tree(findings),
    )
