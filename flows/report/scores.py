"""Scores on the report card, each with its 95 % interval, and what each stage changed in them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flows.render.page import Section
from flows.render.paired import Delta, Score, delta_of, pair
from flows.render.table import Cell, Table, texts
from flows.render.text import listed, percent, visible
from flows.report.inputs import Artifact
from flows.stages import CHAT_MODELS, Stage
from tasks.names import TASKS

CHATCORE = "chatcore"
_MAX_LOSSES = 3  # that a line names
_KIND = ": "  # between a task and a kind of turn, in the names of an evaluation's `turns`
GPT2_CORE = 0.2565  # OpenAI's GPT-2 (1.6 B parameters), from nanochat's leaderboard


@dataclass(frozen=True, kw_only=True)
class TaskScore(Score):
    """Share of one task's questions answered correctly, with its 95 % interval."""

    low: float = 0.0  # a share always has both ends
    high: float = 1.0
    correct: int
    total: int
    centred: float | None = None  # the share rescaled: guessing is 0, all right is 1; of CORE


@dataclass(frozen=True, kw_only=True)
class ChatScores:
    """What the chat models of a run score, in the order of their training."""

    models: Sequence[Stage]  # those that were evaluated
    # Of each model, by task and CHATCORE. Without a task that was not asked, or that failed;
    # without CHATCORE if a task failed.
    scores: Sequence[Mapping[str, Score]]
    changes: Sequence[Mapping[str, Delta]]  # the differences from the model before; first: none

    @property
    def tasks(self) -> list[str]:
        """The tasks that a model was asked, and their kinds of turns, by name."""
        return sorted({name for of_model in self.scores for name in of_model} - {CHATCORE})

    def cells(self, name: str, *, missing: Cell) -> list[Cell]:
        """Return a score by model, each with the difference from the model before."""
        models = zip(self.scores, self.changes, strict=True)
        return [_cell(of[name], new.get(name)) if name in of else missing for of, new in models]

    @property
    def chatcore_row(self) -> list[Cell]:
        """ChatCORE by model."""
        return self.cells(CHATCORE, missing=Cell("not known"))

    @property
    def course(self) -> str:
        """ChatCORE by model, in a line."""
        cells = zip(self.models, self.chatcore_row, strict=True)
        return f"ChatCORE: {', '.join(f'{cell.text} after {model.label}' for model, cell in cells)}"

    @property
    def losses(self) -> str:
        """The tasks that a stage made worse, in a line; the largest losses first."""
        found: list[tuple[float, str]] = []
        steps = zip(self.models[1:], pairwise(self.scores), self.changes[1:], strict=True)
        for model, (before, after), changes in steps:
            for task, change in changes.items():
                if task != CHATCORE and _tone(change) == "worse":
                    shares = f"{percent(before[task].value)} -> {percent(after[task].value)}"
                    found.append((change.value, f"{task} {shares} after {model.label}"))
        if not found:
            return "nothing worse: no task scores clearly lower than one stage before"
        return f"worse: {listed([text for _, text in sorted(found)], _MAX_LOSSES)}"


def _tone(change: Delta | None) -> str:
    """Return whether a score changed beyond chance: the 95 % interval excludes 0."""
    if change is None or not change.is_clear:
        return ""
    return "worse" if change.value < 0 else "better"


def _cell(score: Score, change: Delta | None = None) -> Cell:
    """Return a score with its interval and the difference from the model before; a share drawn."""
    tone = _tone(change)
    if isinstance(score, TaskScore):
        low, high = score.low, score.high
        interval = f"{100 * low:.1f} to {percent(high)}, {score.correct} of {score.total}"
        notes = (interval, change.points) if change else (interval,)
        return Cell(percent(score.value), notes, tone=tone, span=(low, high), at=score.value)
    interval = [] if score.low is None else [f"{score.low:.3f} to {score.high:.3f}"]
    notes = (*interval, *([change.text(decimals=3)] if change else []))
    return Cell(f"{score.value:.3f}", notes, tone=tone)


def chat_scores(evaluations: Mapping[str, Artifact]) -> ChatScores:
    """Return the scores of chat models by their evaluations. Raises ArtifactError."""
    models = [model for model in CHAT_MODELS if model.name in evaluations]
    artifacts = [evaluations[model.name] for model in models]
    scores: list[dict[str, Score]] = []
    for tree in (artifact.read_json("scores.json") for artifact in artifacts):
        chatcore = measured(tree, CHATCORE)
        scores.append({**task_scores(tree), **({CHATCORE: chatcore} if chatcore else {})})
    changes: list[dict[str, Delta]] = [{} for _ in models[:1]]
    files = ((artifact.manifest.name, artifact.find) for artifact in artifacts)
    for (old, new), sources in zip(pairwise(scores), pairwise(files), strict=True):
        pairs = pair(*sources).differences
        changes.append({n: delta_of(old[n], new[n], pairs.get(n)) for n in new if n in old})
    return ChatScores(models=models, scores=scores, changes=changes)


def summary(metrics: Mapping[str, Any], chat: ChatScores) -> Iterator[str]:
    """Yield a run's main numbers as "label: text": bits per byte, ChatCORE, and what got worse.

    `metrics` are those of pretraining. A line is left out where its numbers are missing.
    """
    first, last = metrics.get("val_bpb_first"), metrics.get("val_bpb")
    if first and last:
        yield f"bits per byte: {first:.3f} -> {last:.3f} ({100 * (last / first - 1):+.1f} %)"
    if chat.models:
        yield chat.course
    if len(chat.models) > 1:
        yield chat.losses


def _describe_questions(tasks: Iterable[str], data: Artifact) -> str:
    """Return which tasks are English or the user's own, and how many questions training has too."""
    datasets = data.read_json("task_data.json")["datasets"]
    found = {name: datasets[name] for name in tasks if name in datasets}
    parts = (
        [f"In English: {', '.join(english)}."] if (english := sorted({*found} & {*TASKS})) else []
    )
    if own := [name for name, data in found.items() if data["kind"] == "own"]:
        parts.append(f"From a file of the user's own, in its language: {', '.join(own)}.")
    asked = [
        f"{data['overlap']} of {data['test']} of {name}"
        for name, data in found.items()
        if data["overlap"]
    ]
    return " ".join([*parts, f"Questions that training has too: {', '.join(asked) or 'none'}."])


def chat_section(
    chat: ChatScores, *, rl_task: str, data: Artifact, failures: Sequence[str]
) -> Section:
    """Return the scores of every task by model; `failures` say why one could not be evaluated.

    `data` is the artifact of the stage task_data.
    """
    return Section(
        title="Scores",
        notes=(
            "Midtraining teaches the base model the form of conversations, SFT (supervised "
            "fine-tuning) continues on chosen ones, and RL (reinforcement learning) rewards right "
            f"answers to {rl_task}. ChatCORE is the mean over the tasks, from guessing (0) to all "
            "right (1).",
            "Share of questions answered correctly with one greedy answer each (pass@1), its 95 % "
            "interval, and the difference from the stage before. A loss whose interval leaves out "
            "0 is marked.",
            _describe_questions(chat.tasks, data),
        ),
        style="scores",
        table=Table(
            columns=texts("task", *(model.label for model in chat.models)),
            rows=[
                *_score_rows(chat, (task for task in chat.tasks if _KIND not in task)),
                ("ChatCORE", *chat.chatcore_row),
            ],
        ),
        code=visible("\n".join(["Could not be evaluated:", *failures])) if failures else "",
    )


def turns_section(chat: ChatScores) -> Section | None:
    """Return the scores of each kind of turn; None if no task has kinds."""
    rows = tuple(_score_rows(chat, (task for task in chat.tasks if _KIND in task)))
    if not rows:
        return None
    return Section(
        title="Kinds of turns",
        notes=("An example of several turns is right if every turn is. Here each turn counts.",),
        style="scores",
        table=Table(columns=texts("task", *(model.label for model in chat.models)), rows=rows),
        folded=True,
    )


def _score_rows(chat: ChatScores, tasks: Iterable[str]) -> Iterator[tuple[str | Cell, ...]]:
    """Yield a row for each task, with a cell for each model."""
    for task in tasks:
        yield task, *chat.cells(task, missing=Cell("", ("not asked",)))


def core_section(scores: Mapping[str, Any]) -> Section | None:
    """Return CORE of the base model from its scores.json; None if it was not asked."""
    core, tasks = measured(scores, "core"), task_scores(scores)
    if core is None and not tasks:
        return None
    mean = Cell("not known: a task could not be evaluated")
    if core is not None:
        span = None if core.low is None or core.high is None else (core.low, core.high)
        note = f"GPT-2 {GPT2_CORE}"
        text = core.text(decimals=4)
        mean = Cell(text, (note,), span=span, at=core.value, mark=GPT2_CORE)
    return Section(
        title="CORE",
        notes=(
            "What the base model knows, over the tasks of DCLM, in English: the mean of what is "
            "above guessing. The shaded range is the 95 % interval, the upright line GPT-2.",
        ),
        style="scores core",
        table=Table(
            columns=texts("task", "right", "above guessing"),
            rows=[
                ("CORE", "", mean),
                *(
                    (task, _cell(score), Cell(f"{score.centred:.3f}", at=score.centred))
                    for task, score in tasks.items()
                ),
            ],
        ),
    )


def task_scores(scores: Mapping[str, Any]) -> dict[str, TaskScore]:
    """Return the tasks of a scores.json in its order, then its kinds of turns; may be empty."""
    return {
        task: TaskScore(
            value=found["accuracy"],
            **{name: found[name] for name in ("low", "high", "correct", "total")},
            centred=found.get("centred"),
        )
        for task, found in {**scores.get("tasks", {}), **scores.get("turns", {})}.items()
    }


def measured(scores: Mapping[str, Any], name: str) -> Score | None:
    """Return a number of a scores.json, or None if it has none of this name."""
    # Not int: `format` is one, and no score.
    value = scores.get(name)
    if not isinstance(value, float):
        return None
    low, high = scores.get("intervals", {}).get(name, (None, None))
    return Score(value=value, low=low, high=high)
