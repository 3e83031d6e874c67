"""Pages that were filled before: of earlier turns of a conversation, of a shared beginning.

What a page holds depends on its tokens and on all before them, so its key is a hash of both: a
chain, each page's key made of the one before it and its own tokens. Only full pages have one.
"""

import hashlib
from array import array
from collections.abc import Sequence

from nanochat_core.engine.pages import SCRATCH, Pages, first_seen

KEY_BYTES = 16  # of blake2b: nobody finds two texts of one key


def extend_keys(keys: list[bytes], tokens: Sequence[int], num_pages: int, page_size: int) -> None:
    """Append the keys of the first `num_pages` pages of `tokens` that are still missing."""
    for i in range(len(keys), num_pages):
        own = array("q", tokens[i * page_size : (i + 1) * page_size]).tobytes()
        before = keys[-1] if keys else b""
        keys.append(hashlib.blake2b(before + own, digest_size=KEY_BYTES).digest())


def find_prefix(
    groups: Sequence[Pages], keys: Sequence[bytes], page_size: int
) -> list[list[int]] | None:
    """The longest known beginning: of each group one page a key, SCRATCH where none is needed.

    A group of a short window needs the pages that the next token's query sees, no others.
    """
    for count in range(_longest_run(groups, keys), 0, -1):
        found = [_find(group, keys[:count], page_size) for group in groups]
        if all(pages is not None for pages in found):
            return [pages for pages in found if pages is not None]
    return None


def _longest_run(groups: Sequence[Pages], keys: Sequence[bytes]) -> int:
    """No beginning longer than this is known to the group that sees the farthest."""
    widest = max(groups, key=lambda group: group.window)
    last = len(keys)
    while last and widest.find(keys[last - 1]) is None:
        last -= 1
    return last


def _find(group: Pages, keys: Sequence[bytes], page_size: int) -> list[int] | None:
    first = first_seen(len(keys) * page_size, group.window, page_size)
    pages = [SCRATCH] * first
    for key in keys[first:]:
        page = group.find(key)
        if page is None:
            return None
        pages.append(page)
    return pages
