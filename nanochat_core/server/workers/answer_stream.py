"""The events of one request on their way from its engine process to its HTTP response."""

import asyncio
from collections.abc import Callable

from nanochat_core.engine.requests import EndEvent, Event


class AnswerStream:
    """What comes of one request. Events wait here, unread ones together, until they are taken.

    There are never more than `num_samples` answers' worth of them, so a slow reader costs memory
    that its request had to ask for, and nobody's time.
    """

    def __init__(self, num_samples: int, *, worker: int, on_cancel: Callable[[], None]) -> None:
        self.worker = worker  # the index of its engine process
        self.was_refused = False  # the engine cannot answer such a request, now or later
        self._events: list[Event] = []
        self._come = asyncio.Event()
        self._open = set(range(num_samples))
        self._on_cancel = on_cancel

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come; what came may still be taken."""
        return not self._open

    async def take(self) -> list[Event]:
        """All that came since the last time, at least one; none when it is over."""
        if not self._events and self._open:
            self._come.clear()
            await self._come.wait()
        events, self._events = self._events, []
        return events

    def cancel(self) -> None:
        """Call it off, unless it is over. Samples that still went on end as cancelled."""
        if self._open:
            self.close("cancelled")
            self._on_cancel()

    def put(self, event: Event) -> None:
        """What the engine says; after `cancel` it is not listened to."""
        if isinstance(event, EndEvent) and event.sample < 0:  # refused as a whole
            self.was_refused = True
            self.close(event.reason, event.error)
        elif event.sample in self._open:
            self._events.append(event)
            if isinstance(event, EndEvent):
                self._open.discard(event.sample)
            self._come.set()

    def close(self, reason: str, error: str = "") -> None:
        """End every sample that goes on."""
        for sample in sorted(self._open):
            self._events.append(EndEvent(sample=sample, reason=reason, error=error))  # pyright: ignore[reportArgumentType]
        self._open.clear()
        self._come.set()
