import random
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.data.conversations import chat_rows
from nanochat_core.data.conversations.chat_rows import (
    ChatRows,
    assign_rows,
    conversation_rows,
    make_piece,
    write_rows,
)
from nanochat_core.data.conversations.examples import open_task as open_examples
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from tasks.kinds.files import open_task
from tasks.mixtures.mixture import mixture
from tests.support.nanochat_core.data.fixtures import refused
from tests.support.tasks.example_files import write_examples

BOS = 0


def conversations(lengths, seed=0):
    """(ids, mask) of each length."""
    rng = random.Random(seed)
    return [
        ([BOS, *(rng.randint(1, 999) for _ in range(n - 1))], [0, *rng.choices((0, 1), k=n - 1)])
        for n in lengths
    ]


def pack(rendered, *, row_len, pieces=1):
    """(tokens, mask) of the rows of what was rendered, in so many pieces."""
    with tempfile.TemporaryDirectory() as folder:
        size = -(-len(rendered) // pieces)
        made = [
            make_piece(rendered[i : i + size], dtype="uint16")
            for i in range(0, len(rendered), size)
        ]
        write_rows(made, Path(folder) / "rows", row_len=row_len)
        rows = ChatRows.open(Path(folder) / "rows")
        assert rows.tokens.dtype == np.uint16
        return rows.take(np.arange(len(rows.tokens)))


def rows_in_memory(rendered, *, row_len):
    """The same rows by the shortest way: everything in memory."""
    rows = assign_rows([len(ids) for ids, _ in rendered], row_len=row_len)
    tokens = np.full((len(rows), row_len), rendered[0][0][0])
    mask = np.zeros((len(rows), row_len), dtype=np.uint8)
    for row, members in enumerate(rows):
        for part, array in enumerate((tokens, mask)):
            laid = [value for member in members for value in rendered[member][part]]
            array[row, : len(laid)] = laid
    return tokens, mask


def reference(lengths, row_len):
    """Best fit by looking at everything, as the definition reads."""
    left, rows = dict(enumerate(lengths)), []
    while left:
        row, space = [], row_len
        while fitting := [i for i in left if left[i] <= space]:
            best = min(fitting, key=lambda i: (-left[i], i))
            row.append(best)
            space -= left.pop(best)
        rows.append(row)
    return rows


@settings(deadline=None)
@given(st.lists(st.integers(2, 24), min_size=1, max_size=60), st.integers(1, 5))
def test_every_conversation_is_whole_in_its_row(lengths, pieces):
    rendered = conversations([24, *lengths])
    rendered[0][1][1] = 1
    packed = pack(rendered, row_len=24, pieces=pieces)
    assert all(array.shape == (len(packed[0]), 24) for array in packed)
    for array, expected in zip(packed, rows_in_memory(rendered, row_len=24), strict=True):
        assert array.tolist() == expected.tolist()


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), max_size=40))
def test_rows_are_filled_by_best_fit(lengths):
    assert assign_rows(lengths, row_len=30) == reference(lengths, 30)


def test_ids_of_four_bytes_are_read_back_and_padding_is_bos_without_loss(tmp_path):
    write_rows([make_piece([([7, 2**20], [0, 1])], dtype="uint32")], tmp_path / "rows", row_len=3)
    tokens, mask = ChatRows.open(tmp_path / "rows").take(np.array([0]))
    assert tokens.dtype == np.uint32
    assert (tokens.tolist(), mask.tolist()) == ([[7, 2**20, 7]], [[0, 1, 0]])


def test_a_conversation_longer_than_a_row_is_a_bug_of_the_caller(tmp_path):
    piece = make_piece([([BOS] * 9, [1] * 9)], dtype="uint16")
    with pytest.raises(AssertionError, match="9 tokens do not fit a row of 8"):
        write_rows([piece], tmp_path / "rows", row_len=8)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def talk(tmp_path):
    """A mixture in files, in which each conversation comes twice."""
    rng = random.Random(4)
    words = [f"word{i}" for i in range(40)]

    def turn(role):
        return {"role": role, "content": " ".join(rng.choices(words, k=rng.randint(1, 30)))}

    (tmp_path / "talk").mkdir()
    write_examples(
        tmp_path / "talk" / "train.jsonl",
        ({"messages": [turn("user"), turn("assistant")]} for _ in range(60)),
    )
    return mixture([(open_task("talk", tmp_path, "train"), 2)], seed=5)


def test_files_are_packed_like_what_they_hold(talk, tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_rows, "_PIECE", 17)
    rows = conversation_rows(talk, tokenizer_dir, tmp_path / "rows", row_len=101, processes=1)
    tokenizer = Tokenizer.load(tokenizer_dir)
    rendered = [render_conversation(tokenizer, c, max_tokens=101) for c in talk]
    expected = rows_in_memory(rendered, row_len=101)
    some = np.array([3, 0, len(rows.tokens) - 1])
    for array, wanted in zip(rows.take(some), expected, strict=True):
        assert array.tolist() == wanted[some].tolist()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows", "talk", "tokenizer"]


def test_ranks_that_do_not_write_wait_for_the_one_that_does(talk, tokenizer_dir, tmp_path):
    directory = tmp_path / "rows"
    directory.mkdir()
    (directory / "tokens.npy").write_text("of an earlier attempt, damaged since")
    barrier = threading.Barrier(3)
    found = {}

    def rank(number):
        found[number] = conversation_rows(
            talk,
            tokenizer_dir,
            directory,
            row_len=64,
            writes=number == 0,
            barrier=lambda: barrier.wait(120),
        )

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(120)
    assert [found[number].tokens.tolist() for number in range(3)] == [found[0].tokens.tolist()] * 3


def test_nodes_that_share_a_disk_write_the_same_rows_and_the_first_stay(tmp_path):
    piece = make_piece(conversations([5, 9, 7]), dtype="uint16")
    write_rows([piece], tmp_path / "rows", row_len=16)
    first = (tmp_path / "rows" / "tokens.npy").stat().st_ino
    write_rows([piece], tmp_path / "rows", row_len=16)
    assert (tmp_path / "rows" / "tokens.npy").stat().st_ino == first
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_rows_of_an_earlier_attempt_are_not_rendered_again(
    talk, tokenizer_dir, tmp_path, monkeypatch
):
    renders = Mock(wraps=render_conversation)
    monkeypatch.setattr(chat_rows, "render_conversation", renders)
    first = conversation_rows(talk, tokenizer_dir, tmp_path / "rows", row_len=64)
    tokens = (tmp_path / "rows" / "tokens.npy").read_bytes()
    assert renders.call_count == len(talk)
    again = conversation_rows(talk, tokenizer_dir, tmp_path / "rows", row_len=64)
    assert renders.call_count == len(talk)
    assert again.tokens.tolist() == first.tokens.tolist()
    for damage in (tokens[:-1], b"", b"no array"):
        (tmp_path / "rows" / "tokens.npy").write_bytes(damage)
        renders.reset_mock()
        conversation_rows(talk, tokenizer_dir, tmp_path / "rows", row_len=64)
        assert renders.call_count == len(talk)
        assert (tmp_path / "rows" / "tokens.npy").read_bytes() == tokens
    other = conversation_rows(talk, tokenizer_dir, tmp_path / "rows", row_len=63)
    assert other.tokens.shape[1] == 63
    (tmp_path / "rows" / "mask_bits.npy").unlink()
    assert ChatRows.find(tmp_path / "rows", row_len=63) is None


@pytest.mark.parametrize(("seconds", "counts"), [(0.0, (50, 100, 120)), (5.0, ())])
def test_packing_reports_now_and_then_how_many_conversations_are_packed(
    talk, tokenizer_dir, tmp_path, monkeypatch, seconds, counts
):
    monkeypatch.setattr(chat_rows, "_PIECE", 50)
    monkeypatch.setattr(chat_rows, "_SECONDS_BETWEEN_LINES", seconds)
    log = []
    for _ in range(2):  # the second time there is nothing to pack
        conversation_rows(talk, tokenizer_dir, tmp_path / "rows", row_len=512, log=log.append)
    packed = [f"packing rows: {count} of 120 conversations" for count in counts]
    assert log == ["packing rows: 120 conversations", *packed]


def test_a_damaged_line_is_named_and_leaves_nothing(tokenizer_dir, tmp_path):
    (tmp_path / "talk").mkdir()
    line = '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}\n'
    (tmp_path / "talk" / "train.jsonl").write_text(line * 3)
    given = (open_examples("talk", tmp_path, "train").examples, tokenizer_dir, tmp_path / "rows")
    complaint = r"train\.jsonl:1: message 1 is of role 'user'"
    refused(complaint, conversation_rows, *given, row_len=64)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["talk", "tokenizer"]


def asked(question, answer="yes"):
    user = {"role": "user", "content": question}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


FULL = "no token to learn from: 3 of 3 conversations fill a row of 63 tokens before"
UNANSWERED = {"messages": [{"role": "user", "content": "Hello?"}]}


@pytest.mark.parametrize(
    ("talk", "complaint"),
    [
        *(([asked(q)] * 3, FULL) for q in ("x" * 64, "x" * 500, "x " * 60 + "\u00e9")),
        *((talk, "the mixture has no token to learn from") for talk in ([], [UNANSWERED])),
    ],
)
def test_a_mixture_without_a_token_to_learn_is_refused(talk, complaint, tokenizer_dir, tmp_path):
    given, hint = (talk, tokenizer_dir, tmp_path / "rows"), "rows.sequence_len"
    hint = hint if complaint == FULL else None
    refused(complaint, conversation_rows, *given, row_len=64, hint=hint)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"]


def test_some_prompts_that_fill_a_row_are_warned_of(tokenizer_dir, tmp_path):
    log = []
    talk = [asked("a"), asked("x" * 500), asked("a", "y" * 500)]  # the last one is cut, and learnt
    conversation_rows(talk, tokenizer_dir, tmp_path / "rows", row_len=64, log=log.append)
    _, warning = log
    assert warning.startswith("warning: 1 of 3 conversations fill a row of 63 tokens before their")
