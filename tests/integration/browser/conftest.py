"""Fixtures of tests.support.browser.fixtures."""

from tests.support.browser.fixtures import (
    browser,
    chromium,
    complaints,
    open_file,
    open_page,
    page,
    running,
    server,
    started,
)

__all__ = [
    "browser",
    "chromium",
    "complaints",
    "open_file",
    "open_page",
    "page",
    "running",
    "server",
    "started",
]
