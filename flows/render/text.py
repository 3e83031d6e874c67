"""Formatting of numbers, and escaping of untrusted text, for terminals and pages."""

import re
import unicodedata
from collections.abc import Sequence
from datetime import datetime

_NOT_IN_KEYS = re.compile(r"[^a-z0-9]+")
MAX_SHOWN = 2000  # characters of one model answer
_KEPT_CONTROLS = "\n\t"
# From how many seconds on a duration has these two units: seconds and name of each.
_UNITS = (
    (63_072_000, 31_536_000, "years", 2_628_000, "months"),
    (172_800, 86_400, "days", 3600, "h"),
    (3600, 3600, "h", 60, "min"),
    (60, 60, "min", 1, "s"),
)
_LONG_AGO = 60 * 86_400  # seconds
_CLOCKS_DIFFER = 300  # seconds by which another machine's clock may be ahead
# Unicode categories of characters that are invisible, or that change the direction of text.
_HIDDEN = {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"}


def visible(text: str) -> str:
    r"""Return `text` with invisible characters as \x.. or \u...., cut after MAX_SHOWN characters.

    Model output is untrusted: it may hold terminal escapes, direction marks or megabytes.
    """
    # Cut before escaping: an escape is never cut in half, and megabytes cost nothing.
    return escaped(text[:MAX_SHOWN] + ("\u2026" if len(text) > MAX_SHOWN else ""))


def escaped(text: str) -> str:
    """Return the whole text escaped as by `visible`, for text that must not be cut."""
    return "".join(_visible_character(character) for character in text)


def one_line(text: str) -> str:
    """Return the text as `visible` does, on one line, so that it cannot fake another line."""
    return visible(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def _visible_character(character: str) -> str:
    if character in _KEPT_CONTROLS or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def count(number: float) -> str:
    """4_812_000 -> "4.81 M"."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 0.9995 rounds up to 1.00 in three digits: "1 M" and not "1e+03 k".
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"


def size(num_bytes: int) -> str:
    """1_482_000 -> "1.5 MB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def number(value: float, *, sign: str = "") -> str:
    """0.123456 -> "0.1235"; 1234.5 -> "1,234"; integers with all digits. `sign` "+" shows it."""
    if isinstance(value, int):
        return f"{value:{sign},}"
    return f"{value:{sign}{',.0f' if abs(value) >= 1000 else '.4g'}}"


def duration(seconds: float) -> str:
    """4.21 -> "4.2 s"; 75 -> "1 min 15 s"; 3_725 -> "1 h 2 min"; 270_000 -> "3 days 3 h"."""
    if seconds < 10:
        return f"{round(seconds, 2):.2g} s"
    whole = round(seconds)
    for least, large, big, small, little in _UNITS:
        if whole >= least:
            rest = whole % large // small
            return f"{whole // large} {big}" + (f" {rest} {little}" if rest else "")
    return f"{whole} s"


def ago(stamp: str, now: float) -> str:
    """ "2026-11-28T06:00:00Z" -> "3 h ago"; a date if that is long ago. `now`: seconds since 1970.

    Text that is no time is returned unchanged.
    """
    try:
        seconds = now - datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return stamp
    if seconds < -_CLOCKS_DIFFER or seconds >= _LONG_AGO:
        return stamp[:10]
    if seconds < 60:
        return "just now"
    size, unit = next((large, big) for least, large, big, *_ in _UNITS if seconds >= least)
    return f"{seconds // size:.0f} {unit} ago"


def percent(share: float) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * share:.1f} %"


def fenced(text: str) -> str:
    """Return `text`, which is escaped already, as a markdown block that nothing in it can close."""
    # A fence is closed by one at least as long: take one more backtick than the longest run inside.
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def listed(items: Sequence[object], most: int = 4) -> str:
    """[1, 2, 3] -> "1, 2, 3"; of more than `most`, the first ones and the number of the others."""
    shown = ", ".join(str(item) for item in items[:most])
    more = len(items) - most
    return f"{shown} and {more} more" if more > 0 else shown


def money(dollars: float) -> str:
    """12.5 -> "$12.50"; 0 -> "no price", as for a machine of your own."""
    return f"${dollars:,.2f}" if dollars else "no price"


def key_of(text: str) -> str:
    """Return `text` as a Prefect artifact key: lower-case letters, digits and dashes."""
    return _NOT_IN_KEYS.sub("-", text.lower()).strip("-")
