"""The console of tables and bars, which `flows.cli.output.screen` makes: the one user of rich."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from flows.render.text import escaped


class Screen(Console):
    """A console that escapes control characters in all text, so that none moves the cursor.

    Names, hosts, reasons and errors come from the store and from jobs, so other people write them.
    """

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        """Return `text` rendered; see Console."""
        # Before rich sees it: rich drops a few control characters silently.
        return super().render_str(escaped(text), *args, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of `renderable`; see Console. All output passes through here."""
        # Control segments (cursor, erase line) are made by rich itself for its progress bars.
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))
