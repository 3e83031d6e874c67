"""Reference counts of the KV cache's pages, and each sequence's page tables.

Pages are shared by reference count, not copied: several sequences and a shared prompt may hold the
same one. A page without a holder is free; if it has a key it stays cached under that key (see
`prefix_cache`) until its memory is needed, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

from nanochat_core.engine.runner import PageGroup, Runner

SCRATCH = 0  # see `runner`


class Pages:
    """The pages of one group."""

    def __init__(self, group: PageGroup) -> None:
        self.window = group.window
        self.num_pages = group.num_pages - 1  # that can be held
        self._free = list(range(self.num_pages, 0, -1))
        # Cached: no holder, but a key. An ordered set, the least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * group.num_pages
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of pages that can be taken."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """Take a page for one holder, evicting a cached one if none is free. One must be
        available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._pages[self._keys.pop(page)]
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a page that is held or cached."""
        if not self._holders[page]:
            del self._idle[page]
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """Remove a holder. A page without one becomes cached if it has a key, else free."""
        assert self._holders[page] > 0, f"page {page} is dropped and has no holder"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._keys:
            self._idle[page] = None
        else:
            self._free.append(page)

    def name(self, page: int, key: bytes) -> None:
        """Make a full page findable by its key. Of pages with the same content the first is."""
        if page not in self._keys and key not in self._pages:
            self._keys[page] = key
            self._pages[key] = page

    def find(self, key: bytes) -> int | None:
        """Return the page of that key; None means that there is none."""
        return self._pages.get(key)

    def forget(self) -> None:
        """Forget all keys; cached pages become free."""
        self._free += self._idle
        self._idle.clear()
        self._keys.clear()
        self._pages.clear()


class Tables:
    """One sequence's pages in every group. While it has a slot, the runner's tables follow."""

    def __init__(self, groups: Sequence[Pages], runner: Runner, *, slot: int | None) -> None:
        self._groups = groups
        self._runner = runner
        self._size = runner.page_size
        self.slot = slot
        self.pages: list[list[int]] = [[] for _ in groups]  # SCRATCH left of `firsts`
        self.firsts = [0] * len(groups)
        self.capacity = 0  # positions below it have their pages
        self.trim_at = 0  # `trim` does nothing for a shorter sequence
        self._plan_trim()

    def adopt(self, found: Sequence[Sequence[int]]) -> None:
        """Begin with cached pages: for each group one, or SCRATCH, per logical page."""
        for i, pages in enumerate(found):
            self.firsts[i] = sum(1 for page in pages if page == SCRATCH)
            for page in pages[self.firsts[i] :]:
                self._groups[i].hold(page)
            self.pages[i] = list(pages)
            self._write_table(i, self.firsts[i], pages[self.firsts[i] :])
        self.capacity = len(found[0]) * self._size
        self._plan_trim()

    def grow(self, upto: int) -> bool:
        """Take pages for all positions below `upto`. Returns False, and takes none, if there are
        too few."""
        missing = -(-(upto - self.capacity) // self._size)
        if missing <= 0:
            return True
        # All groups are checked before a page is taken: a failed call changes nothing.
        if any(group.available < missing for group in self._groups):
            return False
        for i, group in enumerate(self._groups):
            new = [group.take() for _ in range(missing)]
            self._write_table(i, len(self.pages[i]), new)
            self.pages[i] += new
        self.capacity += missing * self._size
        return True

    def trim(self, position: int) -> None:
        """Release the pages that no query at `position` or to its right sees."""
        for i, group in enumerate(self._groups):
            first = min(first_seen(position, group.window, self._size), len(self.pages[i]))
            old = self.firsts[i]
            if first > old:
                for page in self.pages[i][old:first]:
                    group.drop(page)
                self.pages[i][old:first] = [SCRATCH] * (first - old)
                self._write_table(i, old, self.pages[i][old:first])
                self.firsts[i] = first
        self._plan_trim()

    def fork(self, length: int, *, slot: int | None) -> Self:
        """Return another sequence's tables, with the first `length` positions of this one.

        Full pages are shared. A last page that is not full is copied if there is a slot, for which
        one page of each group must be available. Without a slot it is shared: such tables only hold
        the prompt and are never written to.
        """
        other = type(self)(self._groups, self._runner, slot=slot)
        full, rest = divmod(length, self._size)
        for i, group in enumerate(self._groups):
            shared = self.pages[i][: full + (rest > 0 and slot is None)]
            for page in shared[self.firsts[i] :]:
                group.hold(page)
            if rest and slot is not None:
                own = group.take()
                self._runner.copy_page(i, self.pages[i][full], own)
                shared.append(own)
            other.pages[i] = shared
            other.firsts[i] = min(self.firsts[i], len(shared))
            other._write_table(i, other.firsts[i], shared[other.firsts[i] :])
        other.capacity = len(other.pages[0]) * self._size
        other._plan_trim()
        return other

    def name(self, keys: Sequence[bytes]) -> None:
        """Add full pages to the prefix cache; `keys` has one for each."""
        for i, group in enumerate(self._groups):
            for index in range(self.firsts[i], len(keys)):
                group.name(self.pages[i][index], keys[index])

    def drop(self) -> None:
        """Release all pages."""
        for i, group in enumerate(self._groups):
            # The last page first, so that it is evicted first: a longer prefix is less often
            # shared, and its pages are of no use without those before them.
            for page in reversed(self.pages[i][self.firsts[i] :]):
                group.drop(page)
            self.pages[i] = []
            self.firsts[i] = 0
        self.capacity = 0
        if self.slot is not None:
            self._runner.clear_table(self.slot)

    def _write_table(self, group: int, first: int, pages: Sequence[int]) -> None:
        if self.slot is not None and pages:
            self._runner.set_table(group, self.slot, first, pages)

    def _plan_trim(self) -> None:
        self.trim_at = min(
            (first + 1) * self._size + group.window
            for first, group in zip(self.firsts, self._groups, strict=True)
        )


def first_seen(position: int, window: int, page_size: int) -> int:
    """Return the first logical page that a query at `position` sees."""
    return max(0, position - window) // page_size


def most_pages(length: int, window: int, page_size: int, *, ahead: int) -> int:
    """Return the most pages that a sequence of `length` tokens holds, `ahead` of them unread."""
    # + 2: the window may begin inside one page, and what is ahead may end inside another.
    return min(-(-length // page_size), (window + ahead) // page_size + 2)
