"""Inputs of the report card: each artifact's manifest, events and files, and nothing else.

inputs[stage]/               the artifact's files
inputs[stage]/../            manifest.json, logs/events.jsonl
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flows.identity.manifest import EVENTS, Manifest
from flows.render.charts import Stop
from flows.stages import REPORT
from nanochat_core.errors import ArtifactError
from nanochat_core.runtime.progress import last_by_step, read_events


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One stage's artifact on this machine."""

    manifest: Manifest
    files: Path
    events: tuple[dict[str, Any], ...]

    def series(self, kind: str, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of `name` in events of `kind` ("step" or "eval"), by step."""
        # A step that was repeated after a stop counts once, with its last value.
        points = last_by_step(iter(self.events), kind).items()
        found = [(step, values[name]) for step, values in points if name in values]
        return [(step, value) for step, value in found if math.isfinite(value)]

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
        """Return a JSON file of the artifact. Raises ArtifactError if missing or not JSON."""
        return cast("dict[str, Any]", self._parse(name, self._read(name)))

    def samples(self) -> list[tuple[str, str]]:
        """Return (prompt, text) of samples.jsonl, in the file's order. Raises ArtifactError."""
        samples = self.lines("samples.jsonl")
        return [(str(sample["prompt"]), str(sample["text"])) for sample in samples]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a .jsonl file of the artifact, in order. Raises ArtifactError."""
        # Not splitlines: it also splits at U+2028 and others, which a model may write.
        return [self._parse(name, line) for line in self._read(name).split("\n") if line]

    def _read(self, name: str) -> str:
        try:
            return (self.files / name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise self._unreadable(name, error) from error

    def _parse(self, name: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> ArtifactError:
        return ArtifactError(
            f"{name} of {self.manifest.name} cannot be read: {error}",
            hint="delete the fetched artifact and run again",
        )


def open_artifacts(inputs: Mapping[str, Path]) -> dict[str, Artifact]:
    """Return every artifact the report needs, by stage. Raises ArtifactError if one is missing."""
    needed = [stage.name for stage in REPORT.inputs]
    missing = [name for name in needed if name not in inputs]
    if missing:
        raise ArtifactError(
            f"the report needs the artifacts of {', '.join(missing)}",
            hint="run the whole pipeline: `nanochat run --help`",
        )
    return {name: _open_artifact(name, inputs[name]) for name in needed}


def _open_artifact(stage: str, files: Path) -> Artifact:
    path = files.parent / "manifest.json"
    events = files.parent / "logs" / EVENTS
    for needed in (path, files):
        if not needed.exists():
            raise ArtifactError(
                f"the artifact of {stage} is not whole: {needed} is missing",
                hint="delete it and run again: it is fetched again",
            )
    manifest = Manifest.from_json(path.read_bytes(), where=str(path))
    if manifest.stage != stage:
        raise ArtifactError(f"{path} is of stage {manifest.stage}, expected {stage}")
    found = tuple(read_events(events)) if events.exists() else ()  # short stages log none
    return Artifact(manifest=manifest, files=files, events=found)
