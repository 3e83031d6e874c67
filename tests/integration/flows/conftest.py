"""Fixtures of tests.support.flows.fixtures."""

from tests.support.flows.fixtures import built, full_house, house, make_toys, store, terminal, toys

__all__ = ["built", "full_house", "house", "make_toys", "store", "terminal", "toys"]
