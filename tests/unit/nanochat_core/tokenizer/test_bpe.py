import json
import random
from pathlib import Path

import numpy as np
import pytest
import regex
import rustbpe
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.errors import DataError, ModelError
from nanochat_core.tokenizer.bpe import RANKS_FILE, SETTINGS_FILE, SPECIAL_TOKENS, Tokenizer
from nanochat_core.tokenizer.patterns import KNOWN_PATTERNS, PATTERNS, SPLIT_PATTERN

VOCAB_SIZE = 400
# As in nanochat's tokenizer.py; it is fixed, since models that others trained rely on it.
PUBLISHED = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


def texts():
    """Three hundred lines of made-up words, numbers and accents."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]
    for _ in range(300):
        yield " ".join(rng.choices([*words, "été", "12345", "don't", "x\n\n"], k=20))


TOKENIZER = Tokenizer.train(texts(), vocab_size=VOCAB_SIZE)


@settings(deadline=None)
@given(st.text())
def test_decoding_gives_back_any_text_and_token_lengths_add_up_to_its_bytes(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.token_bytes()[ids].sum() == len(text.encode())


# What the pattern tells apart, and what looks like it.
TRICKY = (
    "aZ'sdmtlvre \u017f\u212a\t\r\n\u00a0\u2028\u3000\x1c0 9\u0660\u00bd.,-_$"
    "\u0301\u4e2d\u0e31\U0001f600"
)


# A contraction shows in letters that follow it, which text of single letters hardly has.
PIECES = (*TRICKY, "'s", "'D", "'m", "'T", "'ll", "'Ve", "'RE", "12345")


def test_the_pattern_is_the_published_one():
    assert SPLIT_PATTERN == PUBLISHED


@pytest.mark.parametrize("name", PATTERNS)
def test_text_is_cut_as_the_pattern_says(name):
    # Any two bytes of a piece make a token, so that ids show where pieces end. Pairs of high bytes
    # come first: letters then join each other before they join an apostrophe.
    pairs = {bytes([a]): a for a in range(256)}
    pairs |= {bytes([a, b]): 65791 - 256 * a - b for a in range(256) for b in range(256)}
    ours, pattern = Tokenizer(pairs, pattern=PATTERNS[name]), PATTERNS[name]
    published = tiktoken.Encoding(
        name=name, pat_str=pattern, mergeable_ranks=pairs, special_tokens={}
    )
    rng = random.Random(2)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(0, 20))) for _ in range(5000)]
    texts += [path.read_text("utf-8") for path in Path(json.__file__).parent.glob("*.py")]
    assert [ours.encode(text) for text in texts] == published.encode_ordinary_batch(texts)


def tricky_texts():
    """Words of several scripts, beside what the pattern tells apart in every order."""
    rng = random.Random(1)
    words = [
        *("don't", "WE'LLS", "\u00e9t\u00e9", "nai\u0308ve", "'s", "12345", "3\u00bd", "x_1"),
        *("\u4e2d\u6587\u5b57", "\u65e5\u672c\u8a9e\u306e", "\u0661\u0662\u0663", "...", "$9.99"),
    ]
    gaps = [" ", "  ", "\n", " \n\n", "\t", "\r\n", "\u00a0", "\u3000", ""]
    for _ in range(300):
        yield "".join(rng.choice(words) + rng.choice(gaps) for _ in range(20))
        yield "".join(rng.choices(TRICKY, k=60))


def merges(pattern, num_ordinary):
    """Tokens in the order in which they are learnt under a split pattern."""
    learnt = rustbpe.Tokenizer()
    learnt.train_from_iterator(tricky_texts(), num_ordinary, pattern=pattern)
    return [bytes(token) for token, _ in sorted(learnt.get_mergeable_ranks(), key=lambda m: m[1])]


@pytest.mark.parametrize("name", PATTERNS)
def test_training_learns_what_it_learns_under_the_published_pattern(name):
    pattern, vocab_size = PATTERNS[name], 256 + 400 + len(SPECIAL_TOKENS)
    tokenizer = Tokenizer.train(tricky_texts(), vocab_size=vocab_size, pattern=pattern)
    ours = [tokenizer.decode_bytes([i]) for i in range(tokenizer.bos)]
    assert ours == merges(pattern, 256 + 400)
    assert {b"don", "\u00e9t\u00e9".encode(), "\u65e5\u672c".encode()} <= set(ours)
    assert (b"12" in ours) == (name != "gpt4")  # there "123" is one piece


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("nanochat", ["ab", "12", "34", " \u0939", "\u093f\u0928", "\u094d\u0926", "\u0940"]),
        ("gpt4", ["ab", "123", "4", " \u0939", "\u093f\u0928", "\u094d\u0926", "\u0940"]),
        ("multilingual", ["ab", "12", "34", " \u0939\u093f\u0928\u094d\u0926\u0940"]),
    ],
)
def test_what_a_pattern_splits(name, pieces):
    # The word "Hindi" in its own script has three marks.
    text = "ab1234 \u0939\u093f\u0928\u094d\u0926\u0940"
    for pattern in (PATTERNS[name], KNOWN_PATTERNS[PATTERNS[name]]):
        assert regex.findall(pattern, text) == pieces


def test_the_special_tokens_have_the_last_ids_in_order():
    ids = [TOKENIZER.special(name) for name in SPECIAL_TOKENS]
    assert ids == list(range(VOCAB_SIZE - 9, VOCAB_SIZE))
    assert TOKENIZER.bos == VOCAB_SIZE - 9
    assert TOKENIZER.vocab_size == VOCAB_SIZE
    assert TOKENIZER.token_bytes().shape == (VOCAB_SIZE,)
    assert not TOKENIZER.token_bytes()[ids].any()


@pytest.mark.parametrize("name", PATTERNS)
def test_a_saved_tokenizer_is_the_same_tokenizer(tmp_path, name):
    made = Tokenizer.train(tricky_texts(), vocab_size=600, pattern=PATTERNS[name])
    made.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    text = "don't say été 12345"
    assert loaded.encode(text) == made.encode(text)
    assert (loaded.pattern, loaded.digest()) == (made.pattern, made.digest())
    smaller = Tokenizer.train(tricky_texts(), vocab_size=599, pattern=PATTERNS[name])
    others = {
        smaller.digest(),
        *(Tokenizer(made.ranks, pattern=p).digest() for p in PATTERNS.values()),
    }
    assert len(others) == 1 + len(PATTERNS)
    assert sorted(p.name for p in tmp_path.iterdir()) == [SETTINGS_FILE, RANKS_FILE]


def test_a_batch_is_each_text_alone():
    batch = ["don't", "", "été 12"]
    for text, ids in zip(batch, TOKENIZER.encode_batch(batch), strict=True):
        assert ids.dtype == np.uint32
        assert ids.tolist() == TOKENIZER.encode(text)


@pytest.mark.parametrize("text", [" " * 2_000_000, "\n" * 300_000, "a" * 300_000])
def test_a_long_run_of_one_character_is_encoded(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_half_a_letter_and_a_lone_surrogate_become_a_replacement_character():
    assert TOKENIZER.decode(TOKENIZER.encode("\u4e2d")[:1]) == "\ufffd"
    assert TOKENIZER.decode(TOKENIZER.encode("a\udc80b")) == "a\ufffdb"


def test_too_little_text_is_refused():
    with pytest.raises(DataError, match=r"gives \d+ tokens, 1000 were asked for"):
        Tokenizer.train(iter(["hello world"]), vocab_size=1000)
    with pytest.raises(DataError, match="too small"):
        Tokenizer.train(iter(["hello world"]), vocab_size=264)


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)
    TOKENIZER.save(tmp_path)
    ranks, settings_file = (tmp_path / name for name in (RANKS_FILE, SETTINGS_FILE))
    whole, tree = ranks.read_bytes(), json.loads(settings_file.read_text())
    for data, changes, complaint in (
        (whole[: whole.index(b"\n") + 1], {}, "has 1 tokens"),
        (b"no base64!\n", {}, "cannot be read"),
        (whole, {"format": 99}, "format"),
    ):
        ranks.write_bytes(data)
        settings_file.write_text(json.dumps(tree | changes))
        with pytest.raises(ModelError, match=complaint):
            Tokenizer.load(tmp_path)


UNKNOWN_PATTERNS = [
    r"(?:\w+\s?)+x|[\s\S]",  # its time grows with the square of the text, or faster
    r"\w*(?=\w*!)|[\s\S]",
    SPLIT_PATTERN.replace(r"\p{N}{1,2}", r"\p{N}{1,4}"),
    *(SPLIT_PATTERN + "|x", "(", ""),  # the second does not compile
    "x*",  # empty pieces
]


def test_a_pattern_that_comes_with_a_model_is_refused_unless_it_is_known(tmp_path):
    TOKENIZER.save(tmp_path)
    tree = json.loads((tmp_path / SETTINGS_FILE).read_text())
    complaint = "a split pattern that this version does not know"
    for pattern in UNKNOWN_PATTERNS:
        (tmp_path / SETTINGS_FILE).write_text(json.dumps({**tree, "pattern": pattern}))
        with pytest.raises(ModelError, match=complaint) as caught:
            Tokenizer.load(tmp_path)
        assert "cannot be used here" in str(caught.value.hint)
        assert ".py" not in str(caught.value.hint)
