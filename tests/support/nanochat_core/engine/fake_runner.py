"""A runner without a model: what it samples is a hash of the history, read back through the tables.

Each position's memory holds a hash of its token and of all that its query saw, as keys and values
do. So another sequence's page, a page not yet written, one written too late, or a window that is
a token short changes what is sampled. `Case.expected` is what must come out, in a few lines.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from nanochat_core.engine.requests import LogProbs
from nanochat_core.engine.runner import Capacity, Chunk, PageGroup, Runner
from nanochat_core.tokenizer.bpe import Tokenizer

Place: TypeAlias = tuple[int, ...]  # of a number in memory


class Speaker:
    """From a hash to a token: mostly ordinary ones, ends and calls for a tool now and then."""

    def __init__(self, tokenizer: Tokenizer, *, ends: float, calls: float) -> None:
        self.size = tokenizer.vocab_size
        self._end = tokenizer.special("<|assistant_end|>")
        self._start = tokenizer.special("<|python_start|>")
        self._call_end = tokenizer.special("<|python_end|>")
        self._digits = tokenizer.encode("12345+*")
        self._ends, self._calls = ends, calls

    def say(self, value: int, token: int) -> int:
        """Return the token after `token`, of a hash."""
        share = (value % 9973) / 9973
        value //= 9973
        if share < self._ends:
            return self._end
        # Calls of one to a few digits and operators: some have a value, some have none.
        if token == self._start or token in self._digits:
            chance = 0.3 if token != self._start else 0.05
            if share > 1 - chance:
                return self._call_end
            return self._digits[value % len(self._digits)]
        if share < self._ends + self._calls:
            return self._start if value % 8 else self._call_end
        return 128 + value % 100


def mix(*values: int) -> int:
    """Return a hash of numbers, not negative."""
    return hash(values) & 0x7FFFFFFFFFFFFFFF


def read_token(
    memory: dict[Place, int],
    place_of: Callable[[int, int], Place],
    windows: Sequence[int],
    position: int,
    tokens: tuple[int, int],
) -> int:
    """Read a token, given with the one before it, into memory; return its logits as a hash.

    place_of: of a group and a position.
    """
    seen = [
        mix(
            *(
                memory.get(place_of(group, at), 0)
                for at in range(max(0, position - window), position)
            )
        )
        for group, window in enumerate(windows)
    ]
    for group, value in enumerate(seen):
        memory[place_of(group, position)] = mix(*tokens, position, value)
    return mix(*tokens, position, *seen)


class FakeRunner(Runner):
    """Its logits (n, 2) are a hash and the last token that was read."""

    def __init__(
        self,
        speaker: Speaker,
        groups: tuple[PageGroup, ...],
        *,
        page_size: int,
        num_slots: int,
        stop_tokens: frozenset[int],
        is_asynchronous: bool,
    ) -> None:
        super().__init__(
            Capacity(groups=groups, page_size=page_size, num_slots=num_slots, max_len=10**6),
            vocab_size=speaker.size,
            stop_tokens=stop_tokens,
            device=torch.device("cpu"),
        )
        self.speaker, self.is_asynchronous = speaker, is_asynchronous
        self.memory: dict[Place, int] = {}  # by group, page and place in it
        self.tables: list[list[dict[int, int]]] = [[{} for _ in groups] for _ in range(num_slots)]
        self.salt = 0  # of the weights
        self.fail_next: BaseException | None = None
        self.tokens_read: list[int] = []  # of each prefill

    def set_table(self, group: int, slot: int, first: int, pages: Sequence[int]) -> None:
        assert all(0 <= page < self.groups[group].num_pages for page in pages)
        self.tables[slot][group].update(enumerate(pages, start=first))

    def clear_table(self, slot: int) -> None:
        assert self.stopped[slot], "a slot that continues loses its pages"
        for table in self.tables[slot]:
            table.clear()

    def copy_page(self, group: int, source: int, target: int) -> None:
        assert source
        assert target
        for i in range(self.page_size):
            self.memory[group, target, i] = self.memory.get((group, source, i), 0)

    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        self._fail()
        assert len({chunk.slot for chunk in chunks}) == len(chunks) > 0
        self.tokens_read.append(sum(len(chunk.tokens) for chunk in chunks))
        found: list[list[int]] = []
        for chunk in chunks:
            assert self.stopped[chunk.slot]
            assert chunk.tokens
            value, prev_token = 0, chunk.prev_token
            for position, token in enumerate(chunk.tokens, start=chunk.start):
                value = self._read(chunk.slot, position, token, prev_token)
                prev_token = token
            if chunk.wants_logits:
                found.append([value, prev_token])
        return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)

    def refresh(self) -> None:
        """Load other weights."""
        self.salt += 1

    def _read(self, slot: int, position: int, token: int, prev_token: int) -> int:
        def place_of(group: int, at: int) -> Place:
            page = self.tables[slot][group].get(at // self.page_size, 0)
            assert page or at != position, f"position {at} is written to the scratch page"
            return group, page, at % self.page_size

        windows = [group.window for group in self.groups]
        return read_token(self.memory, place_of, windows, position, (token, prev_token))

    def _step(self, slots: list[int]) -> Tensor:
        assert len(set(slots)) == len(slots)
        found: list[list[int]] = []
        for slot in slots:
            length, token, prev_token = (
                int(column[slot]) for column in (self.length, self.token, self.prev_token)
            )
            found.append([self._read(slot, length, token, prev_token), token])
            self.length[slot], self.prev_token[slot] = length + 1, token
        return torch.tensor(found)

    def _sample(
        self,
        slots: Sequence[int],
        logits: Tensor,
        positions: Sequence[int],
        softcap: float | None = None,
    ) -> tuple[list[int], list[LogProbs | None]]:
        self._fail()
        tokens: list[int] = []
        for slot, [value, last], position in zip(slots, logits.tolist(), positions, strict=True):
            value = mix(value, self.sampler.keys[slot], position, self.salt)
            tokens.append(self.speaker.say(value, last))
        wanted = [self.sampler.num_log_probs[slot] is not None for slot in slots]
        log_probs = [
            LogProbs(chosen=-float(token), top=()) if wants else None
            for token, wants in zip(tokens, wanted, strict=True)
        ]
        return tokens, log_probs if any(wanted) else []

    def _fail(self) -> None:
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error
