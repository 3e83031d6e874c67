import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.engine.requests import LogProbs
from nanochat_core.server.api.openai_choices import TEXT
from nanochat_core.server.text import (
    MarkerFilter,
    StopStrings,
    TextPiece,
    TextToken,
    answer_pieces,
)
from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER

CALL_START, CALL_END, RESULT_START, RESULT_END, ANSWER_END = (
    TOKENIZER.special(f"<|{name}|>")
    for name in ("python_start", "python_end", "output_start", "output_end", "assistant_end")
)


TOOL = [CALL_START, *b"12*3", CALL_END, RESULT_START, *b"36", RESULT_END]
TOOL_PIECES = [TextPiece(kind="tool_call", text="12*3"), TextPiece(kind="tool_result", text="36")]
LETTERS = "\u00e9\ufffd\u20ac\U0001f600"  # 2, 3, 3 and 4 bytes


def text(text, marker=None):
    return TextPiece(kind="text", text=text, marker=marker)


PIECES = {
    "letters of several tokens": (LETTERS.encode(), [*map(text, LETTERS)]),
    "half a letter before the end": ([*b"a\xe2\x82", ANSWER_END], [text("a"), text("\ufffd")]),
    "a call and its result": ([*b"a", *TOOL, *b"b"], [text("a"), *TOOL_PIECES, text("b")]),
    "a call that was cut short": ([CALL_START, *b"12*"], [TextPiece(kind="tool_call", text="12*")]),
    "a final number": ([*TOOL, *b"#### 36"], [*TOOL_PIECES, text("", "#### "), text("36")]),
}


def pieces_of(tokens):
    return list(answer_pieces(TOKENIZER, tokens))


@pytest.mark.parametrize(("tokens", "pieces"), PIECES.values(), ids=PIECES)
def test_an_answer_is_its_text_its_calls_and_its_final_number(tokens, pieces):
    assert pieces_of(tokens) == pieces


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_shown_as_python_decodes_them(data):
    pieces = pieces_of(data)
    assert all(piece.kind == "text" for piece in pieces)
    assert "".join(piece.written for piece in pieces) == data.decode("utf-8", "replace")


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_any_tokens_are_some_text(tokens):
    for piece in pieces_of(tokens):
        assert piece.text.isprintable() or piece.text
        piece.text.encode()


def filtered(*texts):
    """The pieces that are shown of texts; None is a call with its result."""
    markers = MarkerFilter()
    pieces = []
    for text in texts:
        if text is None:
            pieces += markers.take(TextPiece(kind="tool_call", text="1+1"))
            pieces += markers.take(TextPiece(kind="tool_result", text="2"))
        else:
            pieces += markers.take(TextPiece(kind="text", text=text))
    return [*pieces, *markers.end()]


def joined(pieces):
    return "".join(piece.text for piece in pieces if piece.kind == "text")


CALL = None


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ((CALL, "#### 42"), "42"),
        (("apple: a,p,p,l,e\n", CALL, "#### 2"), "apple: a,p,p,l,e\n2"),
        (("12 + 30 = ", CALL, "42\n#### 42"), "12 + 30 = 42\n42"),
        (("So there are ", CALL, "#### -1,234.5"), "So there are \n-1,234.5"),
        (("a\n\n#### 3 \nb",), "a\n\n3 \nb"),
        ((CALL, "\n#### 42"), "\n42"),
        ((CALL, CALL, "#### 2"), "2"),
        (("#### 7", CALL, "#### 8"), "7\n8"),
        # Cut short by the length limit, or where a call begins.
        ((CALL, "####"), ""),
        (("a\n#### ", CALL, "b"), "a\nb"),
        ((CALL, "#### 4"), "4"),
        # Headings, and what stands inside a line.
        (("#### Title\ntext",), "#### Title\ntext"),
        (("a\n#### 2 examples",), "a\n#### 2 examples"),
        (("#### 1. First",), "#### 1. First"),
        (("### 3",), "### 3"),
        (("##### 3",), "##### 3"),
        (("#",), "#"),
        (("it is #### 4",), "it is #### 4"),
        ((CALL, " is #### 4"), " is #### 4"),
        (("####4",), "####4"),
    ],
)
def test_the_marker_of_a_final_number_is_not_shown_however_it_comes(written, shown):
    pieces = filtered(*written)
    letters = [part for text in written for part in ([CALL] if text is CALL else text)]
    assert joined(pieces) == joined(filtered(*letters)) == shown
    texts = "".join(text for text in written if text is not CALL)
    assert "".join(piece.written for piece in pieces if piece.kind == "text") == texts


@settings(deadline=None)
@given(st.lists(st.none() | st.text("#1 -.a\n", min_size=1, max_size=8), max_size=12))
def test_no_text_is_lost_and_where_it_is_split_does_not_matter(texts):
    pieces = filtered(*texts)
    written = "".join(text for text in texts if text is not None)
    assert "".join(piece.written for piece in pieces if piece.kind == "text") == written
    letters = [part for text in texts for part in ([None] if text is None else text)]
    assert joined(pieces) == joined(filtered(*letters))


def test_text_waits_only_while_it_may_become_a_marker():
    markers = MarkerFilter()

    def take(text):
        return joined([*markers.take(TextPiece(kind="text", text=text))])

    assert [take(text) for text in ("a", "\n#", "###", " ", "4", "2", "!", " 3", "\n")] == [
        *("a", "\n", "", "", "", "", "#### 42!", " 3", "\n")
    ]


@pytest.mark.parametrize(
    ("stops", "shown"),
    [
        ([], "one two three"),
        (["two"], "one "),
        (["three", "two"], "one "),
        (["twofold", "tw"], "one "),
        (["threefold"], "one two three"),
        (["e two"], "on"),
        (["one"], ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_text_ends_before_the_first_stop_string(stops, shown, size):
    text = "one two three"
    stop = StopStrings(stops)
    parts = [stop.take(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join([*parts, stop.end()]) == shown
    assert stop.found == (shown != text)


@settings(deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_stop_string_is_ever_shown(text, stops):
    stop = StopStrings(stops)
    seen = "".join([*map(stop.take, text), stop.end()])
    assert text.startswith(seen)
    assert not any(s in seen for s in stops)
    assert stop.found or seen == text


@pytest.mark.parametrize("top", [(), ((97, -0.1),), ((97, -0.1), (99, -5.0))])
def test_the_sampled_token_is_among_the_likeliest_of_a_completion(top):
    token = TextToken(id=99, log_probs=LogProbs(-5.0, top), offset=0)
    (found,) = TEXT.log_probs([token], TOKENIZER)["top_logprobs"]
    assert found == {chr(id): p for id, p in (*top, (99, -5.0))}
