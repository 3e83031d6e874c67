"""Ownership of slots and pages: admission, preemption and release of sequences.

A sequence gets a slot by `begin` (its tokens have to be prefilled) or `fork` (another sequence did
that). It loses it by `end`, or by `preempt` to free pages for an older one: then its text waits and
is prefilled again.
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
    """A runner's slots and pages, and the sequences that hold them."""

    def __init__(
        self,
        runner: Runner,
        *,
        context: int,
        prefill_tokens: int,
        max_steps: int,
        left: Callable[[TokenSequence], None],
    ) -> None:
        """Set all slots free. `left` is called with a sequence that ended, or was preempted and
        waits again. The rest is as in `Scheduler`."""
        self.runner = runner
        self.counts = Counts()
        self.running: list[TokenSequence] = []  # that have a slot
        self.stems: list[RequestHandle] = []  # that have a shared prefix
        self._vacant()
        self._left = left
        self._size = runner.page_size
        # Positions beyond the tokens read that need pages: an asynchronous runner has two decode
        # calls in flight.
        self._ahead = max(self._size, 2 * max_steps)
        # A short window's pages bound a prefill. n tokens and the window before them touch up to
        # (window + n - 1) // size + 2 pages, and num_pages - 1 can be held: hence the 2.
        short = [group for group in self.groups if group.window < context]
        longest = [(group.num_pages - 2) * self._size - group.window for group in short]
        self.prefill_tokens = max(1, min([prefill_tokens, *longest]))

    def _vacant(self) -> None:
        self.groups = [Pages(group) for group in self.runner.groups]
        # Reversed, so that `pop` gives the lowest slot first.
        self.free = list(range(self.runner.num_slots - 1, -1, -1))

    def fits(self, length: int) -> bool:
        """Return whether a sequence of `length` tokens fits into the pages if it runs alone."""
        return all(
            most_pages(length, group.window, self._size, ahead=self._ahead) <= group.num_pages
            for group in self.groups
        )

    def make_room(self, sample: TokenSequence) -> bool:
        """Return whether a slot is free, and pages for the sequence's prefill beside one more page
        for every running sequence. May drop shared prefixes if nothing runs."""
        if not self.free:
            return False
        # A fork shares the full pages of the prefix and copies at most the last one.
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
        # Nothing runs, so no sequence will free pages: without this none would ever begin.
        for ticket in list(self.stems):
            self.drop_stem(ticket)
        return True

    def begin(self, sample: TokenSequence) -> None:
        """Give the sequence a slot; its tokens have to be prefilled."""
        slot = self._start(sample)
        sample.tables = Tables(self.groups, self.runner, slot=slot)
        sample.phase, sample.read = Phase.READING, 0
        self.counts.prompt_tokens += len(sample.tokens)
        # A preempted sequence with tokens in its answer has been counted before.
        sample.ticket.num_to_begin -= sample.is_fresh

    def fork(self, sample: TokenSequence, stem: SharedPrefix) -> None:
        """Give the sequence a slot and the prefilled prompt; it can sample its first token."""
        slot = self._start(sample)
        sample.tables = stem.tables.fork(len(sample.tokens), slot=slot)
        sample.phase, sample.read, sample.logits = Phase.DRAWING, len(sample.tokens), stem.logits
        sample.keys = list(stem.keys)
        self.counts.prompt_tokens += len(sample.tokens)
        self.counts.prefix_tokens += len(sample.tokens)
        sample.ticket.num_to_begin -= 1

    def make_stem(self, leader: TokenSequence) -> None:
        """Hold the prompt that the leader has prefilled for the request's other samples."""
        assert leader.logits is not None
        tables = leader.held.fork(len(leader.tokens), slot=None)
        # A copy: the leader's is a view of the logits of all that were prefilled with it.
        logits = leader.logits.clone()
        leader.ticket.stem = SharedPrefix(tables=tables, logits=logits, keys=list(leader.keys))
        self.stems.append(leader.ticket)

    def drop_stem(self, ticket: RequestHandle) -> None:
        """Release a request's shared prefix: no sample needs it, or others need its pages."""
        if ticket.stem is not None:
            ticket.stem.tables.drop()
            ticket.stem = None
            self.stems.remove(ticket)

    def leave(self, sample: TokenSequence) -> None:
        """Take slot and pages back. Full pages stay in the prefix cache."""
        slot = sample.slot
        # While decoding, the last token is sampled but not read: its keys are in no page.
        read = len(sample.tokens) - 1 if sample.phase is Phase.DECODING else sample.read
        # Before `drop`: a page that has a key then becomes cached, one without it free.
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
        """End the sequence and notify its client. Does nothing if it has ended."""
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
        """Empty the prefix cache, for example because the weights changed. No sequence may have a
        slot."""
        for ticket in list(self.stems):
            self.drop_stem(ticket)
        for group in self.groups:
            group.forget()

    def preempt(self, sample: TokenSequence) -> None:
        """Take the sequence's slot and pages; it waits and is prefilled again later."""
        self.leave(sample)
        sample.phase = Phase.WAITING
        self.counts.preemptions += 1
        sample.ticket.num_to_begin += sample.is_fresh
        self._left(sample)

    def vacate(self) -> None:
        """Preempt all running sequences."""
        for sample in list(self.running):
            self.preempt(sample)

    def abandon(self) -> None:
        """Reset slots and pages after a step that did not finish; `clear` resets the runner."""
        # Tables are forgotten and not dropped: their counts of holders may be half updated.
        for sample in self.running:
            sample.tables = None
        for ticket in self.stems:
            ticket.stem = None
        self.running.clear()
        self.stems.clear()
        self._vacant()

    def clear(self) -> None:
        """Release all free slots in the runner and clear their page tables."""
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
        # Until now it shared the prompt's list with the request's other samples.
        if sample.is_fresh:
            sample.tokens = list(sample.tokens)
        self.remember(slot, sample, sample.tokens)
        return slot

    def remember(self, slot: int, sample: TokenSequence, tokens: Sequence[int]) -> None:
        """Count tokens that were not sampled for the repetition penalty."""
        if sample.ticket.request.draw.repetition_penalty != 1.0:
            self.runner.remember(slot, tokens)

    def name(self, sample: TokenSequence, read: int) -> None:
        """Add the full pages of the first `read` tokens to the prefix cache."""
        salt = sample.ticket.request.cache_salt
        extend_keys(sample.keys, sample.tokens, read // self._size, self._size, salt=salt)
        sample.held.name(sample.keys[: read // self._size])

    def grow(self, sample: TokenSequence, upto: int) -> bool:
        """Grow the sequence to `upto` tokens, preempting newer ones if no page is free.

        Returns False if this sequence was preempted.
        """
        while not sample.held.grow(upto):
            # Shared prefixes first: they cost a prefill at most, a preemption costs an answer's.
            if self.stems:
                self.drop_stem(max(self.stems, key=lambda ticket: ticket.arrival))
                continue
            assert len(self.running) > 1, f"{upto} tokens do not fit, which was to be checked"
            newest = max(self.running, key=lambda other: other.order)
            self.preempt(newest)
            if newest is sample:
                return False
        return True
