"""`nanochat explain`: everything about one stage of a profile."""

from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter

from flows.commands.options import ProfileName, What, Where, profile_of
from flows.commands.terminal import screen
from flows.fingerprint import short
from flows.manifest import Manifest
from flows.plan import STATES, StagePlan, make_plan
from flows.references import suggest
from flows.stages import STAGES
from nanochat_core.errors import ConfigError


def explain(
    profile: ProfileName,
    stage: Annotated[str, Parameter(help="Name of a stage, as `nanochat plan` lists them.")],
    /,
    *,
    what: What = What(),  # noqa: B008 - frozen
    where: Where = Where(),  # noqa: B008 - frozen
) -> int:
    """Say why a stage would run or not, what it is made from and what it made."""
    if stage not in (known := [s.name for s in STAGES]):
        raise ConfigError(f"there is no stage '{stage}'", hint=suggest(stage, known))
    chosen = profile_of(profile, what)
    placement = where.placement(chosen)
    planned = make_plan(chosen.run, where.open_store(), where.work, placement=placement)
    console = screen()
    for line in _describe(planned.of(stage)):
        console.print(line)
    return 0


def _describe(item: StagePlan) -> Iterator[str]:
    stage = item.stage
    yield f"{stage.name}: makes {stage.makes}"
    yield f"  state        {item.state} {STATES[item.state]}"
    if item.reason:
        yield f"  reason       {item.reason}"
    if item.fingerprint:
        yield f"  fingerprint  {item.fingerprint}"
    device = "a GPU where there is one" if stage.compute == "gpu" else "the CPU"
    yield f"  entry        {stage.entry}, on {device}"
    yield f"  config       {', '.join(stage.config) or 'none'}"
    inputs = ", ".join(source.name for source in stage.inputs)
    yield f"  inputs       {inputs or 'none'}"
    if item.estimate:
        seconds, source = item.estimate.seconds, item.estimate.source
        yield f"  estimate     {seconds:.0f} s, ${item.estimate.dollars:.2f} ({source})"
    if item.changes:
        yield ""
        yield "changed since the nearest artifact:"
        for change in item.changes:
            yield f"  {change}"
    if item.manifest:
        yield ""
        yield from _describe_artifact(item.manifest)


def _describe_artifact(manifest: Manifest) -> Iterator[str]:
    made = manifest.provenance
    yield f"artifact {manifest.name}:"
    yield f"  made         {made.created} by run {made.run}"
    if made.git_commit:
        yield f"  commit       {made.git_commit[:12]}"
    yield f"  digest       {short(manifest.digest)}"
    for name, source in manifest.inputs.items():
        yield f"  from         {name}/{short(source.fingerprint)}"
    for name, value in made.metrics.items():
        yield f"  metric       {name} = {value}"
    for file in manifest.files:
        yield f"  file         {file.path} ({file.size:,} bytes)"
