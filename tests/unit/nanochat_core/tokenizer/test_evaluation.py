import hashlib
import os

import pytest
import tiktoken

from nanochat_core.tokenizer import evaluation
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.evaluation import COUNTED, HELD_OUT, evaluate
from nanochat_core.tokenizer.kinds_of_text import read_kinds, read_texts

BYTES = Tokenizer({bytes([i]): i for i in range(256)})  # a token for each byte


def test_a_token_for_each_byte_is_one_byte_per_token():
    found = evaluate(BYTES, ["some text", "\u00e9t\u00e9"])
    ours = {name: value for name, value in found.items() if "/" not in name}
    assert ours == dict.fromkeys([HELD_OUT, *COUNTED], 1.0)


def test_known_vocabularies_are_measured_on_our_texts_on_every_machine():
    found = evaluate(BYTES, ["some text"])
    assert not [name for name in found if name.startswith(f"{HELD_OUT}/")]
    size = len(read_kinds()["english"].encode())
    assert found["english/gpt2"] == size / 251
    assert found["english/cl100k_base"] == size / 245


def test_the_texts_are_those_that_were_counted():
    assert read_kinds().keys() == COUNTED.keys()
    digest = hashlib.sha256(read_texts().encode()).hexdigest()
    assert digest == evaluation.COUNTED_TEXTS, "a text was changed: count again, see evaluation.py"


@pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ, reason="tiktoken's files of both are needed"
)
@pytest.mark.parametrize(("column", "name"), [(0, "r50k_base"), (1, "cl100k_base")])
def test_known_vocabularies_were_counted_right(column, name):
    encoding = tiktoken.get_encoding(name)  # r50k_base is that of GPT-2
    found = {kind: len(encoding.encode_ordinary(text)) for kind, text in read_kinds().items()}
    assert found == {kind: tokens[column] for kind, tokens in COUNTED.items()}
