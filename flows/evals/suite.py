"""Evaluation suites: the request for one, and the stage, data and settings that evaluate a model.

A base model is evaluated by `base_eval`, a chat model by the `chat_eval` of its stage. The model is
a pinned input, so nothing is trained; so is the data of its own run's evaluation. An evaluation
that the run has made already is therefore the same artifact, and is reused from the store.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias, get_args

from flows.artifacts.names import check_model, is_artifact, open_run, open_usable
from flows.artifacts.publish import find_manifest
from flows.artifacts.revocations import find_revoked
from flows.artifacts.runs import Run, check_name
from flows.identity.manifest import Manifest
from flows.interop.import_model import IMPORTED
from flows.plan.planned import open_settings
from flows.profiles import PROFILES
from flows.run_request import NAME, BuildParameters, Option, Overrides, RunRequest, shared
from flows.stages import BASE_EVAL, EVALUATORS, PRETRAIN, ROWS, SFT, TASK_DATA, Stage
from infra.near import suggest
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError
from tasks.registry import has_choices

Against: TypeAlias = Literal["previous", "best"]
DROP = 0.02  # of a score between 0 and 1: two questions of a hundred

MODEL = Option(
    label="Model",
    help="A tag or a run's name, a stage of one (sft@main) or a fingerprint (sft/1a2b3c).",
    more="A name is its newest chat model. It is looked up for every evaluation. On the command "
    "line also hf://OWNER/NAME or ./DIRECTORY, of nanochat or transformers.",
    group="what",
    flag="",
    rules={
        "pattern": rf"^(({'|'.join(EVALUATORS)})(@{NAME}|/[0-9a-f]+)|{NAME})$",
        "examples": ["main", "sft@main", "sft/1a2b3c"],
    },
)


@dataclass(frozen=True, kw_only=True)
class EvalRequest(BuildParameters):
    """An evaluation of a model: the suite, the rule for what counts as worse, and where."""

    model: Annotated[str, MODEL] = "main"
    profile: Annotated[
        str | None,
        Option(
            label="Profile of the evaluation",
            help="Profile whose evaluation is used; by default that of the model's own run.",
            group="settings",
            rules={"enum": list(PROFILES)},
        ),
    ] = None
    metric: Annotated[
        str | None,
        Option(
            label="Metric",
            help="The number that must not get worse; by default chatcore, core or val_bpb.",
            group="settings",
            rules={"pattern": r"^[a-z0-9_]+$", "examples": ["chatcore"]},
        ),
    ] = None
    drop: Annotated[
        float,
        Option(
            label="Allowed drop",
            help="By how much it may get worse without an alert, in its own unit.",
            group="settings",
            rules={"minimum": 0},
        ),
    ] = DROP
    against: Annotated[
        Against,
        Option(
            label="Compared with",
            help="The evaluation to compare with: the previous one, or the best one so far.",
            group="settings",
        ),
    ] = "previous"
    overrides: Overrides = ()


NIGHTLY = "0 3 * * *"  # cron: minute, hour, day, month, weekday
_FOREIGN = "nanochat_core.evaluate.foreign"  # evaluates a model of transformers
_CHAT = EVALUATORS[SFT.name]  # the model after SFT is the one whose choices are compared
_BASE_METRICS = ("core", "val_bpb", "train_bpb")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A requested evaluation: the model, and everything that decides its scores."""

    request: EvalRequest
    store: Store
    model: Manifest
    stage: Stage  # that evaluates it
    run: RunRequest  # that evaluates the model, on the data that it uses; or makes that data
    more: tuple[Stage, ...] = ()  # that the run builds besides: of a model of transformers


def open_suite(request: EvalRequest, store: Store, *, warn: Callable[[str], None]) -> Suite:
    """Return the suite of the model that is named at this moment (see docs/concepts/names.md).

    Without a profile the settings are those of the model's own run. Only settings of the evaluation
    and of its data can be overridden. Raises ConfigError, ArtifactError or ModelError if the name
    is not a model's, the model cannot be evaluated, or an override does not affect the evaluation.
    """
    model, profile, overrides = request.model, request.profile, request.overrides
    _check_rule(request)
    manifest = open_usable(store, model, warn=warn)
    check_model(manifest, model)
    # The run that the model is found in: its settings and data evaluate it.
    run = open_run(store, model if is_artifact(model) else f"{manifest.stage}@{model}")
    if profile is None and run.profile == IMPORTED:
        raise ConfigError(
            f"{model} was imported, so it has no run with the settings of an evaluation",
            hint="use the evaluation of a profile: --profile NAME",
        )
    if manifest.architecture is not None:
        return _foreign_suite(request, store, manifest)
    stage = EVALUATORS[manifest.stage]
    _check_overrides(stage.config, overrides)
    pinned = _pinned(store, stage, manifest, run, own_data=profile is None, overrides=overrides)
    found = RunRequest(
        **shared(BuildParameters, request),
        profile=profile or run.profile,
        # The run's depth and overrides are settings of its own profile, not of another one.
        depth=None if profile else run.depth,
        overrides=(*(() if profile else run.overrides), *overrides),
        use=tuple(item.ref.prefix for item in pinned),
        until=stage.name,
        run_name=history_name(model),
    )
    if request.metric is not None:  # before hours are spent on it
        tasks = [task.name for task in open_settings(found).run.chat_eval.tasks]
        known = _BASE_METRICS if stage is BASE_EVAL else ("chatcore", *tasks)
        _check_metric(request.metric, known, by=stage.name)
    return Suite(request=request, store=store, model=manifest, stage=stage, run=found)


def _foreign_suite(request: EvalRequest, store: Store, model: Manifest) -> Suite:
    """Return the suite of a model that only transformers can run: CORE, and lettered choices.

    Its stages have the names of ours and another entry, so `compare` shows its scores next to ours.
    """
    profile, name = request.profile, request.model
    if request.pool is not None:
        raise ConfigError(
            f"{name} is a model of transformers: no pool evaluates it",
            hint="leave --pool out: this machine evaluates it",
        )
    # Now and not in its job, after questions were downloaded for minutes.
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"{name} is a model of transformers, and that package is not installed",
            hint="install it: pip install 'transformers>=5.0'",
        )
    stages = [
        replace(stage, inputs=(PRETRAIN, TASK_DATA), entry=_FOREIGN) for stage in (BASE_EVAL, _CHAT)
    ]
    _check_overrides([section for stage in stages for section in stage.config], request.overrides)
    settings: dict[str, Any] = {**shared(RunRequest, request), "profile": profile}
    found = RunRequest(**settings, until=TASK_DATA.name, run_name=history_name(name))
    asked = open_settings(found).run
    choices = [task.name for task in asked.chat_eval.tasks if has_choices(task.name)]
    core, chat = stages
    known = (["core"] if asked.task_data.core_bundle else []) + choices
    if not known:
        raise ConfigError(
            f"profile {profile} asks neither CORE nor questions with lettered choices",
            hint="a model of transformers answers only these: --profile d12",
        )
    metric = known[0] if request.metric is None else request.metric
    _check_metric(metric, known, by=f"the evaluation of {name}")
    return Suite(
        request=replace(request, metric=metric),
        store=store,
        model=model,
        stage=core if metric == "core" else chat,
        run=found,
        more=((core,) if "core" in known else ()) + ((chat,) if choices else ()),
    )


def _check_rule(request: EvalRequest) -> None:
    """Raise ConfigError for a rule that cannot be: no form checks callers in Python."""
    drop, against = request.drop, request.against
    if not 0 <= drop < math.inf:  # NaN neither
        raise ConfigError(f"drop is {drop}", hint="a number of at least 0, such as 0.02")
    if against not in (known := get_args(Against)):
        raise ConfigError(f"against is {against!r}", hint=f"one of: {', '.join(known)}")


def _check_metric(metric: str, known: Sequence[str], *, by: str) -> None:
    if metric not in known:
        raise ConfigError(f"{by} does not measure '{metric}'", hint=suggest(metric, known))


def history_name(model: str) -> str:
    """Return the name of runs that evaluate `model`: eval-main for sft@main. Raises ConfigError."""
    _, at, name = model.partition("@")
    return check_name(f"eval-{name if at else model.replace('/', '-')}")


def evaluated_model(run: Run) -> str | None:
    """Return the name of the model that `run` evaluated; None for a run that trains."""
    is_evaluation = len(run.uses) == 1 and run.name == history_name(run.uses[0])
    return run.uses[0] if is_evaluation else None


def _pinned(
    store: Store,
    stage: Stage,
    model: Manifest,
    run: Run,
    *,
    own_data: bool,
    overrides: Sequence[str],
) -> list[Manifest]:
    """Return the pinned inputs: the model, rows of its own tokenizer, its run's tasks if unchanged.

    Raises ArtifactError if a base model's run has no rows.
    """
    # With the data of its own run, the evaluation has the fingerprint of the one the run made.
    pinned = [model]
    wants_other_data = any(text.startswith(f"{TASK_DATA.name}.") for text in overrides)
    if own_data and not wants_other_data and (data := _whole(store, run, TASK_DATA)):
        pinned.append(data)
    if ROWS in stage.inputs:
        rows = _whole(store, run, ROWS)
        # Rows of another run may be of another tokenizer, whose token ids mean something else.
        if rows is None:
            raise ArtifactError(
                f"run {run.run} has no rows to evaluate {model.name} on",
                hint="a base model needs rows of its own tokenizer: evaluate a chat model made "
                "from it, or run its profile again",
            )
        pinned.append(rows)
    return pinned


def _whole(store: Store, run: Run, stage: Stage) -> Manifest | None:
    """Return the run's artifact of `stage`; None if it is not stored, or revoked."""
    ref = run.find_ref(stage.name)
    manifest = find_manifest(store, ref) if ref else None
    return None if manifest is None or find_revoked(store, manifest) else manifest


def _check_overrides(config: Sequence[str], overrides: Sequence[str]) -> None:
    # Other sections would be accepted and change nothing, since all but these inputs are pinned.
    sections = (*config, TASK_DATA.name)
    for text in overrides:
        if text.partition(".")[0] not in sections:
            raise ConfigError(
                f"{text.partition('=')[0]} does not change how a model is evaluated",
                hint=f"sections that do: {', '.join(sections)}",
            )
