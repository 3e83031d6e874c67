"""Ownership of slots and pages: admission, preemption and release of sequences.

A sequence gets a slot by `begin` (its tokens have to be prefilled) or `fork` (another sequence did
that). It loses it by `end`, or by `preempt` to free pages for an older one: then its text waits and
is prefilled again.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

from nanochat_core.engine.kv_cache.pages import Pages, Tables, most_pages
from nanochat_core.engine.kv_cache.prefix_cache import extend_keys
from nanochat_core.engine.requests import EndEvent
from nanochat_core.engine.runner import Runner
from nanochat_core.engine.sampling import row_key
from nanochat_core.engine.sequences import (
    Counts,
    Phase,
    RequestHandle,
    SharedPrefix,
    TokenSequence,
    emit,
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
        on_leave: Callable[[TokenSequence], None],
    ) -> None:
        """Set all slots free. `on_leave` is called with a sequence that ended, or was preempted and
        waits again. The rest is as in `Scheduler`."""
        self.runner = runner
        self.counts = Counts()
        self.running: list[TokenSequence] = []  # that have a slot
        self.prefixes: list[RequestHandle] = []  # that have a shared prefix
        self._free_all()
        self._on_leave = on_leave
        self._size = runner.page_size
        # Positions beyond the tokens read that need pages: an asynchronous runner has two decode
        # calls in flight.
        self._ahead = max(self._size, 2 * max_steps)
        # A short window's pages bound a prefill. n tokens and the window before them touch up to
        # (window + n - 1) // size + 2 pages, and num_pages - 1 can be held: hence the 2.
        short = [group for group in self.groups if group.window < context]
        longest = [(group.num_pages - 2) * self._size - group.window for group in short]
        self.prefill_tokens = max(1, min([prefill_tokens, *longest]))

    def _free_all(self) -> None:
        self.groups = [Pages(group) for group in self.runner.groups]
        # Reversed, so that `pop` gives the lowest slot first.
        self.free = list(range(self.runner.num_slots - 1, -1, -1))

    def fits(self, length: int) -> bool:
        """Return whether a sequence of `length` tokens fits into the pages if it runs alone."""
        return all(
            most_pages(length, group.window, self._size, ahead=self._ahead) <= group.num_pages
            for group in self.groups
        )

    def make_room(self, seq: TokenSequence) -> bool:
        """Return whether a slot is free, and pages for the sequence's prefill besides one more page
        for every running sequence. May drop shared prefixes if nothing runs."""
        if not self.free:
            return False
        # A fork shares the full pages of the prefix and copies at most the last one.
        forks = seq.is_fresh and seq.handle.prefix is not None
        wanted = 1 if forks else len(seq.tokens)
        if all(
            most_pages(wanted, group.window, self._size, ahead=self.prefill_tokens)
            <= group.available - len(self.running)
            for group in self.groups
        ):
            return True
        if self.running:
            return False
        # Nothing runs, so no sequence will free pages: without this none would ever begin.
        for handle in list(self.prefixes):
            self.drop_prefix(handle)
        return True

    def begin(self, seq: TokenSequence) -> None:
        """Give the sequence a slot; its tokens have to be prefilled."""
        slot = self._start(seq)
        seq.tables = Tables(self.groups, self.runner, slot=slot)
        seq.phase, seq.read = Phase.PREFILL, 0
        # A preempted sequence with tokens in its answer has been counted before.
        seq.handle.num_to_begin -= seq.is_fresh

    def fork(self, seq: TokenSequence, prefix: SharedPrefix) -> None:
        """Give the sequence a slot and the prefilled prompt; it can sample its first token."""
        slot = self._start(seq)
        seq.tables = prefix.tables.fork(len(seq.tokens), slot=slot)
        seq.phase, seq.read, seq.logits = Phase.SAMPLE, len(seq.tokens), prefix.logits
        seq.keys = list(prefix.keys)
        self.counts.prefix_tokens += len(seq.tokens)
        seq.handle.num_to_begin -= 1

    def make_prefix(self, first: TokenSequence) -> None:
        """Hold the prompt that the first sample has prefilled for the others of its request."""
        assert first.logits is not None
        tables = first.held.fork(len(first.tokens), slot=None)
        # A copy: its own are a view of the logits of all that were prefilled with it.
        logits = first.logits.clone()
        first.handle.prefix = SharedPrefix(tables=tables, logits=logits, keys=list(first.keys))
        self.prefixes.append(first.handle)

    def drop_prefix(self, handle: RequestHandle) -> None:
        """Release a request's shared prefix: no sample needs it, or others need its pages."""
        if handle.prefix is not None:
            handle.prefix.tables.drop()
            handle.prefix = None
            self.prefixes.remove(handle)

    def leave(self, seq: TokenSequence) -> None:
        """Take slot and pages back. Full pages stay in the prefix cache."""
        slot = seq.slot
        # While decoding, the last token is sampled but not read: its keys are in no page.
        read = len(seq.tokens) - 1 if seq.phase is Phase.DECODE else seq.read
        # Before `drop`: a page that has a key then becomes cached, one without it free.
        self.name(seq, read)
        self.runner.release(slot)
        seq.held.drop()
        seq.tables = None
        self.free.append(slot)
        self.running.remove(seq)
        seq.read, seq.logits = 0, None

    def end(
        self, seq: TokenSequence, reason: Reason, error: str = "", cause: Exception | None = None
    ) -> None:
        """End the sequence and notify its client. Does nothing if it has ended."""
        if seq.phase is Phase.FINISHED:
            return
        if seq.tables is not None:
            self.leave(seq)
        seq.phase = Phase.FINISHED
        if reason == "failed":
            self.counts.failures += 1
        self.counts.in_flight -= 1
        self._on_leave(seq)
        end = EndEvent(sample=seq.index, reason=reason, error=error, cause=cause)
        emit(seq.handle, end)

    def forget(self) -> None:
        """Empty the prefix cache, for example because the weights changed. No sequence may have a
        slot."""
        for handle in list(self.prefixes):
            self.drop_prefix(handle)
        for group in self.groups:
            group.forget()

    def preempt(self, seq: TokenSequence) -> None:
        """Take the sequence's slot and pages; it waits and is prefilled again later."""
        self.leave(seq)
        seq.phase = Phase.WAITING
        self.counts.preemptions += 1
        seq.handle.num_to_begin += seq.is_fresh
        self._on_leave(seq)

    def reset(self) -> None:
        """Reset slots and pages after a step that did not finish; `release_all` does the runner."""
        # Tables are forgotten and not dropped: their counts of holders may be half updated.
        for seq in self.running:
            seq.tables = None
        for handle in self.prefixes:
            handle.prefix = None
        self.running.clear()
        self.prefixes.clear()
        self._free_all()

    def release_all(self) -> None:
        """Release all free slots in the runner and clear their page tables."""
        for slot in self.free:
            self.runner.release(slot)
            self.runner.clear_table(slot)

    def _start(self, seq: TokenSequence) -> int:
        slot, request = self.free.pop(), seq.handle.request
        key = row_key(request.seed, seq.index)
        self.runner.start(slot, request.params, key=key, num_log_probs=request.num_log_probs)
        self.running.append(seq)
        # Until now it shared the prompt's list with the request's other samples.
        if seq.is_fresh:
            seq.tokens = list(seq.tokens)
        return slot

    def name(self, seq: TokenSequence, read: int) -> None:
        """Add the full pages of the first `read` tokens to the prefix cache."""
        salt = seq.handle.request.cache_salt
        extend_keys(seq.keys, seq.tokens, read // self._size, self._size, salt=salt)
        seq.held.name(seq.keys[: read // self._size])

    def grow(self, seq: TokenSequence, upto: int) -> bool:
        """Grow the sequence to `upto` tokens, preempting newer ones if no page is free.

        Returns False if this sequence was preempted.
        """
        while not seq.held.grow(upto):
            # Shared prefixes first: they cost a prefill at most, a preemption costs an answer's.
            if self.prefixes:
                self.drop_prefix(max(self.prefixes, key=lambda handle: handle.arrival))
                continue
            assert len(self.running) > 1, f"{upto} tokens do not fit, which was to be checked"
            newest = max(self.running, key=lambda other: other.order)
            self.preempt(newest)
            if newest is seq:
                return False
        return True
