import hashlib
import os
import socket

import pytest

from nanochat_core.runtime.tiktoken_cache import find_cached
from nanochat_core.tokenizer import evaluation
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.evaluation import COUNTED, HELD_OUT, PUBLISHED, evaluate
from nanochat_core.tokenizer.kinds_of_text import read_kinds, read_texts

BYTES = Tokenizer({bytes([i]): i for i in range(256)})  # a token for each byte
URL = "https://example.org/encodings/some.tiktoken"


@pytest.fixture
def nothing_cached(tmp_path, monkeypatch):
    """tiktoken has no files, and there is no network to get any."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path


def cache(directory, data, *, url=URL):
    path = directory / hashlib.sha1(url.encode()).hexdigest()
    path.write_bytes(data)
    return path


def test_a_token_for_each_byte_is_one_byte_per_token(nothing_cached):
    found = evaluate(BYTES, ["some text", "\u00e9t\u00e9"])
    ours = {name: value for name, value in found.items() if "/" not in name}
    assert ours == dict.fromkeys([HELD_OUT, *COUNTED], 1.0)


def test_known_vocabularies_are_measured_on_our_texts_on_every_machine(nothing_cached):
    found = evaluate(BYTES, ["some text"])
    assert not [name for name in found if name.startswith(f"{HELD_OUT}/")]
    size = len(read_kinds()["english"].encode())
    assert found["english/gpt2"] == size / 251
    assert found["english/cl100k_base"] == size / 245


def test_the_texts_are_those_that_were_counted():
    assert read_kinds().keys() == COUNTED.keys()
    digest = hashlib.sha256(read_texts().encode()).hexdigest()
    assert digest == evaluation.COUNTED_TEXTS, "a text was changed: count again, see evaluation.py"


def test_there_are_programs_maths_and_several_languages_of_a_kilobyte_and_more():
    kinds = read_kinds()
    assert {"python", "maths", "english", "german", "chinese", "arabic"} <= kinds.keys()
    assert all(1000 < len(text.encode()) < 5000 for text in kinds.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_vocabularies_were_counted_right(name):
    encoding = evaluation.find_published().get(name)
    if encoding is None:
        pytest.skip(f"tiktoken's cache does not hold {name}")
    column = list(PUBLISHED).index(name)
    found = {kind: len(encoding.encode_ordinary(text)) for kind, text in read_kinds().items()}
    assert found == {kind: tokens[column] for kind, tokens in COUNTED.items()}
    assert f"{HELD_OUT}/{name}" in evaluate(BYTES, ["some text"])


def test_a_cached_file_is_found(nothing_cached):
    path = cache(nothing_cached, b"data")
    assert find_cached(URL, sha256=hashlib.sha256(b"data").hexdigest()) == path


def test_a_cached_file_of_other_content_is_not_at_hand_and_stays(nothing_cached):
    path = cache(nothing_cached, b"data")
    assert find_cached(URL, sha256="0" * 64) is None
    assert path.read_bytes() == b"data"


@pytest.mark.parametrize("names", [{"DATA_GYM_CACHE_DIR"}, {"TIKTOKEN_CACHE_DIR"}, set()])
def test_the_cache_is_where_tiktoken_has_it(names, tmp_path, monkeypatch):
    for name in ("DATA_GYM_CACHE_DIR", "TIKTOKEN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / "data-gym-cache"
    for name in names:
        directory = tmp_path / name
        monkeypatch.setenv(name, str(directory))
    directory.mkdir()
    path = cache(directory, b"data")
    from tiktoken.load import read_file_cached

    digest = hashlib.sha256(b"data").hexdigest()
    assert find_cached(URL, sha256=digest) == path
    assert read_file_cached(URL, digest) == b"data"
    assert os.listdir(directory) == [path.name]
