"""Known names that are near a mistyped one: every `did you mean` of commands comes from here."""

from collections.abc import Iterable, Sequence

_CLOSE = 0.6  # likeness of a name that is meant; "seed" has 0.5 with "nonsense"
_CLOSE_OTHER = 0.75  # of a name of another kind; "main" has 0.67 with the stage "midtrain"
_MAX_SHOWN = 20  # names in a hint


def nearest(word: str, known: Iterable[str], *, least: float = _CLOSE) -> list[str]:
    """Return the names that are at least so like `word`, from 0 to 1, the nearest first."""
    from difflib import SequenceMatcher  # imported here: needed for mistakes only

    # People remember the last part of a name ("num_steps"), so each part is compared by itself too.
    def likeness(name: str) -> float:
        parts = {name, *name.split(".")}
        return max(SequenceMatcher(None, word.lower(), part.lower()).ratio() for part in parts)

    found = sorted(((likeness(name), name) for name in known), key=lambda item: -item[0])
    return [name for like, name in found if like >= least]


def suggest(
    word: str, known: Sequence[str], *others: tuple[str, Sequence[str]], form: str = "{}"
) -> str:
    """Return a hint: the closest of `known`, in this form, else the closest of another kind.

    `others` are pairs of a kind and its names. If no name is close, the hint lists the first 20 of
    `known`; "" if there are none.
    """
    if near := nearest(word, known):
        return f"did you mean '{form.format(near[0])}'?"
    for kind, names in others:
        if near := nearest(word, names, least=_CLOSE_OTHER):
            return f"did you mean the {kind} '{near[0]}'?"
    more = f" and {len(known) - _MAX_SHOWN} more" if len(known) > _MAX_SHOWN else ""
    return f"one of: {', '.join(known[:_MAX_SHOWN])}{more}" if known else ""
