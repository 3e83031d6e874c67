"""Write and read the card of a published model: README.md, with metadata that the Hub shows.

The metadata has the evaluation's scores in the Hub's own form (model-index), with their 95 %
intervals, and what an import needs and the files do not say: the model's kind and era.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import find_run
from flows.artifacts.transfer import read_file
from flows.identity.manifest import Manifest
from flows.render.paired import Score, scores_in
from flows.render.text import number
from flows.stages import EVALUATORS, MIDTRAIN, PRETRAIN, REPORT, RL, SFT, stage_named
from infra.storage.base import Store
from nanochat_core.eras import ERAS

KINDS = {"base": PRETRAIN.name, "mid": MIDTRAIN.name, "sft": SFT.name, "rl": RL.name}
FILE = "README.md"
_METRIC = re.compile(r"[a-z0-9_]{1,64}")
_SHOWN_METRICS = 12
_MAX_BYTES, _MAX_SCORES = 2**20, 1000  # of a card that is read; aliases of YAML repeat scores
_INTERVAL, _ENDS = "interval_95", ("low", "high")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What a card says of its model; all of it is missing from other people's cards."""

    kind: str | None = None  # of KINDS
    era: str | None = None  # of nanochat
    scores: Mapping[str, float] = field(default_factory=dict[str, float])  # also NAME_low, _high


def model_card(
    store: Store,
    manifest: Manifest | None,
    *,
    name: str,
    form: str,
    era: str | None,
    is_own_code: bool = False,
) -> str:
    """Return the text of a card: what the model is, its scores, how to use it, its report card.

    Without a manifest the model is a directory of unknown origin. `is_own_code` says that
    transformers needs the code that an export brings along.
    """
    kind = "chat" if manifest is None else stage_named(manifest.stage).model
    scores = _scores(store, manifest) if manifest else {}
    lines = [
        "---",
        *_metadata(name, manifest, scores, form=form, era=era).splitlines(),
        "---",
        "",
        f"# {name}",
        "",
        f"A nanochat-style {kind} model, trained by nanochat-flows.",
        "",
        "## Use it",
        "",
        "With nanochat-flows, OWNER/NAME being where this page is:",
        "",
        "```console",
        *(["$ nanochat chat hf://OWNER/NAME"] if kind == "chat" else []),
        "$ nanochat import hf://OWNER/NAME --name mine",
        "```",
        "",
        *(_transformers(is_own_code) if form == "hf" else []),
    ]
    if scores:
        lines += ["## Scores", "", "| score | value | 95 % interval |", "| --- | --- | --- |"]
        for metric, score in scores.items():
            lines.append(f"| {metric} | {number(score.value)} | {score.interval} |")
        lines.append("")
    if manifest is not None:
        lines += [*_facts(manifest), *_report(store, manifest)]
    return "\n".join(lines).rstrip() + "\n"


def read_card(directory: Path, *, log: Callable[[str], None]) -> ModelCard:
    """Read the card next to a model's files; an empty one if it has none of ours.

    A card comes with a model of strangers: values that ours cannot have are left out.
    """
    path = directory / FILE
    if not path.is_file():
        return ModelCard()
    import huggingface_hub  # both are slow to import
    import yaml

    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
        hub: Any = huggingface_hub  # whose types are unknown in part
        tree: Any = hub.metadata_load(path) or {}
        ours: Any = tree.get("nanochat_flows") or {}
        kind, era = ours.get("kind"), ours.get("era")
        return ModelCard(
            kind=kind if kind in [*KINDS] else None,
            era=era if era in [*ERAS] else None,
            scores={
                name: float(value)
                for name, value in islice(_published(tree.get("model-index") or []), _MAX_SCORES)
                if _METRIC.fullmatch(name) and type(value) in (int, float) and math.isfinite(value)
            },
        )
    except (
        *(OSError, ValueError, LookupError, AttributeError, TypeError, yaml.YAMLError),
        *(OverflowError, RecursionError),
    ) as error:
        reason = str(error).partition("\n")[0]
        log(f"its {FILE} is left out, as it cannot be read: {reason}")
        return ModelCard()


def _published(index: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a model-index, and of the ends of their intervals."""
    for metric in (m for model in index for result in model["results"] for m in result["metrics"]):
        name = str(metric.get("name"))
        yield name, metric["value"]
        args: Any = metric.get("args") or {}
        ends: Any = args.get(_INTERVAL, ())
        yield from ((f"{name}_{end}", value) for end, value in zip(_ENDS, ends, strict=False))


def _metadata(
    name: str,
    manifest: Manifest | None,
    scores: Mapping[str, Score],
    *,
    form: str,
    era: str | None,
) -> str:
    """Return the YAML between the card's first two lines."""
    from huggingface_hub import EvalResult, ModelCardData

    kinds = {stage: kind for kind, stage in KINDS.items()}
    origin = {} if manifest is None else {"kind": kinds[manifest.stage], "digest": manifest.digest}
    data: Any = ModelCardData(
        library_name="transformers" if form == "hf" else "nanochat-flows",
        pipeline_tag="text-generation",
        tags=["nanochat", "nanochat-flows"],
        model_name=name,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=metric,
                dataset_name=metric,
                metric_type="bits_per_byte" if metric.endswith("bpb") else "accuracy",
                metric_name=metric,
                metric_value=score.value,
                metric_args={_INTERVAL: [score.low, score.high]},
            )
            for metric, score in scores.items()
        ]
        or None,
        nanochat_flows=origin | {"era": era},
    )
    return data.to_yaml()


def _transformers(is_own_code: bool) -> list[str]:
    trust = ", trust_remote_code=True" if is_own_code else ""
    lines = [
        "With transformers:",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("OWNER/NAME"{trust})',
        f'model = AutoModelForCausalLM.from_pretrained("OWNER/NAME", dtype="auto"{trust})',
        'messages = [{"role": "user", "content": "Hello"}]',
        "inputs = tokenizer.apply_chat_template(",
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
        ")",
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
        "```",
        "",
    ]
    if is_own_code:
        lines += [
            "Its architecture is not one of transformers' own: the file `transformers_model.py`",
            "next to the weights computes it; it runs only where trust_remote_code=True allows it.",
            "",
        ]
    return [
        *lines,
        "transformers turns special tokens that are spelled out in a text, such as `<|bos|>`, into",
        "special ids. Remove them from text of untrusted users first.",
        "",
    ]


def _scores(store: Store, manifest: Manifest) -> dict[str, Score]:
    """Return what the run that made a model measured of it with an interval."""
    evaluation = _made_by(store, manifest, EVALUATORS[manifest.stage].name)
    scores = scores_in(evaluation.provenance.metrics) if evaluation else {}
    return {name: score for name, score in scores.items() if score.interval}


def _made_by(store: Store, manifest: Manifest, stage: str) -> Manifest | None:
    """Return the artifact of `stage` of the run that made `manifest`; None if it has none."""
    run = find_run(store, manifest.provenance.run)
    return find_manifest(store, ref) if run and (ref := run.find_ref(stage)) else None


def _facts(manifest: Manifest) -> list[str]:
    metrics = manifest.provenance.metrics.items()
    numbers = [(name, value) for name, value in metrics if type(value) in (int, float, str)]
    return [
        "## Where it is from",
        "",
        f"- artifact `{manifest.name}`, digest `{manifest.digest}`",
        f"- made by run `{manifest.provenance.run}` at {manifest.provenance.created}",
        *(f"- {name}: {value}" for name, value in numbers[:_SHOWN_METRICS]),
        "",
    ]


def _report(store: Store, manifest: Manifest) -> list[str]:
    """Return the report card of the run that made the model as lines; empty if it has none."""
    report = _made_by(store, manifest, REPORT.name)
    data = read_file(store, report, "report.md") if report else None
    if data is None:
        return []
    text = data.decode("utf-8", errors="replace")
    # Its headings move one level down, below the model card's own.
    return ["## Report card", "", *(f"#{x}" if x.startswith("#") else x for x in text.splitlines())]
