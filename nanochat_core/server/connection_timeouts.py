"""Closes connections that send their request too slowly or do not read the answer (slow loris).

uvicorn has no such limits: measured with the stock version, 300 such connections stay open for
ever. The server's other limits are for requests; these are for connections that never send one.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVE_SECONDS = 20.0  # for a whole request, from its connection or its first byte
READ_SECONDS = 30.0  # in which a client must have read something of what waits for it


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with timeouts."""

    receive_seconds = RECEIVE_SECONDS
    read_seconds = READ_SECONDS
    _receiving: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timer in which a new connection must send its first request."""
        super().connection_made(transport)
        self._receiving = self.loop.call_later(self.receive_seconds, self._cut)

    def data_received(self, data: bytes) -> None:
        """Start the timer of a request that has begun, or stop that of one that is complete."""
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._expect_end()
        else:
            self._receiving = _cancelled(self._receiving)

    def on_response_complete(self) -> None:
        """Start the timer in which the rest of the response must be read."""
        # What is buffered may be too little for a pause in writing, which starts that timer else.
        self._reading = _cancelled(self._reading)
        self._expect_rest()
        super().on_response_complete()
        # Pipelining: the beginning of the next request may have come with the last one.
        if self.conn.their_state is h11.SEND_BODY:
            self._expect_end()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with a 400, unless a response is under way or complete."""
        # uvicorn would let the app answer the valid beginning too: two tracebacks per request.
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        is_head = self.scope is not None and self.scope["method"] == "HEAD"  # takes no body
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not is_head:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """Start the timer in which the client must read: the write buffer is full."""
        super().pause_writing()
        if self._reading is None:
            self._expect_less(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the timer: the client has read."""
        super().resume_writing()
        self._reading = _cancelled(self._reading)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._receiving = _cancelled(self._receiving)
        self._reading = _cancelled(self._reading)
        super().connection_lost(exc)

    def _expect_end(self) -> None:
        if self._receiving is None:
            self._receiving = self.loop.call_later(self.receive_seconds, self._cut)

    def _expect_rest(self) -> None:
        if left := self.transport.get_write_buffer_size():
            self._expect_less(left)

    def _expect_less(self, size: int) -> None:
        self._reading = self.loop.call_later(self.read_seconds, self._check_read, size)

    def _check_read(self, size: int) -> None:
        self._reading = None
        left = self.transport.get_write_buffer_size()
        is_more_written = self.cycle is not None and not self.cycle.response_complete
        if not left or (is_more_written and not self.flow.write_paused):
            return  # the end of what is written, or the next pause, sets the next timer
        if left >= size:  # nothing was read in all that time
            self._cut()
        else:
            self._expect_less(left)

    def _cut(self) -> None:
        # Not close(), which waits until the client has read the write buffer.
        self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
