"""Read nanochat's `tokenizer.pkl`, a pickled tiktoken Encoding, without executing anything.

A pickle is a program. This reader accepts only one that builds plain values and a single Encoding.
That name resolves to a class of ours that stores its state; every other name is refused before it
is looked up.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import tiktoken

from nanochat_core.errors import ModelError, reason_of
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from nanochat_core.tokenizer.patterns import KNOWN_PATTERNS
from tasks.user_files import FileFault, check_lfs

MAX_BYTES = 64 * 2**20  # of a file; nanochat's of 65,536 tokens has less than one
# All instructions that a pickled Encoding needs: plain values, tables, and one object.
_INSTRUCTIONS = frozenset(
    (
        *("PROTO", "FRAME", "GLOBAL", "STACK_GLOBAL", "EMPTY_TUPLE", "NEWOBJ", "BUILD", "STOP"),
        *("EMPTY_DICT", "MARK", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "BINUNICODE"),
        *("SHORT_BINBYTES", "BINBYTES", "BININT", "BININT1", "BININT2"),
        *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    )
)
_STATE = {"name", "pat_str", "mergeable_ranks", "special_tokens"}


class _Encoding:
    """A stand-in for tiktoken's Encoding that stores the pickled state."""

    def __init__(self) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return `_Encoding` for tiktoken's Encoding; refuse any other name."""
        if (module_name, global_name) == ("tiktoken.core", "Encoding"):
            return _Encoding
        raise _Refused(f"it asks for {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to objects outside the file: a tokenizer has none."""
        raise _Refused("it refers to something outside the file")


class _Refused(Exception):
    pass


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer that nanochat saved at `path`.

    Raises ModelError unless the file holds an Encoding alone, and that has nanochat's structure
    (bytes and merges from id 0 on, then the nine special tokens).
    """
    state = _read_state(path)
    tables = state["mergeable_ranks"], state["special_tokens"], state["pat_str"]
    return make_tokenizer(path, *tables)


def write_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write the pickle that nanochat reads. The same tokenizer gives the same bytes."""
    encoding = tiktoken.Encoding(
        name="rustbpe",  # as nanochat names it
        pat_str=tokenizer.pattern,
        mergeable_ranks=tokenizer.ranks,
        special_tokens={name: tokenizer.special(name) for name in SPECIAL_TOKENS},
    )
    path.write_bytes(pickle.dumps(encoding, protocol=4))


def _read_state(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _Refused(f"it is larger than {MAX_BYTES} bytes")
        check_lfs(path)
        data = path.read_bytes()
        # Before unpickling: some instructions allocate memory or call code by themselves.
        _check_program(data)
        found = _Reader(io.BytesIO(data)).load()
        state = found.state if isinstance(found, _Encoding) else None
        if not isinstance(state, dict) or set(state) != _STATE:
            raise _Refused("it holds something else")
    except OSError as error:
        reason = reason_of(error)
        raise ModelError(f"{path} cannot be read: {reason}") from error
    except _Refused as error:
        raise ModelError(
            f"{path} is not a pickled tokenizer: {error}",
            hint="nothing of it was executed; take the tokenizer.pkl that nanochat wrote",
        ) from None
    except FileFault as error:
        raise ModelError(str(error), hint=error.hint) from error
    # A damaged pickle can raise any exception type.
    except Exception as error:
        raise ModelError(
            f"{path} is not a pickled tokenizer: {type(error).__name__}: {error}",
            hint="the file is damaged; take the tokenizer.pkl that nanochat wrote",
        ) from error
    return state


def _check_program(data: bytes) -> None:
    """Raise _Refused for an instruction that no tokenizer needs, or too large a memo index."""
    # The unpickler allocates its memo up to the largest index, so a short pickle can claim 10^9.
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _INSTRUCTIONS:
            raise _Refused(f"it holds the instruction {opcode.name}")
        if opcode.name.endswith("PUT") and not 0 <= int(argument or 0) < len(data):
            raise _Refused(f"it counts its values from {argument}")


def make_tokenizer(path: Path, ranks: Any, special: object, pattern: Any) -> Tokenizer:
    """Return the tokenizer of these tables, read from `path`.

    Raises ModelError unless they are those of a tokenizer that nanochat or this package trained.
    """
    fault = None
    if not isinstance(ranks, dict) or not all(
        type(token) is bytes and type(rank) is int for token, rank in ranks.items()
    ):
        fault = "its ranks are not bytes and numbers"
    elif sorted(ranks.values()) != list(range(len(ranks))):
        fault = f"its {len(ranks)} ranks are not 0 to {len(ranks) - 1}"
    elif missing := sum(bytes([value]) not in ranks for value in range(256)):
        fault = f"{missing} of the 256 bytes have no token"
    elif special != {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}:
        fault = "its special tokens are not nanochat's nine, in their order, after the others"
    elif pattern not in [*KNOWN_PATTERNS]:  # a list: a stranger's value may have no hash
        fault = "it splits text by another pattern than nanochat's"
    if fault:
        raise ModelError(
            f"the tokenizer in {path} cannot be used: {fault}",
            hint="only tokenizers that nanochat or nanochat-flows trained can be read",
        )
    return Tokenizer(ranks, pattern=pattern)
