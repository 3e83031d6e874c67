"""Fixtures of tests.support.browser.fixtures."""

from tests.support.browser.fixtures import *  # noqa: F403 - pytest looks for them here
