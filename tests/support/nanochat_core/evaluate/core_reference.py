"""A small CORE bundle, and the metric worked out the long way: every option by itself, nothing
shared, every logit. It knows the published format and rules, and nothing of nanochat_core.evaluate.
"""

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import yaml

TEXT = "river stone light 12 house's green, walks (softly) o'clock. of the a 7 # to; at night"
WORDS = TEXT.split()
TASKS = [  # label, kind, shots, delimiter, examples, baseline in percent
    ("far", "multiple_choice", 10, "\nAnswer: ", 13, 25.0),
    ("near", "multiple_choice", 0, None, 20, 25.0),
    ("yes_no", "multiple_choice", 3, "\nAnswer: ", 12, 50.0),
    ("few", "multiple_choice", 5, " ", 4, 0.0),  # too few for its shots
    ("pronouns", "schema", 0, " ", 12, 50.0),
    ("contexts", "schema", 2, " ", 11, 50.0),
    ("stories", "language_modeling", 0, "", 20, 0.0),
    ("facts", "language_modeling", 10, "\nAnswer: ", 17, 0.0),
]


def write_bundle(directory: Path, *, likely: dict[str, str] | None = None) -> Path:
    """A bundle of every kind of task. `likely` gives the continuations of some contexts."""
    rng = random.Random(5)

    def say(least: int, most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))

    entries: list[dict[str, Any]] = []
    for label, kind, shots, delimiter, count, _ in TASKS:
        items = [_item(rng, say, label, kind) for _ in range(count)]
        for item in items[::2] if label == "stories" else ():
            item["continuation"] = (likely or {}).get(item["context"].strip(), "so")
        path = directory / "eval_data" / kind / f"{label}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        entry = {
            "label": label,
            "dataset_uri": f"{kind}/{label}.jsonl",
            "num_fewshot": [shots],
            "icl_task_type": kind,
        }
        entries.append(
            entry if delimiter is None else {**entry, "continuation_delimiter": delimiter}
        )
    (directory / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    with (directory / "eval_meta_data.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["Eval Task", "Task Category", "Random baseline", "Description"])
        table.writerows([label, "x", share, "what, it is"] for label, *_, share in TASKS)
    return directory


def _item(rng: random.Random, say: Any, label: str, kind: str) -> dict[str, Any]:
    if kind == "language_modeling":
        spaces = rng.choice(["", " ", "\n"])
        return {"context": say(3, 9) + spaces, "continuation": say(1, 2)}
    gold = rng.randrange(2)
    if kind == "schema":
        before = say(1, 3)
        contexts = [f"{before} {rng.choice(WORDS)} {say(0, 4)}" for _ in range(2)]
        if rng.random() < 0.2:
            contexts[1] = contexts[0]  # nothing tells the options apart
        return {"context_options": contexts, "continuation": say(2, 5), "gold": gold}
    if label == "yes_no":
        return {"query": say(5, 30), "choices": ["no", "yes"], "gold": gold}
    choices = [say(1, 9 if label == "near" else 3) for _ in range(4)]
    if rng.random() < 0.3:
        choices[2] = choices[1]  # a tie
    if rng.random() < 0.2:
        choices[3] = choices[0] + " and"  # one begins as another ends
    return {"query": say(2, 12), "choices": choices, "gold": rng.randrange(4)}


@torch.no_grad()
def straight_core(model, tokenizer, directory: Path, *, most: int | None = None) -> dict[str, Any]:
    """{"core", "accuracy": {label: share}, "answers": {label: [...]}}."""
    entries = yaml.safe_load((directory / "core.yaml").read_text())["icl_tasks"]
    rows = csv.DictReader((directory / "eval_meta_data.csv").read_text().splitlines())
    baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
    answers: dict[str, list[int]] = {}
    accuracy: dict[str, float] = {}
    for entry in entries:
        lines = (directory / "eval_data" / entry["dataset_uri"]).read_text().splitlines()
        data = [json.loads(line) for line in lines]
        random.Random(1337).shuffle(data)
        data = data if most is None else data[:most]
        found: list[tuple[int, int]] = []
        for idx, item in enumerate(data):
            others = [d for i, d in enumerate(data) if i != idx]
            count = min(entry["num_fewshot"][0], len(others))
            shots = random.Random(1234 + idx).sample(others, count)
            found.append(
                _judge(
                    model, tokenizer, entry["icl_task_type"], item, shots,
                    entry.get("continuation_delimiter", " "),
                )
            )  # fmt: skip
        answers[entry["label"]] = [answer for answer, _ in found]
        accuracy[entry["label"]] = sum(a == gold for a, gold in found) / len(found)
    centred = [(accuracy[name] - baselines[name]) / (1 - baselines[name]) for name in accuracy]
    return {"core": sum(centred) / len(centred), "accuracy": accuracy, "answers": answers}


def _judge(model, tokenizer, kind: str, item, shots, between: str) -> tuple[int, int]:
    """What the model says, and what is right."""

    def tokens(text: str) -> list[int]:
        return [tokenizer.bos, *tokenizer.encode(text)]

    if kind == "language_modeling":
        before = "".join(f"{s['context'].strip()}{between}{s['continuation']}\n\n" for s in shots)
        question = before + item["context"].strip() + between
        without, whole = tokens(question.strip()), tokens(question + item["continuation"])
        assert whole[: len(without)] == without
        predicted = model(torch.tensor([whole]))[0].argmax(dim=-1).tolist()
        spans = range(len(without), len(whole))
        return int(all(predicted[t - 1] == whole[t] for t in spans)), 1
    if kind == "multiple_choice":
        before = "".join(f"{s['query']}{between}{s['choices'][s['gold']]}\n\n" for s in shots)
        texts = [f"{before}{item['query']}{between}{choice}" for choice in item["choices"]]
    else:
        before = "".join(
            f"{s['context_options'][s['gold']]}{between}{s['continuation']}\n\n" for s in shots
        )
        contexts = item["context_options"]
        texts = [f"{before}{context}{between}{item['continuation']}" for context in contexts]
    options = [tokens(text) for text in texts]
    means = []
    for ids in options:
        if kind == "multiple_choice":
            start = _common([list(o) for o in options])
        else:
            start = len(ids) - _common([o[::-1] for o in options])
        nats = -torch.log_softmax(model(torch.tensor([ids]))[0].double(), dim=-1)
        scored = [nats[t - 1, ids[t]].item() for t in range(start, len(ids)) if start > 0]
        means.append(sum(scored) / len(scored) if scored else math.nan)
    if math.isnan(means[0]):  # nanochat takes a first option of which nothing is scored
        return 0, item["gold"]
    best = min(m for m in means if not math.isnan(m))
    # What is a tie in exact arithmetic: the first one.
    return next(i for i, m in enumerate(means) if m <= best + 1e-9), item["gold"]


def _common(sequences: list[list[int]]) -> int:
    length = 0
    while all(length < len(s) for s in sequences) and len({s[length] for s in sequences}) == 1:
        length += 1
    return length


def likely_continuations(model, tokenizer, directory: Path) -> dict[str, str]:
    """A context of "stories" -> what the model would say next, where that is a letter."""
    lines = (directory / "eval_data/language_modeling/stories.jsonl").read_text().splitlines()
    found: dict[str, str] = {}
    for line in lines:
        context = json.loads(line)["context"].strip()
        ids = [tokenizer.bos, *tokenizer.encode(context)]
        with torch.no_grad():
            after = int(model(torch.tensor([ids]))[0, -1].argmax())
        if chr(after).isalpha():
            found[context] = chr(after)
    return found
