"""The report card as one HTML file."""

from pathlib import Path

from flows.render.html import fill
from flows.report.card import ABOUT_STAGES, VOCABULARIES, Card
from flows.report.scores import GPT2_CORE, is_loss

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def render(card: Card) -> str:
    """Return the page as HTML. The same card gives the same text."""
    return fill(
        TEMPLATE,
        card=card,
        about=ABOUT_STAGES.format(task=card.rl_task),
        is_loss=is_loss,
        vocabularies=VOCABULARIES,
        gpt2_core=GPT2_CORE,
        place=_place,
    )


def _place(share: float) -> str:
    """Return the CSS position of a share on a bar, clipped to the bar's ends."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"
