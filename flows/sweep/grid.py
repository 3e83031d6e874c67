"""A sweep: every combination of the varied settings, and the unchanged ones, with several seeds.

`model.depth` is the depth of the profile, from which other settings follow. A sweep over it alone
is a miniseries: its points are called d2, d4 and so on, and the first depth is the base.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flows.artifacts.runs import check_name
from flows.identity.fingerprint import single_settings
from flows.overrides import default_name
from flows.plan.planned import open_settings
from flows.profiles import Profile
from flows.render.text import count
from flows.run_request import RunRequest, shared
from flows.sweep.request import DEPTH, METRICS, SweepRequest
from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError
from nanochat_core.scaling import flops_per_token, num_params, num_scaling_params

MAX_RUNS = 100
_SHARDS = "shards.num_shards"
SIZE_HEAD = ("parameters", "scaling", "tokens", "tokens/param", "FLOPs")
_EXAMPLE = "for example --vary optimizer.muon_lr=0.01,0.03"
_DIGITS = 6  # of a name


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model and the amount of its training, computed from its settings."""

    parameters: int  # all, embeddings included
    scaling_parameters: int  # matrices and lm_head: what training tokens are counted against
    tokens: int  # trained on
    flops: float  # of training

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table, below SIZE_HEAD."""
        counts = map(count, (self.parameters, self.scaling_parameters, self.tokens))
        return (*counts, f"{self.tokens / self.scaling_parameters:.3g}", f"{self.flops:.3g}")


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One combination of the varied settings."""

    label: str  # base, p1, p2, ...; d2, d4, ... in a miniseries
    settings: tuple[str, ...]  # as section.name=value; none of the base
    cells: tuple[str, ...]  # its label and the values of the varied settings, for tables

    def member(self, seed: int) -> str:
        """Return the label of the member that trains this point with this seed."""
        return " ".join((self.label, f"s{seed}"))


@dataclass(frozen=True, kw_only=True)
class Member:
    """One run of a sweep: a point with a seed."""

    label: str  # as people write it: p1 s42
    request: RunRequest  # called NAME-p1-s42
    profile: Profile  # that it asks for

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.profile.run.model.depth


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points of a request, each with the same seeds. The first point is the base."""

    name: str
    request: SweepRequest
    points: tuple[SweepPoint, ...]
    head: tuple[str, ...]  # above the points' cells
    members: tuple[Member, ...]  # the first ones are submitted first

    @property
    def largest(self) -> Member:
        """The member with the largest model; its placement is that of all, as it needs most."""
        return max(self.members, key=lambda member: member.depth)

    @property
    def metric(self) -> str:
        """The name of the score that is compared."""
        return METRICS[self.request.stage]


def size_of(run: RunConfig) -> Size:
    """Return the size of the model that these settings train."""
    tokens = run.pretrain.num_steps * run.pretrain.total_batch_size
    return Size(
        parameters=num_params(run.model, run.numerics),
        scaling_parameters=num_scaling_params(run.model, run.numerics),
        tokens=tokens,
        flops=float(flops_per_token(run.model, run.numerics)) * tokens,
    )


def name_of_sweep(request: SweepRequest) -> str:
    """Return the name of a sweep; the same grid gives the same name. Raises ConfigError."""
    if request.run_name is not None:
        return request.run_name
    depth, overrides = request.depth, request.overrides
    own = default_name(RunRequest(profile=request.profile, depth=depth, overrides=overrides))
    text = json.dumps([request.vary, request.seeds, request.stage, request.reduction])
    return f"{own}-sweep-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"


def open_sweep(request: SweepRequest) -> Sweep:
    """Return the sweep of a grid: the members seed by seed, so that each rung is built in order.

    A combination that changes nothing, or the same as another, is left out. Raises ConfigError for
    an unknown profile, setting, stage or value, and for a grid that is empty or too large.
    """
    name = name_of_sweep(request)
    check_name(f"{name}-p{MAX_RUNS}-s{max(request.seeds, default=0)}")
    varied = _varied(request)
    _check(request, varied)
    combinations = [
        tuple(f"{key}={value}" for key, value in zip(varied, values, strict=True))
        for values in itertools.product(*varied.values())
    ]
    given = request
    if DEPTH in varied:
        request = replace(request, depth=_number(varied[DEPTH][0]))
        request = _with_same_text(request, combinations)
    points = _points(request, varied, combinations)
    if len(points) == 1:
        raise ConfigError(
            "every point has the settings of the base", hint="vary a setting to another value"
        )
    runs = {
        point.member(seed): _run_of(request, point.settings, seed, f"{name}-{point.label}-s{seed}")
        for seed in request.seeds
        for point in points
    }
    return Sweep(
        name=name,
        head=("depth", *SIZE_HEAD) if request.is_series else ("point", *_titles(list(varied))),
        members=tuple(
            Member(label=label, request=run, profile=open_settings(run))
            for label, run in runs.items()
        ),
        points=tuple(points),
        request=given,
    )


def _points(
    request: SweepRequest,
    varied: Mapping[str, Sequence[str]],
    combinations: Sequence[tuple[str, ...]],
) -> list[SweepPoint]:
    points: list[SweepPoint] = []
    seen: list[Profile] = []
    # All are opened before the base's values are looked up: an unknown setting is refused.
    opened = [(settings, _open(request, settings)) for settings in combinations]
    for settings, profile in [((), _open(request, ())), *opened]:
        if profile not in seen:
            label = f"p{len(points)}" if points else "base"
            cells = _cells(profile, list(varied))
            if request.is_series:
                label = f"d{profile.run.model.depth}"
                cells = size_of(profile.run).cells
            points.append(SweepPoint(label=label, settings=settings, cells=(label, *cells)))
            seen.append(profile)
    return points


def _varied(request: SweepRequest) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in request.vary:
        key, _, listed = (part.strip() for part in text.partition("="))
        values = _values(listed)
        if not key or not values or "" in values:
            raise ConfigError(
                f"'{text}' is not of the form section.name=value,value",
                hint=_EXAMPLE,
            )
        if key in found:
            raise ConfigError(f"{key} is varied twice", hint="give all its values in one --vary")
        found[key] = values
    if not found:
        raise ConfigError("no setting is varied", hint=_EXAMPLE)
    return found


def _values(text: str) -> list[str]:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        tree = None
    if not isinstance(tree, list):
        return [value.strip() for value in text.split(",")]
    values: list[object] = tree  # pyright: ignore[reportUnknownVariableType] - JSON
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def _check(request: SweepRequest, varied: Mapping[str, Sequence[str]]) -> None:
    if request.stage not in METRICS:
        raise ConfigError(
            f"stage {request.stage} has no score to compare", hint=f"one of: {', '.join(METRICS)}"
        )
    if "seed" in {*varied, *(text.partition("=")[0].strip() for text in request.overrides)}:
        raise ConfigError("seed is set, but a sweep has its own seeds", hint="give --seeds 7,8,9")
    if not request.seeds or len(set(request.seeds)) < len(request.seeds):
        given = ",".join(map(str, request.seeds)) or "none"
        raise ConfigError(f"seeds are {given}, expected different ones", hint="like --seeds 42,43")
    if request.reduction < 1:
        raise ConfigError(f"reduction is {request.reduction}", hint="at least 1, which stops none")
    if DEPTH in varied and request.depth is not None:
        raise ConfigError(
            f"depth is {request.depth}, but the sweep varies it", hint="leave the depth out"
        )
    runs = (1 + math.prod(len(values) for values in varied.values())) * len(request.seeds)
    if runs > MAX_RUNS:
        raise ConfigError(
            f"the grid is of {runs} runs, expected at most {MAX_RUNS}",
            hint="vary fewer values, or give fewer --seeds",
        )


def _with_same_text(request: SweepRequest, combinations: Sequence[Sequence[str]]) -> SweepRequest:
    """Return the grid with as many shards for all points as the largest one needs.

    Otherwise tokenizer and rows differ, and losses are of different text.
    """
    numbers = {_open(request, each).run.shards.num_shards for each in combinations}
    if len(numbers) == 1:
        return request
    return replace(request, overrides=(*request.overrides, f"{_SHARDS}={max(numbers)}"))


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{DEPTH} is {text!a}, expected a whole number", hint=f"like {DEPTH}=2,3,4,6"
        ) from None


def _open(request: SweepRequest, settings: Sequence[str]) -> Profile:
    return open_settings(_run_of(request, settings, request.seeds[0], None))


def _run_of(
    request: SweepRequest, settings: Sequence[str], seed: int, name: str | None
) -> RunRequest:
    """Return the request for one run; its depth is the profile's if None is set."""
    depths = [text for text in settings if text.startswith(f"{DEPTH}=")]
    others = (text for text in settings if text not in depths)
    run = RunRequest(**shared(RunRequest, request), until=request.stage)
    return replace(
        run,
        run_name=name,
        depth=_number(depths[0].partition("=")[2]) if depths else request.depth,
        overrides=(*request.overrides, *others, f"seed={seed}"),
    )


def _cells(profile: Profile, keys: Sequence[str]) -> list[str]:
    """Return the values of these settings."""
    # Of the opened profile: also the base has them, and 0.010 is 0.01.
    known = dict(single_settings(profile.run.tree()))
    return [v if isinstance(v, str) else json.dumps(v) for v in map(known.__getitem__, keys)]


def _titles(keys: Sequence[str]) -> list[str]:
    """Return the last part of each name, or the whole where two are the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]
