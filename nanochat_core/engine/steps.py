"""The runner's passes of a step: prefill, the first sampled token, decode, and their results.

A sampled token is appended to its sequence's answer and passed to the request's sink. A tool call
stops the slot; the tool's result is passed on at once, and prefilled like a piece of a prompt.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanochat_core.engine.kv_cache.prefix_cache import extend_keys, find_prefix
from nanochat_core.engine.requests import ENGINE_FAILED, LogProbs, TokenEvent
from nanochat_core.engine.runner import Chunk, DecodeOutput, Pending
from nanochat_core.engine.sequences import Phase, TokenSequence, emit
from nanochat_core.engine.slots import Slots

_LOG = logging.getLogger(__name__)

STEP_ROWS = 32  # rows times steps of a decode call: enough to make its fixed cost small
SENDING_SECONDS = 0.001  # for a server's other threads, to send first tokens; docs/LOG.md
SMOOTHING = 0.1  # of seconds_per_step: the share of the latest


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """A decode call under way, and its sequences."""

    seqs: list[TokenSequence]
    output: Pending
    num_steps: int


class StepRunner:
    """Runs the passes over the sequences that have slots."""

    def __init__(self, slots: Slots, *, call_end: int, max_steps: int) -> None:
        """Set up an idle runner. `call_end`: the token that stops a slot until a tool has answered.
        The rest is as in `Scheduler`."""
        self.slots = slots
        self.runner = slots.runner
        self.counts = slots.counts
        self.slice_seconds: float | None = None  # limit of a decode call, about
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
        return [seq for seq in self.slots.running if seq.phase is phase]

    def prefill(self) -> list[TokenSequence]:
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
        for chunk, seq in zip(chunks, readers, strict=True):
            seq.read += len(chunk.tokens)
            # Before `trim`, which may release the pages: with a key they stay cached.
            self.slots.name(seq, seq.read)
            seq.held.trim(seq.read)
            if chunk.wants_logits:
                seq.phase, seq.logits = Phase.SAMPLE, logits[len(done) : len(done) + 1]
                done.append(seq)
        return done

    def _plan_chunks(self) -> tuple[list[Chunk], list[TokenSequence]]:
        chunks: list[Chunk] = []
        readers: list[TokenSequence] = []
        budget = self.slots.prefill_tokens
        coming: set[bytes] = set()  # keys of pages that this pass fills
        waiting = sorted(self._in(Phase.PREFILL), key=lambda seq: seq.order)
        for seq in waiting:
            # An older sequence's `grow` in this loop may have preempted it.
            if seq.phase is not Phase.PREFILL or budget <= 0:
                continue
            if not seq.read and not self._find_prefix(seq, coming):
                continue
            start = seq.read
            # Half of what is left, in order of age: the oldest gets most, but a long prompt does
            # not keep the others from starting.
            share = budget if seq is waiting[-1] else max(budget // 2, self._size)
            stop = min(len(seq.tokens), start + min(share, budget))
            if not self.slots.grow(seq, stop):
                continue
            coming.update(seq.keys[start // self._size : stop // self._size])
            chunks.append(
                Chunk(
                    slot=seq.slot,
                    start=start,
                    prev_token=seq.tokens[start - 1] if start else -1,
                    tokens=seq.tokens[start:stop],
                    wants_logits=stop == len(seq.tokens),
                )
            )
            readers.append(seq)
            budget -= stop - start
        return chunks, readers

    def _find_prefix(self, seq: TokenSequence, coming: set[bytes]) -> bool:
        """Adopt cached pages of the prompt's beginning. Returns False if the next page is being
        filled by another sequence in this pass: then it waits and finds that page later."""
        # At least one token must be read: the pages hold no logits.
        known = (len(seq.tokens) - 1) // self._size
        salt = seq.handle.request.cache_salt
        extend_keys(seq.keys, seq.tokens, known, self._size, salt=salt)
        found = find_prefix(self.slots.groups, seq.keys[:known], self._size)
        num_pages = len(found[0]) if found else 0
        if num_pages < known and seq.keys[num_pages] in coming:
            return False
        if found:
            seq.held.adopt(found)
            seq.read = num_pages * self._size
            self.counts.prefix_tokens += seq.read
        return True

    # ---- sampling and decoding

    def sample_first(self) -> None:
        """Sample the first token of sequences whose prefill is complete."""
        seqs = self._in(Phase.SAMPLE)
        if not seqs:
            return
        lengths = [len(seq.tokens) for seq in seqs]
        prev_tokens = [seq.tokens[-1] for seq in seqs]
        rows = [seq.logits for seq in seqs if seq.logits is not None]
        try:
            output = self.runner.sample_first(
                [seq.slot for seq in seqs],
                rows[0] if len(rows) == 1 else torch.cat(rows),
                lengths,
                prev_tokens,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, other sequences can continue
            self._fail(seqs, error)
            return
        # Before `_take`: it may send a sequence back to PREFILL, for a tool's result.
        for seq in seqs:
            seq.phase, seq.logits = Phase.DECODE, None
        self._take(seqs, output)
        # With a limit there are clients who wait, and the next pass would take every core.
        if self.slice_seconds is not None and not self.runner.is_asynchronous:
            time.sleep(SENDING_SECONDS)

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

    def drop(self) -> None:
        """Drop the decode call under way, without its results."""
        self._under_way = None

    def _launch(self) -> _Launched | None:
        # The call under way has not been read: the host's copy of its sequences lags by `ahead`.
        under_way = self._under_way
        later = set(under_way.seqs) if under_way is not None else set[TokenSequence]()
        ahead = under_way.num_steps if under_way is not None else 0
        num_steps = self._num_steps(ahead)
        short: list[tuple[TokenSequence, int]] = []
        batch: list[TokenSequence] = []
        for seq in self._in(Phase.DECODE):
            read, total = len(seq.tokens) - 1, seq.handle.total
            if read >= seq.held.trim_at:
                seq.held.trim(read)
            start = read + ahead if seq in later else read
            if start + 1 >= total:
                continue  # the call under way brings it to its limit
            batch.append(seq)
            upto = min(start + num_steps, total - 1)  # the last token is never read: no page
            if upto > seq.held.capacity:
                short.append((seq, upto))
        # The oldest first, so that it is the newest that are preempted.
        for seq, upto in sorted(short, key=lambda pair: pair[0].order):
            if seq.phase is Phase.DECODE:  # else it was preempted in this loop
                self.slots.grow(seq, upto)
        batch = [seq for seq in batch if seq.phase is Phase.DECODE]
        if not batch:
            return None
        try:
            pending = self.runner.decode(
                [seq.slot for seq in batch],
                [seq.handle.total for seq in batch],
                num_steps,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, other sequences can continue
            self._fail(batch, error)
            return None
        return _Launched(seqs=batch, output=pending, num_steps=num_steps)

    def _num_steps(self, ahead: int) -> int:
        decoding = self._in(Phase.DECODE)
        if len(decoding) < len(self.slots.running) or not decoding:
            return 1  # a sequence waits for a prefill, or for its first token
        # As many steps as the longest answer can take; sequences that end earlier stop themselves.
        left = max(seq.handle.total - len(seq.tokens) for seq in decoding) - ahead
        steps = min(self._max_steps, STEP_ROWS // len(decoding), left)
        if self.slice_seconds is not None and self.seconds_per_step:
            steps = min(steps, int(self.slice_seconds / self.seconds_per_step))
        return max(1, steps)

    def _finish(self, launched: _Launched) -> None:
        # A sequence that was preempted since the launch samples the same tokens again after its
        # prefill: random numbers depend on seed, sample and position only.
        current = [s if s.phase is Phase.DECODE else None for s in launched.seqs]
        try:
            output = launched.output()
        except Exception as error:  # noqa: BLE001 - whatever it is, other sequences can continue
            self._fail([seq for seq in current if seq is not None], error)
            return
        self._take(current, output)

    # ---- results

    def _take(self, seqs: Sequence[TokenSequence | None], output: DecodeOutput) -> None:
        """Write sampled tokens into the answers; None stands for a sequence that left."""
        log_probs = output.log_probs
        for i, seq in enumerate(seqs):
            if seq is None:
                continue
            for step, column in enumerate(output.tokens):
                # Stopped, or cancelled by its client at the token before.
                if column[i] < 0 or seq.handle.is_cancelled:
                    break
                if not self._write(seq, column[i], log_probs[step][i] if log_probs else None):
                    break

    def _write(self, seq: TokenSequence, token: int, log_probs: LogProbs | None) -> bool:
        """Append one sampled token. Returns whether the slot continues with the next one."""
        answer, handle = seq.answer, seq.handle
        answer.take(token)
        # The ending token is never read, and so takes no position.
        if not answer.finished:
            seq.tokens.append(token)
        emit(
            handle,
            TokenEvent(sample=seq.index, token=token, sampled=True, log_probs=log_probs),
        )
        if answer.finished:
            self.slots.end(seq, "stop")
            return False
        if answer.is_over:
            self.slots.end(seq, "length")
            return False
        if token != self._call_end:
            return True
        self._write_result(seq)
        return False

    def _write_result(self, seq: TokenSequence) -> None:
        """Append a tool's result, if it has one; it is prefilled together with the call's end."""
        answer = seq.answer
        # The slot stopped on the call's last token before reading it.
        seq.read = len(seq.tokens) - 1
        seq.phase = Phase.PREFILL
        forced: list[int] = []
        while answer.is_forced:
            answer.take(-1)
            forced.append(answer.last)
        seq.tokens += forced
        for token in forced:
            emit(
                seq.handle,
                TokenEvent(sample=seq.index, token=token, sampled=False, log_probs=None),
            )
        if answer.is_over:
            self.slots.end(seq, "length")

    def _fail(self, seqs: Sequence[TokenSequence], error: Exception) -> None:
        _LOG.error("the runner failed with %d samples", len(seqs), exc_info=error)
        for seq in seqs:
            self.slots.end(seq, "failed", ENGINE_FAILED, error)
