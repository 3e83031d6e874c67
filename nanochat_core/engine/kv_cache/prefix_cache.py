"""Prefix cache: finds pages that hold the beginning of a prompt, for example a conversation's past.

A page's keys and values depend on its tokens and on all before them, so its cache key is a hash of
both: a chain, each made of the previous key and the page's own tokens. Only full pages have one.
The chain begins with the request's salt, so requests of different salts share no pages: the time to
a first token reveals nothing about the prompts of another salt.
"""

import hashlib
from array import array
from collections.abc import Sequence

from nanochat_core.engine.kv_cache.pages import SCRATCH, Pages, first_seen

KEY_BYTES = 16  # of blake2b, a cryptographic hash: no client can construct two texts of one key


def extend_keys(
    keys: list[bytes], tokens: Sequence[int], num_pages: int, page_size: int, *, salt: int = 0
) -> None:
    """Append the keys of the first `num_pages` pages of `tokens` that are still missing."""
    for i in range(len(keys), num_pages):
        own = array("q", tokens[i * page_size : (i + 1) * page_size]).tobytes()
        # The salt is as long as a key, so that every link hashes input of one form.
        before = keys[-1] if keys else salt.to_bytes(KEY_BYTES)
        keys.append(hashlib.blake2b(before + own, digest_size=KEY_BYTES).digest())


def find_prefix(
    groups: Sequence[Pages], keys: Sequence[bytes], page_size: int
) -> list[list[int]] | None:
    """Find the longest cached beginning: for each group one page per key, SCRATCH if not needed.

    A group of a short window needs only the pages that the next token's query sees. None means that
    no page is cached.
    """
    count = _longest_run(groups, keys)
    by_window = sorted(groups, key=lambda group: group.window)
    while count:
        missing = (_first_missing(group, keys[:count], page_size) for group in by_window)
        shorter = next((page for page in missing if page is not None), None)
        if shorter is None:
            return [_find(group, keys[:count], page_size) for group in groups]
        # Every count in between needs the missing page too, as its window begins no later. The
        # windows tried overlap by at most one page, so each is looked up about twice in all.
        count = shorter
    return None


def _longest_run(groups: Sequence[Pages], keys: Sequence[bytes]) -> int:
    """Return an upper bound of the cached beginning, by the group of the widest window."""
    widest = max(groups, key=lambda group: group.window)
    last = len(keys)
    while last and widest.find(keys[last - 1]) is None:
        last -= 1
    return last


def _first_missing(group: Pages, keys: Sequence[bytes], page_size: int) -> int | None:
    first = first_seen(len(keys) * page_size, group.window, page_size)
    return next((i for i in range(first, len(keys)) if group.find(keys[i]) is None), None)


def _find(group: Pages, keys: Sequence[bytes], page_size: int) -> list[int]:
    first = first_seen(len(keys) * page_size, group.window, page_size)
    found = (group.find(key) for key in keys[first:])
    return [*([SCRATCH] * first), *(page for page in found if page is not None)]
