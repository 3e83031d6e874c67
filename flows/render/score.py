"""A measured number and its 95 % interval: what every table, page and sentence shows of a score."""

from dataclasses import dataclass

from flows.render.text import number


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number, with the ends of its 95 % interval; None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    def text(self, *, sign: str = "", decimals: int | None = None) -> str:
        """0.25, 0.2, 0.3 -> "0.25 (0.2 to 0.3)"; without an interval the number alone.

        decimals: None means as `number` writes it. sign: "+" shows it.
        """
        shown, *ends = (
            number(n, sign=sign) if decimals is None else f"{n:{sign}.{decimals}f}"
            for n in (self.value, self.low, self.high)
            if n is not None
        )
        return f"{shown} ({' to '.join(ends)})" if len(ends) == 2 else shown


class Delta(Score):
    """The difference of a score from an earlier or another one, with its 95 % interval."""

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes 0; False without an interval."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def points(self) -> str:
        """The difference of two shares in percent: "+25.0 points (+14.0 to +35.0)"."""
        value, *ends = (
            f"{100 * n:+.1f}" for n in (self.value, self.low, self.high) if n is not None
        )
        return f"{value} points ({' to '.join(ends)})" if ends else f"{value} points"

    def number(self, *, decimals: int | None = None) -> str:
        """The difference with its sign and interval: "+0.25 (+0.1398 to +0.3499)"."""
        return self.text(sign="+", decimals=decimals)
