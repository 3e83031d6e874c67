"""The report card as one HTML file."""

from pathlib import Path

from flows.render.html import fill
from flows.report.card import VOCABULARIES, Card
from flows.report.scores import GPT2_CORE
from flows.stages import CHAT_MODELS, RL

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def render(card: Card) -> str:
    """Return the page as HTML. The same card gives the same text."""
    return fill(
        TEMPLATE,
        card=card,
        models=CHAT_MODELS,
        rl=RL,
        before_rl=RL.inputs[0],
        vocabularies=VOCABULARIES,
        gpt2_core=GPT2_CORE,
        place=_place,
    )


def _place(share: float) -> str:
    """Return the CSS position of a share on a bar, clipped to the bar's ends."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"
