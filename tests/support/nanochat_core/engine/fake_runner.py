"""A runner without a model: what it draws is a hash of the history, read back through the tables.

Each position's memory holds a hash of its token and of all that its query saw, as keys and values
do. So another sequence's page, a page not yet written, one written too late, or a window that is
a token short changes what is drawn. `reference_answer` is what must come out, in a few lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanochat_core.engine.requests import LogProbs, SamplingParams
from nanochat_core.engine.runner import Chunk, DecodeOutput, PageGroup, Pending
from nanochat_core.engine.sampling import row_key
from nanochat_core.engine.tools.calls import ToolTokens
from nanochat_core.tokenizer.bpe import Tokenizer

UNREAD = 0x5EED  # memory that was never written


@dataclass
class Slot:
    length: int = 0
    prev_token: int = -1
    token: int = -1
    stopped: bool = True
    key: int = 0
    penalty: bool = False
    seen: list[int] = field(default_factory=list)
    num_log_probs: int | None = None


class Speaker:
    """From a hash to a token: mostly ordinary ones, ends and calls for a tool now and then."""

    def __init__(self, tokenizer: Tokenizer, *, ends: float = 0.02, calls: float = 0.02) -> None:
        self.size = tokenizer.vocab_size
        self._end = tokenizer.special("<|assistant_end|>")
        self._start = tokenizer.special("<|python_start|>")
        self._call_end = tokenizer.special("<|python_end|>")
        self._digits = tokenizer.encode("12345+*")
        self._ends, self._calls = ends, calls

    def say(self, value: int, token: int) -> int:
        """The token after `token`, of a hash."""
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
    """A hash of numbers, not negative."""
    return hash(values) & 0x7FFFFFFFFFFFFFFF


def pages_of(windows: Sequence[int], *, num_pages: Sequence[int] | int) -> tuple[PageGroup, ...]:
    counts = [num_pages] * len(windows) if isinstance(num_pages, int) else num_pages
    return tuple(
        PageGroup(window=window, layers=(i,), num_pages=count)
        for i, (window, count) in enumerate(zip(windows, counts, strict=True))
    )


class Memory:
    """What the tables of a runner lead to, or of a reference, which has no pages."""

    def __init__(self, windows: Sequence[int]) -> None:
        self.windows = windows
        self.written: list[dict[int, int]] = [{} for _ in windows]

    def read(self, group: int, position: int) -> int:
        return self.written[group][position]

    def write(self, group: int, position: int, value: int) -> None:
        self.written[group][position] = value

    def step(self, position: int, token: int, prev_token: int) -> int:
        """Read a token; its logits, as a hash."""
        seen = [
            mix(*(self.read(group, at) for at in range(max(0, position - window), position)))
            for group, window in enumerate(self.windows)
        ]
        for group, value in enumerate(seen):
            self.write(group, position, mix(token, prev_token, position, value))
        return mix(token, prev_token, position, *seen)


class SlotMemory(Memory):
    """The memory of a slot of the fake runner."""

    def __init__(self, runner: "FakeRunner", slot: int) -> None:
        super().__init__([group.window for group in runner.groups])
        self._runner, self._slot = runner, slot

    def read(self, group: int, position: int) -> int:
        return self._runner.memory[group][self._at(group, position)]

    def write(self, group: int, position: int, value: int) -> None:
        at = self._at(group, position)
        assert at >= self._runner.page_size, f"position {position} is written to the scratch page"
        self._runner.memory[group][at] = value

    def _at(self, group: int, position: int) -> int:
        size = self._runner.page_size
        page = self._runner.tables[self._slot][group].get(position // size, 0)
        return page * size + position % size


class FakeRunner:
    def __init__(
        self,
        speaker: Speaker,
        groups: tuple[PageGroup, ...],
        *,
        page_size: int = 4,
        num_slots: int = 4,
        stop_tokens: frozenset[int],
        is_asynchronous: bool = False,
    ) -> None:
        self.speaker, self.groups, self.page_size = speaker, groups, page_size
        self.num_slots, self.vocab_size = num_slots, speaker.size
        self.is_asynchronous = is_asynchronous
        self.stop_tokens = stop_tokens
        self.memory = [[UNREAD] * (group.num_pages * page_size) for group in groups]
        self.tables: list[list[dict[int, int]]] = [[{} for _ in groups] for _ in range(num_slots)]
        self.slots = [Slot() for _ in range(num_slots)]
        self.salt = 0  # of the weights
        self.fail_next: Exception | None = None
        self.tokens_read: list[int] = []  # of each prefill
        self.num_calls = 0

    def set_table(self, group: int, slot: int, first: int, pages: Sequence[int]) -> None:
        assert all(0 <= page < self.groups[group].num_pages for page in pages)
        self.tables[slot][group].update(enumerate(pages, start=first))

    def clear_table(self, slot: int) -> None:
        assert self.slots[slot].stopped, "a slot that continues loses its pages"
        for table in self.tables[slot]:
            table.clear()

    def copy_page(self, group: int, source: int, target: int) -> None:
        assert source
        assert target
        size, memory = self.page_size, self.memory[group]
        memory[target * size : (target + 1) * size] = memory[source * size : (source + 1) * size]

    def start(
        self, slot: int, params: SamplingParams, *, key: int, num_log_probs: int | None
    ) -> None:
        assert self.slots[slot].stopped
        self.slots[slot] = Slot(
            key=key, penalty=params.repetition_penalty != 1.0, num_log_probs=num_log_probs
        )

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        self.slots[slot].seen += tokens

    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        self._fail()
        assert chunks
        assert len({chunk.slot for chunk in chunks}) == len(chunks)
        self.tokens_read.append(sum(len(chunk.tokens) for chunk in chunks))
        found: list[list[int]] = []
        for chunk in chunks:
            assert self.slots[chunk.slot].stopped
            assert chunk.tokens
            memory, prev_token, value = SlotMemory(self, chunk.slot), chunk.prev_token, 0
            for position, token in enumerate(chunk.tokens, start=chunk.start):
                value = memory.step(position, token, prev_token)
                prev_token = token
            if chunk.wants_logits:
                found.append([value])
        return torch.tensor(found, dtype=torch.int64).reshape(-1, 1)

    def sample_first(
        self,
        slots: Sequence[int],
        logits: Tensor,
        lengths: Sequence[int],
        prev_tokens: Sequence[int],
    ) -> DecodeOutput:
        self._fail()
        tokens: list[int] = []
        for slot, [value], length, prev_token in zip(
            slots, logits.tolist(), lengths, prev_tokens, strict=True
        ):
            state = self.slots[slot]
            assert state.stopped
            state.length, state.prev_token = length, prev_token
            state.token = self._say(state, value)
            state.stopped = state.token in self.stop_tokens
            tokens.append(state.token)
        return DecodeOutput(tokens=[tokens], log_probs=self._log_probs(slots, [tokens]))

    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Pending:
        self._fail()
        self.num_calls += 1
        assert slots
        assert len(set(slots)) == len(slots)
        columns: list[list[int]] = []
        for _ in range(num_steps):
            column: list[int] = []
            for slot, limit in zip(slots, limits, strict=True):
                state = self.slots[slot]
                state.stopped = state.stopped or state.length + 1 >= limit
                if state.stopped:
                    column.append(-1)
                    continue
                value = SlotMemory(self, slot).step(state.length, state.token, state.prev_token)
                state.length, state.prev_token = state.length + 1, state.token
                state.token = self._say(state, value)
                state.stopped = state.token in self.stop_tokens
                column.append(state.token)
            columns.append(column)
        output = DecodeOutput(tokens=columns, log_probs=self._log_probs(slots, columns))
        return lambda: output

    def release(self, slot: int) -> None:
        self.slots[slot].stopped = True

    def refresh(self) -> None:
        """Other weights."""
        self.salt += 1

    def _say(self, state: Slot, value: int) -> int:
        seen = mix(*sorted(set(state.seen))) if state.penalty else 0
        token = self.speaker.say(
            mix(value, state.key, state.length, self.salt, seen), state.prev_token
        )
        if state.penalty:
            state.seen.append(token)
        return token

    def _log_probs(
        self, slots: Sequence[int], columns: Sequence[Sequence[int]]
    ) -> list[list[LogProbs | None]]:
        if all(self.slots[slot].num_log_probs is None for slot in slots):
            return []
        return [
            [
                LogProbs(chosen=-float(token), top=())
                if token >= 0 and self.slots[slot].num_log_probs is not None
                else None
                for slot, token in zip(slots, column, strict=True)
            ]
            for column in columns
        ]

    def _fail(self) -> None:
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error


def reference_answer(
    speaker: Speaker,
    tools: ToolTokens,
    windows: Sequence[int],
    prompt: Sequence[int],
    *,
    limit: int,
    ends: frozenset[int],
    seed: int,
    sample: int,
    salt: int = 0,
    penalty: bool = False,
) -> tuple[list[int], list[int], bool]:
    """Tokens, mask and whether it ended by itself: one token after another, nothing shared.

    The tool's rules are written down a second time here.
    """
    memory, key = Memory(windows), row_key(seed, sample)
    tokens, mask, read, value = list(prompt), [], 0, 0
    call: list[int] | None = None
    while len(mask) < limit:
        for position in range(read, len(tokens)):
            prev_token = tokens[position - 1] if position else -1
            value = memory.step(position, tokens[position], prev_token)
        read = len(tokens)
        seen = mix(*sorted(set(tokens))) if penalty else 0
        token = speaker.say(mix(value, key, read, salt, seen), tokens[-1])
        if token in ends:
            return tokens[len(prompt) :], mask, True
        tokens.append(token)
        mask.append(1)
        if token == tools.python_start:
            call = []
        elif call is not None and token != tools.python_end:
            call.append(token)
        elif call is not None:
            result, call = simple_calculation(tools.tokenizer.decode(call)), None
            if result is not None:
                said = [tools.output_start, *tools.tokenizer.encode(result), tools.output_end]
                if len(mask) + len(said) <= limit:
                    tokens += said
                    mask += [0] * len(said)
    return tokens[len(prompt) :], mask, False


def simple_calculation(text: str) -> str | None:
    """By Python's arithmetic, of what a `Speaker` or a script writes; ** is no operator."""
    text = text.strip().replace("'aXbX'.count('X')", "(2)")
    if not text or set(text) - set("0123456789+-*/() ") or "**" in text:
        return None
    try:
        value = eval(text, {"__builtins__": {}})
    except (SyntaxError, SyntaxWarning, TypeError, ZeroDivisionError):
        return None
    return str(value) if isinstance(value, int) else f"{value:.12g}"
