"""The events of one request on their way from its engine process to its HTTP response."""

import asyncio
from collections.abc import Callable

from nanochat_core.engine.requests import EndEvent, Event


class AnswerStream:
    """The events of one request, buffered until its reader takes them.

    The buffer is bounded by the request's own answers (`num_samples` times `max_tokens`), so a slow
    reader delays no other request.
    """

    def __init__(self, num_samples: int, *, worker: int, on_cancel: Callable[[], None]) -> None:
        self.worker = worker  # the index of its engine process
        self.unfinished = num_samples  # samples that the engine has not ended
        self.was_refused = False  # the engine cannot answer such a request, now or later
        self._events: list[Event] = []
        self._come = asyncio.Event()  # set while there is something to take
        self._open = set(range(num_samples))
        self._on_cancel = on_cancel

    async def take(self) -> list[Event]:
        """Return all events since the last call, at least one; an empty list if it is over."""
        if not self._events and self._open:
            self._come.clear()
            await self._come.wait()
        events, self._events = self._events, []
        return events

    def cancel(self) -> None:
        """Cancel the request, unless it is over. Samples that have not ended end as cancelled."""
        # Closed before the engine confirms: the reader need not wait for its step to end.
        if self._open:
            self.close("cancelled")
            self._on_cancel()

    def put(self, event: Event) -> None:
        """Buffer an event from the engine; after `cancel` it is dropped."""
        if isinstance(event, EndEvent) and event.sample < 0:  # refused as a whole
            self.was_refused = True
            self.close(event.reason, event.error)
        elif event.sample in self._open:
            self._events.append(event)
            if isinstance(event, EndEvent):
                self._open.discard(event.sample)
            self._come.set()

    def close(self, reason: str, error: str = "") -> None:
        """End every sample that has not ended."""
        for sample in sorted(self._open):
            self._events.append(EndEvent(sample=sample, reason=reason, error=error))  # pyright: ignore[reportArgumentType]
        self._open.clear()
        self._come.set()
