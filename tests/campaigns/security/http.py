"""Hostile requests to the chat server, whose engine has no model.

What gets through is a status that no client may see (5xx but 503), silence, the canary of another
client, a name, body or sender that is not refused, and anything in the server's log.
"""

import time
from concurrent.futures import ThreadPoolExecutor

from tests.campaigns.security.rows import Row, row, row_of
from tests.support.nanochat_core.server.hostile_http import try_what_is_refused
from tests.support.nanochat_core.server.live import FAKE, wait_until
from tests.support.nanochat_core.server.process import Apart, serving_apart
from tests.support.reliability.server_fuzz import fire_many

REQUESTS = 10_000
THREADS = 8
MAX_WAITING = 16  # so that some requests find the queue full


def run(seed: int, *, count: int = REQUESTS, maker: str = FAKE) -> list[Row]:
    """Send `count` requests from `seed` on, then what must be refused, to one server."""
    rows: list[Row] = []
    began = time.monotonic()
    try:
        with serving_apart(max_waiting=MAX_WAITING, maker=maker) as server:
            rows.append(_fuzz(server, range(seed, seed + count)))
            rows.append(_refusals(server))
    except AssertionError as error:  # the server ended, or wrote to its log
        wrote = str(error).strip() or "the server ended"
        rows.append(row("http, server", 1, [wrote], began=began))
    return rows


def _fuzz(server: Apart, seeds: range) -> Row:
    began = time.monotonic()
    with ThreadPoolExecutor(THREADS) as threads:
        volley = fire_many(server.port, threads, seeds, set())
    wait_until(lambda: server.is_idle)
    restarts = sum(worker["restarts"] for worker in server.get("/stats")["workers"])
    wrong = [*volley.wrong, *[f"{restarts} restarts of the engine"] * bool(restarts)]
    part = f"http, requests from seeds ({volley.brought} brought their own canary)"
    return row(part, volley.sent, wrong, began=began)


def _refusals(server: Apart) -> Row:
    began = time.monotonic()
    outcome = try_what_is_refused(server.port)
    return row_of("http, foreign names, large bodies, slow senders", outcome, began=began)
