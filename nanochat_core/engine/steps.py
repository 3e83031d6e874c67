"""The runner's passes of a step: prefill, the first sampled token, decode, and their results.

A sampled token is appended to its sequence's answer and passed to the request's sink. A tool call
parks the slot; the tool's result is passed on at once, and prefilled like a piece of a prompt.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanochat_core.engine.kv_cache.prefix_cache import extend_keys, find_prefix
from nanochat_core.engine.requests import ENGINE_FAILED, LogProbs, TokenEvent
from nanochat_core.engine.runner import Chunk, DecodeOutput, Pending
from nanochat_core.engine.sequences import Phase, TokenSequence, tell
from nanochat_core.engine.slots import Slots

_LOG = logging.getLogger(__name__)

STEP_ROWS = 32  # rows times steps of a decode call: enough to make its fixed cost small
SMOOTHING = 0.1  # of seconds_per_step: the share of the latest


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """A decode call under way, and its sequences."""

    samples: list[TokenSequence]
    pending: Pending
    num_steps: int


class StepRunner:
    """Runs the passes over the sequences that have slots."""

    def __init__(
        self, slots: Slots, *, call_end: int, max_steps: int, slice_seconds: float | None
    ) -> None:
        """Set up an idle runner. `call_end`: the token that parks a slot until a tool has answered.
        The rest is as in `Scheduler`."""
        self.slots = slots
        self.runner = slots.runner
        self.counts = slots.counts
        self.failure: Exception | None = None  # the runner's latest
        self.slice_seconds = slice_seconds
        self.seconds_per_step = 0.0  # of late
        self._call_end = call_end
        self._max_steps = max_steps
        self._size = slots.runner.page_size
        self._under_way: _Launched | None = None

    @property
    def is_idle(self) -> bool:
        """True if no sequence has a slot and no decode call is under way."""
        return not self.slots.running and self._under_way is None

    def _in(self, phase: Phase) -> list[TokenSequence]:
        return [sample for sample in self.slots.running if sample.phase is phase]

    def read(self) -> list[TokenSequence]:
        """Prefill some tokens of sequences that need it. Returns those that are now complete."""
        chunks, readers = self._plan_chunks()
        if not chunks:
            return []
        try:
            logits = self.runner.prefill(chunks)
        except Exception as error:  # noqa: BLE001 - whatever it is, other sequences can continue
            self._fail(readers, error)
            return []
        done: list[TokenSequence] = []
        for chunk, sample in zip(chunks, readers, strict=True):
            sample.read += len(chunk.tokens)
            # Before `trim`, which may release the pages: with a key they stay cached.
            self.slots.name(sample, sample.read)
            sample.held.trim(sample.read)
            if chunk.wants_logits:
                sample.phase, sample.logits = Phase.DRAWING, logits[len(done) : len(done) + 1]
                done.append(sample)
        return done

    def _plan_chunks(self) -> tuple[list[Chunk], list[TokenSequence]]:
        chunks: list[Chunk] = []
        readers: list[TokenSequence] = []
        budget = self.slots.prefill_tokens
        coming: set[bytes] = set()  # keys of pages that this pass fills
        waiting = sorted(self._in(Phase.READING), key=lambda sample: sample.order)
        for sample in waiting:
            # An older sequence's `grow` in this loop may have preempted it.
            if sample.phase is not Phase.READING or budget <= 0:
                continue
            if not sample.read and not self._find_prefix(sample, coming):
                continue
            start = sample.read
            # Half of what is left, in order of age: the oldest gets most, but a long prompt does
            # not keep the others from starting.
            share = budget if sample is waiting[-1] else max(budget // 2, self._size)
            stop = min(len(sample.tokens), start + min(share, budget))
            if not self.slots.grow(sample, stop):
                continue
            coming.update(sample.keys[start // self._size : stop // self._size])
            chunks.append(
                Chunk(
                    slot=sample.slot,
                    start=start,
                    before=sample.tokens[start - 1] if start else -1,
                    tokens=sample.tokens[start:stop],
                    wants_logits=stop == len(sample.tokens),
                )
            )
            readers.append(sample)
            budget -= stop - start
        return chunks, readers

    def _find_prefix(self, sample: TokenSequence, coming: set[bytes]) -> bool:
        """Adopt cached pages of the prompt's beginning. Returns False if the next page is being
        filled by another sequence in this pass: then it waits and finds that page later."""
        # At least one token must be read: the pages hold no logits.
        known = (len(sample.tokens) - 1) // self._size
        salt = sample.ticket.request.cache_salt
        extend_keys(sample.keys, sample.tokens, known, self._size, salt=salt)
        found = find_prefix(self.slots.groups, sample.keys[:known], self._size)
        num_pages = len(found[0]) if found else 0
        if num_pages < known and sample.keys[num_pages] in coming:
            return False
        if found:
            sample.held.adopt(found)
            sample.read = num_pages * self._size
            self.counts.prefix_tokens += sample.read
        return True

    # ---- sampling and decoding

    def draw(self) -> None:
        """Sample the first token of sequences whose prefill is complete."""
        samples = self._in(Phase.DRAWING)
        if not samples:
            return
        lengths = [len(sample.tokens) for sample in samples]
        befores = [sample.tokens[-1] for sample in samples]
        rows = [sample.logits for sample in samples if sample.logits is not None]
        try:
            columns = self.runner.draw_first(
                [sample.slot for sample in samples],
                rows[0] if len(rows) == 1 else torch.cat(rows),
                lengths,
                befores,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, other sequences can continue
            self._fail(samples, error)
            return
        # Before `_take`: it may send a sequence back to READING, for a tool's result.
        for sample in samples:
            sample.phase, sample.logits = Phase.DECODING, None
        self._take(samples, columns)

    def decode(self) -> None:
        """Launch decode steps, and process the results of finished ones."""
        started = time.perf_counter()
        launched = self._launch()
        # The device runs the new call while the host processes the results of the last one.
        if self.runner.is_asynchronous:
            launched, self._under_way = self._under_way, launched
        if launched is None:
            return
        self._finish(launched)
        seconds = (time.perf_counter() - started) / launched.num_steps
        if self.seconds_per_step:
            seconds = (1 - SMOOTHING) * self.seconds_per_step + SMOOTHING * seconds
        self.seconds_per_step = seconds

    def drain(self) -> None:
        """Wait for the decode call under way and process its results."""
        launched, self._under_way = self._under_way, None
        if launched is not None:
            self._finish(launched)

    def abandon(self) -> None:
        """Drop the decode call under way, without its results."""
        self._under_way = None

    def _launch(self) -> _Launched | None:
        # The call under way has not been read: the host's copy of its sequences lags by `ahead`.
        under_way = self._under_way
        later = set(under_way.samples) if under_way is not None else set[TokenSequence]()
        ahead = under_way.num_steps if under_way is not None else 0
        num_steps = self._num_steps(ahead)
        short: list[tuple[TokenSequence, int]] = []
        batch: list[TokenSequence] = []
        for sample in self._in(Phase.DECODING):
            read, total = len(sample.tokens) - 1, sample.ticket.total
            if read >= sample.held.trim_at:
                sample.held.trim(read)
            start = read + ahead if sample in later else read
            if start + 1 >= total:
                continue  # the call under way brings it to its limit
            batch.append(sample)
            upto = min(start + num_steps, total - 1)  # the last token is never read: no page
            if upto > sample.held.capacity:
                short.append((sample, upto))
        # The oldest first, so that it is the newest that are preempted.
        for sample, upto in sorted(short, key=lambda pair: pair[0].order):
            if sample.phase is Phase.DECODING:  # else it was preempted in this loop
                self.slots.grow(sample, upto)
        batch = [sample for sample in batch if sample.phase is Phase.DECODING]
        if not batch:
            return None
        try:
            pending = self.runner.decode(
                [sample.slot for sample in batch],
                [sample.ticket.total for sample in batch],
                num_steps,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, other sequences can continue
            self._fail(batch, error)
            return None
        return _Launched(samples=batch, pending=pending, num_steps=num_steps)

    def _num_steps(self, ahead: int) -> int:
        decoding = self._in(Phase.DECODING)
        if len(decoding) < len(self.slots.running) or not decoding:
            return 1  # a sequence waits for a prefill, or for its first token
        # As many steps as the longest answer can take; sequences that end earlier park themselves.
        left = max(sample.ticket.total - len(sample.tokens) for sample in decoding) - ahead
        steps = min(self._max_steps, STEP_ROWS // len(decoding), left)
        if self.slice_seconds is not None and self.seconds_per_step:
            steps = min(steps, int(self.slice_seconds / self.seconds_per_step))
        return max(1, steps)

    def _finish(self, launched: _Launched) -> None:
        # A sequence that was preempted since the launch samples the same tokens again after its
        # prefill: random numbers depend on seed, sample and position only.
        current = [s if s.phase is Phase.DECODING else None for s in launched.samples]
        try:
            columns = launched.pending.read()
        except Exception as error:  # noqa: BLE001 - whatever it is, other sequences can continue
            self._fail([sample for sample in current if sample is not None], error)
            return
        self.counts.steps += launched.num_steps
        self._take(current, columns)

    # ---- results

    def _take(self, samples: Sequence[TokenSequence | None], columns: DecodeOutput) -> None:
        """Write sampled tokens into the answers; None stands for a sequence that left."""
        log_probs = columns.log_probs
        for i, sample in enumerate(samples):
            if sample is None:
                continue
            for step, column in enumerate(columns.tokens):
                # Parked, or cancelled by its client at the token before.
                if column[i] < 0 or sample.ticket.is_cancelled:
                    break
                if not self._write(sample, column[i], log_probs[step][i] if log_probs else None):
                    break

    def _write(self, sample: TokenSequence, token: int, log_probs: LogProbs | None) -> bool:
        """Append one sampled token. Returns whether the slot continues with the next one."""
        answer, ticket = sample.answer, sample.ticket
        answer.take(token)
        self.counts.tokens += 1
        # The ending token is never read, and so takes no position.
        if not answer.finished:
            sample.tokens.append(token)
        tell(
            ticket,
            TokenEvent(sample=sample.index, token=token, sampled=True, log_probs=log_probs),
        )
        if answer.finished:
            self.slots.end(sample, "stop")
            return False
        if answer.is_over:
            self.slots.end(sample, "length")
            return False
        if token != self._call_end:
            return True
        self._write_result(sample)
        return False

    def _write_result(self, sample: TokenSequence) -> None:
        """Append a tool's result, if it has one; it is prefilled together with the call's end."""
        answer = sample.answer
        # The slot parked on the call's last token before reading it.
        sample.read = len(sample.tokens) - 1
        sample.phase = Phase.READING
        forced: list[int] = []
        while answer.is_forced:
            answer.take(-1)
            forced.append(answer.last)
        sample.tokens += forced
        self.slots.remember(sample.slot, sample, forced)
        for token in forced:
            self.counts.tokens += 1
            tell(
                sample.ticket,
                TokenEvent(sample=sample.index, token=token, sampled=False, log_probs=None),
            )
        if answer.is_over:
            self.slots.end(sample, "length")

    def _fail(self, samples: Sequence[TokenSequence], error: Exception) -> None:
        self.failure = error
        _LOG.error("the runner failed with %d samples", len(samples), exc_info=error)
        for sample in samples:
            self.slots.end(sample, "failed", ENGINE_FAILED, error)
