"""The report card as markdown, for a terminal, a pull request or Prefect's pages.

Model output and other untrusted text is in fenced blocks, where markdown has no meaning.
"""

from collections.abc import Iterator

from flows.render.score import Delta, Score
from flows.render.table import markdown_table
from flows.render.text import (
    bytes_per_token,
    duration,
    escaped,
    fenced,
    listed,
    money,
    percent,
    size,
    visible,
)
from flows.report.card import ABOUT_STAGES, VOCABULARIES, Card, Sample
from flows.report.scores import GPT2_CORE, TaskScore


def render(card: Card) -> str:
    """Return the report card as text. The same card gives the same text."""
    parts = [*_headline(card), *_scores(card), *_core(card), *_samples(card), *_fit(card)]
    parts += [*_stages(card), *_machine(card), *_reproduction(card)]
    return "\n".join(parts) + "\n"


def _headline(card: Card) -> Iterator[str]:
    yield f"# Report card: {visible(card.name)}"
    yield ""
    yield card.lead
    yield ""
    # This list is the first of the text: `nanochat run` prints it (`headline` in its module).
    yield from (f"- {line}" for line in card.summary)


def _scores(card: Card) -> Iterator[str]:
    yield "\n## Scores\n"
    yield ABOUT_STAGES.format(task=card.rl_task)
    yield "Share of questions answered correctly with one greedy answer each (pass@1);"
    yield "in brackets the 95 % interval. Last, the difference from the stage before."
    yield ""
    rows = [
        [task, *map(_cell, scores, card.chat.changes[task])]
        for task, scores in card.chat.tasks.items()
    ]
    rows.append(["ChatCORE", *map(_chatcore, card.chat.chatcore)])
    yield markdown_table(["task", *(model.label for model in card.chat.models)], rows)
    if card.failures:
        yield "\nCould not be evaluated:\n\n" + fenced(visible("\n".join(card.failures)))


def _core(card: Card) -> Iterator[str]:
    if card.core is None and not card.core_scores:
        return
    yield "\n## CORE\n"
    scored = (
        f"scores {card.core.text(decimals=4)}" if card.core else "was not evaluated on all tasks"
    )
    yield f"The base model {scored}; GPT-2 scores {GPT2_CORE}. Of each task the"
    yield "share of right answers, and the same from guessing (0) to all right (1); CORE is the"
    yield "mean of the latter."
    yield ""
    yield markdown_table(
        ["task", "right", "above guessing"],
        [[task, _cell(score), f"{score.centred:.3f}"] for task, score in card.core_scores.items()],
    )


def _chatcore(score: Score | None) -> str:
    return score.text(decimals=3) if score else "not known"


def _cell(score: TaskScore | None, change: Delta | None = None) -> str:
    if score is None:
        return "not asked"
    shown = f"{percent(score.accuracy)} ({score.interval}; {score.correct} of {score.total})"
    return f"{shown}; {change.points}" if change else shown


def _samples(card: Card) -> Iterator[str]:
    yield "\n## The same prompts, model by model"
    for sample in card.chat_samples:
        yield from _sample(sample)
    if card.rl_samples:
        yield f"\n## Rewarded samples of RL: {card.rl_task}\n"
        yield "Sampled answers to one question of a step, each with its reward."
    for sample in card.rl_samples:
        yield from _sample(sample)
    yield "\n## Samples of the base model\n"
    yield ", ".join(f"{name} {score.text(decimals=4)}" for name, score in card.base_scores.items())
    for sample in card.base_samples:
        yield from _sample(sample)


def _sample(sample: Sample) -> Iterator[str]:
    answers = (f"[{label}] {text}" for label, text in sample.answers)
    prompt = sample.prompt if sample.step is None else f"step {sample.step}: {sample.prompt}"
    yield "\n" + fenced(visible("\n".join([prompt, *answers])))


def _fit(card: Card) -> Iterator[str]:
    if not card.fit:
        return
    yield "\n## Vocabulary\n"
    yield "Bytes per token: more is better. All kinds but held-out are short texts of our own."
    yield ""
    yield markdown_table(
        ["text", "ours", *VOCABULARIES.values()],
        [[kind, *map(bytes_per_token, values)] for kind, values in card.fit.items()],
    )


def _stages(card: Card) -> Iterator[str]:
    yield "\n## Stages\n"
    yield markdown_table(
        ["stage", "what it made", "fingerprint", "digest", "size", "time", "cost", "made from"],
        [
            [
                stage.name,
                stage.makes,
                f"`{stage.fingerprint}`",
                f"`{stage.digest}`",
                size(stage.size),
                duration(stage.seconds),
                money(stage.dollars),
                ", ".join(f"{name} `{digest}`" for name, digest in stage.made_from),
            ]
            for stage in card.stages
        ],
    )


def _machine(card: Card) -> Iterator[str]:
    yield "\n## Speed and machine\n"
    yield markdown_table(
        ["stage", "machine", "steps", "tokens per second", "MFU", "resumed from step"],
        [
            [
                speed.stage,
                speed.machine,
                str(speed.steps),
                f"{speed.tokens_per_second:,.0f}" if speed.tokens_per_second is not None else "",
                percent(speed.mfu) if speed.mfu is not None else "not known",
                listed(speed.stops),
            ]
            for speed in card.speeds
        ],
    )
    yield ""
    yield from (f"- {name}: {value}" for name, value in card.environment)


def _reproduction(card: Card) -> Iterator[str]:
    found = card.reproduction
    yield "\n## Reproduce\n"
    none = "No one command makes these artifacts."
    # Not `visible`, which cuts long text: half a command is none.
    yield fenced(escaped(found.command)) if found.command else none
    yield ""
    yield from (f"- {visible(note)}" for note in found.notes)
    yield f"- all settings together have the digest `{found.digest}`"
