"""Attempts on the Prefect server that `nanochat up` starts in a scratch home.

By another user of the machine (root only can become one), with wrong passwords, without a CSRF
token, and from another origin in the Chromium that is logged in.
"""

import os
import sys
import time
from collections.abc import Callable

from tests.campaigns.security.rows import Row, row_of
from tests.support.browser.chromium import NO_CHROMIUM, find_chromium
from tests.support.infra.stack.attempts import (
    csrf_token,
    running_stack,
    try_api_as_another_user,
    try_files_as_another_user,
    try_from_a_foreign_origin,
    try_without_a_token,
    try_wrong_passwords,
)


def run() -> list[Row]:
    """Bring a stack up and try everything that this machine allows."""
    with running_stack("--pool", "cpu") as stack:
        api_url = stack.api_url
        password = stack.password
        token = csrf_token(api_url, password)
        rows = [
            attempt("wrong passwords", lambda: try_wrong_passwords(api_url, token)),
            attempt("no CSRF token", lambda: try_without_a_token(api_url, password)),
        ]
        if os.geteuid() == 0:
            rows += [
                attempt("files, another user", lambda: try_files_as_another_user(stack.home)),
                attempt("API, another user", lambda: try_api_as_another_user(api_url)),
            ]
        else:
            print("prefect: skipped, only root can become another user", file=sys.stderr)
        if find_chromium() is not None:
            rows.append(attempt("another origin", lambda: try_from_a_foreign_origin(stack)))
        else:
            print(f"prefect: skipped, {NO_CHROMIUM}", file=sys.stderr)
        return rows


def attempt(part: str, tries: Callable[[], dict[str, str]]) -> Row:
    """Return the row of some attempts, which give what got through by their names."""
    began = time.monotonic()
    return row_of(f"prefect, {part}", tries(), began=began)
