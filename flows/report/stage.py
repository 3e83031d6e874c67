"""Stage `report`: write the report card of a run, as an HTML page and as markdown.

It reads the artifacts of every earlier stage and nothing else, so the same artifacts give the same
bytes.
"""

from typing import Any

from flows.report.card import make_card
from flows.report.inputs import open_artifacts
from nanochat_core.job import Job


def run(job: Job) -> dict[str, Any]:
    """Write output/report.html and output/report.md. Raises ArtifactError on a missing artifact."""
    card, metrics = make_card(open_artifacts(job.inputs))
    html = card.html.encode()
    (job.output / "report.html").write_bytes(html)
    (job.output / "report.md").write_bytes(card.markdown.encode())
    return {"bytes": len(html), **metrics}
