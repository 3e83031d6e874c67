"""Stores that fall silent for longer than a lease lives."""

import time
from typing import Any

from flows.leases.held_lease import LeaseTimings
from infra.storage.base import StoreUnavailable

TERMS = LeaseTimings(ttl=0.1, beat=0.02, poll=0.02, max_poll=0.05, report=0.0)
SECONDS = 3 * TERMS.ttl
_VERBS = {
    *("put", "put_if_absent", "put_if_same", "get", "get_stored"),
    *("head", "list", "delete", "upload", "fetch"),
}


class Outage:
    """A store that answers nothing for a while, from the first request of a kind on."""

    def __init__(
        self, store: Any, verb: str, part: str, *, data: bytes = b"", seconds: float = SECONDS
    ) -> None:
        self._store = store
        self._verb, self._part, self._data = verb, part, data  # of the request that begins it
        self._seconds = seconds
        self.until: float | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in _VERBS:
            return found

        def ask(key: str, *words: Any, **options: Any) -> Any:
            is_first = name == self._verb and self._part in key
            if self.until is None and is_first and (not self._data or self._data in words[0]):
                self.until = time.monotonic() + self._seconds
            if self.until is not None and time.monotonic() < self.until:
                raise StoreUnavailable(f"no answer to {name}")
            return found(key, *words, **options)

        return ask
