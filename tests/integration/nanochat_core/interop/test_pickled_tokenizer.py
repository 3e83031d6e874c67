"""nanochat's pickled tokenizer is read without being executed, or refused."""

import pickle
import struct
import sys
import time
from pathlib import Path

import pytest
import tiktoken

from nanochat_core.errors import ModelError
from nanochat_core.interop.pickled_tokenizer import read_tokenizer, write_tokenizer
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS
from nanochat_core.tokenizer.patterns import SPLIT_PATTERN
from tests.support.nanochat_core.interop.models import Bomb, a_tokenizer

pytestmark = pytest.mark.torch


def encoding(**changes):
    tokenizer = a_tokenizer()
    state = {
        "name": "rustbpe",
        "pat_str": SPLIT_PATTERN,
        "mergeable_ranks": tokenizer.ranks,
        "special_tokens": {name: tokenizer.special(name) for name in SPECIAL_TOKENS},
    }
    return tiktoken.Encoding(**{**state, **changes})


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_tokenizer_encodes_as_the_one_that_was_saved(tmp_path, protocol):
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(encoding(), protocol=protocol))
    found = read_tokenizer(tmp_path / "tokenizer.pkl")
    assert found.digest() == a_tokenizer().digest()


def test_tiktoken_reads_what_is_written(tmp_path):
    write_tokenizer(a_tokenizer(), tmp_path / "tokenizer.pkl")
    with (tmp_path / "tokenizer.pkl").open("rb") as file:
        loaded = pickle.load(file)
    assert type(loaded) is tiktoken.Encoding
    text = "the theory in 12 lines"
    assert loaded.encode_ordinary(text) == a_tokenizer().encode(text)
    assert loaded.encode_single_token("<|bos|>") == a_tokenizer().bos


def hostile_pickles(mark):
    """Programs that would touch `mark`, or take the reader's memory, or hold something else."""
    call = f"touch {mark}".encode()
    class_of = b"ctiktoken.core\nEncoding\n"
    return {
        "reduce": pickle.dumps(Bomb(mark)),
        "global": b"cos\nsystem\n(X" + struct.pack("<I", len(call)) + call + b"tR.",
        "inst": b"(S'" + call + b"'\nios\nsystem\n.",
        "builtins": b"cbuiltins\neval\n(X\x03\x00\x00\x001+1tR.",
        "dotted": b"\x80\x04\x8c\x0dtiktoken.core\x8c\x11Encoding.__init__\x93.",
        "attribute": class_of + b"(tR}X\x05\x00\x00\x00stateNsb.",
        "other module": b"ctiktoken\nget_encoding\n(X\x04\x00\x00\x00gpt2tR.",
        "by name": class_of + b")\x81X\x04\x00\x00\x00gpt2b.",
        "persistent": b"Pelsewhere\n.",
        "extension": b"\x82\x01.",
        "plain": pickle.dumps({"mergeable_ranks": {}}),
        "arguments": class_of + b"(I1\ntR.",
        "long": b"\x8b\xff\xff\xff\x7f.",
        "huge frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "huge bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\x00\x00.",
        "deep": b"(" * 100_000 + b".",
        "a billion places": b"\x80\x03cbuiltins\nint\nr\x00\x00\x00\x40.",
        "places of an encoding": class_of + b"r\x00\x00\x00\x40)\x81}b.",
        "nested keys": b"\x80\x04)" + b"\x94h\x00\x86" * 40 + b"}N\x86.",
        "empty": b"",
        "text": b"hello",
    }


@pytest.mark.parametrize("name", hostile_pickles(Path()))
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, name):
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(hostile_pickles(tmp_path / "ran")[name])
    modules = set(sys.modules)
    began = time.process_time()
    with pytest.raises(ModelError, match="is not a pickled tokenizer"):
        read_tokenizer(path)
    assert time.process_time() - began < 1
    assert not (tmp_path / "ran").exists()
    assert set(sys.modules) == modules


def test_a_pickle_beyond_its_bound_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("nanochat_core.interop.pickled_tokenizer.MAX_BYTES", 100)
    write_tokenizer(a_tokenizer(), tmp_path / "tokenizer.pkl")
    with pytest.raises(ModelError, match="larger than 100 bytes"):
        read_tokenizer(tmp_path / "tokenizer.pkl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pat_str": "a+"}, "another pattern"),
        ({"special_tokens": {"<|bos|>": 291}}, "special tokens are not nanochat's"),
        ({"mergeable_ranks": {bytes([i]): i for i in range(255)}}, "1 of the 256 bytes"),
        ({"mergeable_ranks": {bytes([i]): 2 * i for i in range(256)}}, "are not 0 to 255"),
        ({"special_tokens": {}}, "special tokens are not nanochat's"),
    ],
)
def test_a_tokenizer_of_another_make_is_refused(tmp_path, changes, message):
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(encoding(**changes)))
    with pytest.raises(ModelError, match=message):
        read_tokenizer(tmp_path / "tokenizer.pkl")
