"""Who has which slot and pages: coming and going, and making room.

A sample comes by `begin` (its tokens are to be read) or `fork` (another read them), and goes by
`end`, or by `preempt` to make room for an older one: then its text waits, and is read again.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from nanochat_core.engine.kv_cache.pages import Pages, Tables, most_pages
from nanochat_core.engine.kv_cache.prefix_cache import extend_keys
from nanochat_core.engine.requests import EndEvent
from nanochat_core.engine.runner import Runner
from nanochat_core.engine.sequences import (
    Counts,
    Phase,
    RequestHandle,
    SharedPrefix,
    TokenSequence,
    tell,
)

Reason: TypeAlias = Literal["stop", "length", "cancelled", "failed"]


class Slots:
    """Slots and pages of a runner, and who has them."""

    def __init__(
        self,
        runner: Runner,
        *,
        context: int,
        prefill_tokens: int,
        max_steps: int,
        left: Callable[[TokenSequence], None],
    ) -> None:
        """`left` is told of a sample that is over, or had to make room and waits again. The rest is
        as in `Scheduler`."""
        self.runner = runner
        self.counts = Counts()
        self.running: list[TokenSequence] = []  # that have a slot
        self.stems: list[RequestHandle] = []  # that have a stem
        self._vacant()
        self._left = left
        self._size = runner.page_size
        # How far pages are wanted beyond what is read.
        self._ahead = max(self._size, 2 * max_steps)
        # The pages of a short window bound how much can be read at a time.
        short = [group for group in self.groups if group.window < context]
        longest = [(group.num_pages - 2) * self._size - group.window for group in short]
        self.prefill_tokens = max(1, min([prefill_tokens, *longest]))

    def _vacant(self) -> None:
        self.groups = [Pages(group) for group in self.runner.groups]
        self.free = list(range(self.runner.num_slots - 1, -1, -1))

    def fits(self, length: int) -> bool:
        """Whether a sequence of so many tokens can be read when nothing else is."""
        return all(
            most_pages(length, group.window, self._size, ahead=self._ahead) <= group.num_pages
            for group in self.groups
        )

    def make_room(self, sample: TokenSequence) -> bool:
        """Whether there is a slot, and pages for what it reads and for all to go on a little."""
        if not self.free:
            return False
        forks = sample.is_fresh and sample.ticket.stem is not None
        wanted = 1 if forks else len(sample.tokens)
        if all(
            most_pages(wanted, group.window, self._size, ahead=self.prefill_tokens)
            <= group.available - len(self.running)
            for group in self.groups
        ):
            return True
        if self.running:
            return False
        for ticket in list(self.stems):  # else nobody would ever begin
            self.drop_stem(ticket)
        return True

    def begin(self, sample: TokenSequence) -> None:
        """Give it a slot; its tokens are to be read."""
        slot = self._start(sample)
        sample.tables = Tables(self.groups, self.runner, slot=slot)
        sample.phase, sample.read = Phase.READING, 0
        self.counts.prompt_tokens += len(sample.tokens)
        sample.ticket.num_to_begin -= sample.is_fresh

    def fork(self, sample: TokenSequence, stem: SharedPrefix) -> None:
        """Give it a slot and the prompt that was read already; it may draw."""
        slot = self._start(sample)
        sample.tables = stem.tables.fork(len(sample.tokens), slot=slot)
        sample.phase, sample.read, sample.logits = Phase.DRAWING, len(sample.tokens), stem.logits
        sample.keys = list(stem.keys)
        self.counts.prompt_tokens += len(sample.tokens)
        self.counts.prefix_tokens += len(sample.tokens)
        sample.ticket.num_to_begin -= 1

    def make_stem(self, leader: TokenSequence) -> None:
        """Keep the prompt that the leader has read for the others of its ticket."""
        assert leader.logits is not None
        tables = leader.held.fork(len(leader.tokens), slot=None)
        logits = leader.logits.clone()
        leader.ticket.stem = SharedPrefix(tables=tables, logits=logits, keys=list(leader.keys))
        self.stems.append(leader.ticket)

    def drop_stem(self, ticket: RequestHandle) -> None:
        """Nobody needs it any more, or others need its pages."""
        if ticket.stem is not None:
            ticket.stem.tables.drop()
            ticket.stem = None
            self.stems.remove(ticket)

    def leave(self, sample: TokenSequence) -> None:
        """Take slot and pages back, the pages to be found again by whoever begins alike."""
        slot = sample.slot
        read = len(sample.tokens) - 1 if sample.phase is Phase.DECODING else sample.read
        self.name(sample, read)
        self.runner.release(slot)
        sample.held.drop()
        sample.tables = None
        self.free.append(slot)
        self.running.remove(sample)
        sample.read, sample.logits = 0, None

    def end(
        self, sample: TokenSequence, reason: Reason, error: str = "", cause: Exception | None = None
    ) -> None:
        """It is over, and whoever asked is told."""
        if sample.phase is Phase.OVER:
            return
        if sample.tables is not None:
            self.leave(sample)
        sample.phase = Phase.OVER
        if reason == "failed":
            self.counts.failures += 1
        self.counts.in_flight -= 1
        self._left(sample)
        end = EndEvent(sample=sample.index, reason=reason, error=error, cause=cause)
        tell(sample.ticket, end)

    def forget(self) -> None:
        """No page is found again: what they hold is of other weights, say. Nobody has a slot."""
        for ticket in list(self.stems):
            self.drop_stem(ticket)
        for group in self.groups:
            group.forget()

    def preempt(self, sample: TokenSequence) -> None:
        """It makes room, and is read again later."""
        self.leave(sample)
        sample.phase = Phase.WAITING
        self.counts.preemptions += 1
        sample.ticket.num_to_begin += sample.is_fresh
        self._left(sample)

    def vacate(self) -> None:
        """All make room."""
        for sample in list(self.running):
            self.preempt(sample)

    def abandon(self) -> None:
        """Nobody has anything, whatever was being done. The runner is told by `clear`."""
        for sample in self.running:
            sample.tables = None
        for ticket in self.stems:
            ticket.stem = None
        self.running.clear()
        self.stems.clear()
        self._vacant()

    def clear(self) -> None:
        """Tell the runner that all slots are free."""
        for slot in self.free:
            self.runner.release(slot)
            self.runner.clear_table(slot)

    def _start(self, sample: TokenSequence) -> int:
        slot, request = self.free.pop(), sample.ticket.request
        self.runner.start(
            slot,
            draw=request.draw,
            seed=request.seed,
            sample=sample.index,
            num_log_probs=request.num_log_probs,
        )
        self.running.append(sample)
        if sample.is_fresh:
            sample.tokens = list(sample.tokens)
        self.remember(slot, sample, sample.tokens)
        return slot

    def remember(self, slot: int, sample: TokenSequence, tokens: Sequence[int]) -> None:
        """These tokens were not drawn, and count for the repetition penalty."""
        if sample.ticket.request.draw.repetition_penalty != 1.0:
            self.runner.remember(slot, tokens)

    def name(self, sample: TokenSequence, read: int) -> None:
        """Let the full pages of what it has read be found by others."""
        salt = sample.ticket.request.cache_salt
        extend_keys(sample.keys, sample.tokens, read // self._size, self._size, salt=salt)
        sample.held.name(sample.keys[: read // self._size])

    def grow(self, sample: TokenSequence, upto: int) -> bool:
        """Get it pages up to there, from newer samples if need be; False: it had to go itself."""
        while not sample.held.grow(upto):
            if self.stems:
                self.drop_stem(max(self.stems, key=lambda ticket: ticket.arrival))
                continue
            assert len(self.running) > 1, f"{upto} tokens do not fit, which was to be checked"
            newest = max(self.running, key=lambda other: other.order)
            self.preempt(newest)
            if newest is sample:
                return False
        return True
