"""Who holds which page of the KV cache, and each sequence's tables.

Pages are counted, not copied: a sequence, a prompt that several samples share, and the prefix cache
may hold the same one. A page that nobody holds is free; if it has a key it is found again under
that key (see `prefix_cache`) until its memory is wanted, the longest unused first.
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
        # Held by nobody but known by a key; the longest unused first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * group.num_pages
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """How many can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """How many nobody holds and the prefix cache knows."""
        return len(self._idle)

    def take(self) -> int:
        """A page for whoever asks, with nothing of use in it. One must be available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._pages[self._keys.pop(page)]
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One holder more."""
        if not self._holders[page]:
            del self._idle[page]
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """One holder less."""
        assert self._holders[page] > 0, f"page {page} is dropped and nobody holds it"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._keys:
            self._idle[page] = None
        else:
            self._free.append(page)

    def name(self, page: int, key: bytes) -> None:
        """Let a full page be found under its key; the first of equal ones is."""
        if page not in self._keys and key not in self._pages:
            self._keys[page] = key
            self._pages[key] = page

    def find(self, key: bytes) -> int | None:
        """The page of that key."""
        return self._pages.get(key)

    def forget(self) -> None:
        """No page is found any more."""
        self._free += self._idle
        self._idle.clear()
        self._keys.clear()
        self._pages.clear()


class Tables:
    """One sequence's pages in every group, which the runner is told of when it has a slot."""

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
        """Begin with pages of the prefix cache: of each group one a logical page, or SCRATCH."""
        for i, pages in enumerate(found):
            self.firsts[i] = sum(1 for page in pages if page == SCRATCH)
            for page in pages[self.firsts[i] :]:
                self._groups[i].hold(page)
            self.pages[i] = list(pages)
            self._tell(i, self.firsts[i], pages[self.firsts[i] :])
        self.capacity = len(found[0]) * self._size
        self._plan_trim()

    def grow(self, upto: int) -> bool:
        """Have pages for all positions below `upto`; False, and nothing, if there are too few."""
        missing = -(-(upto - self.capacity) // self._size)
        if missing <= 0:
            return True
        if any(group.available < missing for group in self._groups):
            return False
        for i, group in enumerate(self._groups):
            new = [group.take() for _ in range(missing)]
            self._tell(i, len(self.pages[i]), new)
            self.pages[i] += new
        self.capacity += missing * self._size
        return True

    def trim(self, position: int) -> None:
        """Give back what no query at `position` or to the right of it sees."""
        for i, group in enumerate(self._groups):
            first = min(first_seen(position, group.window, self._size), len(self.pages[i]))
            old = self.firsts[i]
            if first > old:
                for page in self.pages[i][old:first]:
                    group.drop(page)
                self.pages[i][old:first] = [SCRATCH] * (first - old)
                self._tell(i, old, self.pages[i][old:first])
                self.firsts[i] = first
        self._plan_trim()

    def fork(self, length: int, *, slot: int | None) -> Self:
        """Another sequence's tables, with the first `length` positions of this one.

        Full pages are shared. A last page that is not full is copied when there is a slot, for
        which one page of each group must be available; without one it is shared: that is to keep
        what was read, not to go on.
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
            other._tell(i, other.firsts[i], shared[other.firsts[i] :])
        other.capacity = len(other.pages[0]) * self._size
        other._plan_trim()
        return other

    def name(self, keys: Sequence[bytes]) -> None:
        """Let the full pages, which `keys` has one for each of, be found by others."""
        for i, group in enumerate(self._groups):
            for index in range(self.firsts[i], len(keys)):
                group.name(self.pages[i][index], keys[index])

    def drop(self) -> None:
        """Give all pages back, the last first: it is the least likely to be asked for again."""
        for i, group in enumerate(self._groups):
            for page in reversed(self.pages[i][self.firsts[i] :]):
                group.drop(page)
            self.pages[i] = []
            self.firsts[i] = 0
        self.capacity = 0
        if self.slot is not None:
            self._runner.clear_table(self.slot)

    def _tell(self, group: int, first: int, pages: Sequence[int]) -> None:
        if self.slot is not None and pages:
            self._runner.set_table(group, self.slot, first, pages)

    def _plan_trim(self) -> None:
        self.trim_at = min(
            (first + 1) * self._size + group.window
            for first, group in zip(self.firsts, self._groups, strict=True)
        )


def first_seen(position: int, window: int, page_size: int) -> int:
    """The first logical page that a query at `position` sees."""
    return max(0, position - window) // page_size


def most_pages(length: int, window: int, page_size: int, *, ahead: int) -> int:
    """How many pages a sequence of `length` tokens holds at most, `ahead` of them not yet read."""
    return min(-(-length // page_size), (window + ahead) // page_size + 2)
