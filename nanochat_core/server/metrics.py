"""The server's counters, for Prometheus at GET /metrics, and the token rate of GET /stats."""

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

RATE_SECONDS = 10  # tokens per second are of the last so many
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        # Of its own, not the library's global one: a process may make more than one server.
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter(
            "nanochat_requests", "Answered HTTP requests", ["route", "status"], registry=own
        )
        self.refusals = Counter("nanochat_refusals", "Answers of status 4xx and 503", registry=own)
        self.running = Gauge("nanochat_running", "Answers being written", registry=own)
        self.waiting = Gauge("nanochat_waiting", "Answers waiting for a slot", registry=own)
        self.restarts = Gauge(
            "nanochat_engine_restarts", "Engine processes started again", registry=own
        )
        self.prompt_tokens = Counter("nanochat_prompt_tokens", "Tokens of prompts", registry=own)
        self.completion_tokens = Counter(
            "nanochat_completion_tokens", "Tokens written", registry=own
        )
        self.ends = Counter(
            "nanochat_answers", "Answers by how they ended", ["reason"], registry=own
        )
        self.first_token = Histogram(
            "nanochat_first_token_seconds",
            "From a request to its first token",
            buckets=_SECONDS,
            registry=own,
        )
        self.next_token = Histogram(
            "nanochat_next_token_seconds",
            "Between tokens of one request",
            buckets=_TOKEN_SECONDS,
            registry=own,
        )
        self._recent: deque[tuple[int, int]] = deque()  # (second, tokens written in it)

    def count_tokens(self, count: int) -> None:
        """Count tokens that were written just now."""
        self.completion_tokens.inc(count)
        second = int(time.monotonic())
        # One entry per second, however many messages come: the deque stays small.
        if self._recent and self._recent[-1][0] == second:
            count += self._recent.pop()[1]
        self._recent.append((second, count))
        self._forget(second)

    @property
    def tokens_per_second(self) -> float:
        """Mean rate over the last RATE_SECONDS."""
        self._forget(int(time.monotonic()))
        return sum(count for _, count in self._recent) / RATE_SECONDS

    def text(self) -> bytes:
        """Return all counters in Prometheus' text format."""
        return generate_latest(self.registry)

    def _forget(self, second: int) -> None:
        while self._recent and self._recent[0][0] <= second - RATE_SECONDS:
            self._recent.popleft()
