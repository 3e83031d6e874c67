"""Numbers and foreign text as the report card shows them."""

import re
import unicodedata
from collections.abc import Sequence

_NOT_IN_KEYS = re.compile(r"[^a-z0-9]+")
MAX_SHOWN = 2000  # characters of one model answer
_KEPT_CONTROLS = "\n\t"
_HIDDEN = {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"}  # invisible, or turns the text around


def visible(text: str) -> str:
    r"""Text as a person may safely see it: what is invisible becomes \x.. or \u...., long is cut.

    Model output is hostile: it may hold terminal escapes, direction marks or megabytes.
    """
    return escaped(text[:MAX_SHOWN] + ("\u2026" if len(text) > MAX_SHOWN else ""))


def escaped(text: str) -> str:
    """The whole text as `visible` shows it, for what must not be cut."""
    return "".join(_visible_character(character) for character in text)


def one_line(text: str) -> str:
    """The text as `visible` shows it, on one line: nothing in it can pass for a line of its own."""
    return visible(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def _visible_character(character: str) -> str:
    if character in _KEPT_CONTROLS or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def count(number: float) -> str:
    """4_812_000 -> "4.81 M"."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:  # three digits of it round up to one unit
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"


def size(num_bytes: int) -> str:
    """1_482_000 -> "1.5 MB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def duration(seconds: float) -> str:
    """270_000 -> "3 days 3 h"; 3_725 -> "1 h 2 min"; 75 -> "1 min 15 s"; 3.2 -> "3 s"."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours >= 48:
        return f"{hours // 24} days {hours % 24} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def percent(share: float) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * share:.1f} %"


def bytes_per_token(value: float | None) -> str:
    """4.5678 -> "4.57"; None -> "not at hand"."""
    return "not at hand" if value is None else f"{value:.2f}"


def listed(items: Sequence[object], most: int = 4) -> str:
    """[1, 2, 3] -> "1, 2, 3"; of more than `most` the first ones and how many there are besides."""
    shown = ", ".join(str(item) for item in items[:most])
    more = len(items) - most
    return f"{shown} and {more} more" if more > 0 else shown


def money(dollars: float) -> str:
    """12.5 -> "$12.50"; of nothing, "no price": a machine of one's own has none."""
    return f"${dollars:,.2f}" if dollars else "no price"


def key_of(text: str) -> str:
    """`text` as Prefect wants keys to be: lower-case letters, digits and dashes."""
    return _NOT_IN_KEYS.sub("-", text.lower()).strip("-")
