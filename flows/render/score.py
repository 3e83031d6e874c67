"""A measured number and its 95 % interval: what every table, page and sentence shows of a score."""

from dataclasses import dataclass

from flows.render.text import number


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number, with the ends of its 95 % interval; None where there is none."""

    value: float
    low: float | None
    high: float | None

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
