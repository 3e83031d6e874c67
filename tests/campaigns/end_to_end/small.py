"""A whole tiny flow of about a minute, every stage of it a real one: its form, and what it did."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat_core.runtime.progress import read_events
from tests.support.infra.stack.live import LiveStack

DEPTH = 1
_CHAT = (("identity", 60), ("spelling", 100), ("arithmetic", 30))
_MIXTURE = json.dumps([{"task": t, "num_examples": n, "epochs": 1} for t, n in _CHAT])
SETTINGS = {
    "shards.num_shards": 1,
    "tokenizer.max_chars": 500_000,
    "pretrain.num_steps": 40,
    "pretrain.total_batch_size": 1024,
    "pretrain.eval_tokens": 4096,
    "base_eval.eval_tokens": 4096,
    "base_eval.max_new_tokens": 8,
    "midtrain.mixture": _MIXTURE,
    "midtrain.eval_examples": 10,
    "sft.mixture": _MIXTURE,
    "sft.eval_examples": 10,
    "rl.num_steps": 3,
    "rl.examples_per_step": 2,
    "rl.samples_per_example": 4,
    "rl.max_new_tokens": 8,
    "rl.eval_examples": 5,
    "chat_eval.tasks": '[{"name": "arithmetic", "max_examples": 5, "max_new_tokens": 8}]',
}
PLACE = ("threads=1",)  # sums depend on the number of threads

SECONDS = 1800.0  # for a flow on a busy machine; two minutes on an idle one


def start_flow(
    stack: LiveStack,
    name: str,
    *,
    store: Path | None = None,
    fields: Mapping[str, Any] = {},
    **settings: Any,
) -> str:
    """Trigger a run as the form does, and return its id.

    `settings` are more overrides, section__name=value, and `fields` more of the form's.
    """
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    values = {
        "profile": "tiny",
        "depth": DEPTH,
        "overrides": [f"{name}={value}" for name, value in {**SETTINGS, **changed}.items()],
        "place": list(PLACE),
        "run_name": name,
    }
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
        values["store"] = store.as_uri()
    deployment = stack.api.deployment("nanochat/nanochat")
    return stack.api.trigger(deployment, {**values, **fields}, name=name)


def stages_of(stack: LiveStack, run: str) -> dict[str, str]:
    """Stage -> name of the state of its task run, of the run's last attempt."""
    count = stack.api.run(run)["run_count"]
    tasks = [t for t in stack.api.task_runs(run) if t["flow_run_run_count"] == count]
    # Task runs are called as their stage, perhaps with something after it.
    return {t["name"].split()[0].split("/")[0]: t["state_name"] for t in tasks}


def newest_step(stack: LiveStack, stage: str) -> int:
    """Return the last step in the log of the unfinished job of a stage; 0 before its first."""
    steps = [0]
    for log in sorted((stack.home / "work" / stage).glob("*/events.jsonl")):
        with contextlib.suppress(FileNotFoundError):  # the job has just ended
            steps += [event["step"] for event in read_events(log) if event["kind"] == "step"]
    return steps[-1]
