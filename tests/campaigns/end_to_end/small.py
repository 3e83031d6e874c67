"""Values of the run form for a whole tiny flow of about a minute, every stage of it a real one."""

import json
from typing import Any

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


def form_values(*, run_name: str, store: str | None = None, **settings: Any) -> dict[str, Any]:
    """What is typed into the form; `settings` are more overrides, section__name=value."""
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    values: dict[str, Any] = {
        "profile": "tiny",
        "depth": DEPTH,
        "overrides": [f"{name}={value}" for name, value in {**SETTINGS, **changed}.items()],
        "place": list(PLACE),
        "run_name": run_name,
    }
    return values if store is None else {**values, "store": store}
