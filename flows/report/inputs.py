"""Inputs of the report card: each artifact's manifest, events and files, and nothing else.

inputs[stage]/               the artifact's files
inputs[stage]/../            manifest.json, logs/events.jsonl
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.identity.manifest import EVENTS, Manifest
from flows.render.charts import Stop
from flows.render.paired import read_object
from flows.stages import REPORT
from nanochat_core.errors import ArtifactError
from nanochat_core.runtime.progress import read_events


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One stage's artifact on this machine."""

    manifest: Manifest
    files: Path
    events: tuple[dict[str, Any], ...]

    def stops(self) -> list[Stop]:
        """Return every interruption of the job, in order."""
        found: list[Stop] = []
        last = 0  # the last step logged so far
        for event in self.events:
            if event["kind"] == "step":
                last = event["step"]
            # A start at an earlier step than the last is a restart without a checkpoint.
            elif event["kind"] == "start" and (event["resumed"] or last > event["step"]):
                found.append(Stop(after=last, back_to=event["step"]))
        return found

    def metric(self, name: str) -> float:
        """Return a metric of the stage. Raises ArtifactError if the manifest does not have it."""
        value = self.manifest.provenance.metrics.get(name)
        if not isinstance(value, int | float):
            raise ArtifactError(f"the manifest of {self.manifest.name} has no metric '{name}'")
        return value

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the artifact. Raises ArtifactError without it or its object."""
        if (data := self.find(name)) is None:
            raise ArtifactError(f"{self.manifest.name} has no {name}")
        return read_object(data, f"{name} of {self.manifest.name}")

    def find(self, name: str) -> bytes | None:
        """Return a file of the artifact, or None."""
        path = self.files / name
        return path.read_bytes() if path.exists() else None

    def samples(self) -> list[tuple[str, str]]:
        """Return (prompt, text) of samples.jsonl, in the file's order."""
        samples = self.lines("samples.jsonl")
        return [(str(sample["prompt"]), str(sample["text"])) for sample in samples]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a .jsonl file of the artifact, in order."""
        # Not splitlines: it also splits at U+2028 and others, which a model may write.
        text = (self.files / name).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.split("\n") if line]


def open_artifacts(inputs: Mapping[str, Path]) -> dict[str, Artifact]:
    """Return every artifact that the report needs, by stage. They are whole: a build fetched them.

    Raises ArtifactError for a manifest of another format.
    """
    return {stage.name: _open(inputs[stage.name]) for stage in REPORT.inputs}


def _open(files: Path) -> Artifact:
    path, events = files.parent / "manifest.json", files.parent / "logs" / EVENTS
    return Artifact(
        manifest=Manifest.from_json(path.read_bytes(), where=str(path)),
        files=files,
        events=tuple(read_events(events)) if events.exists() else (),  # short stages log none
    )
