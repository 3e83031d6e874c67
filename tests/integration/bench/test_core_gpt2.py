"""The bench that calibrates CORE: a small random GPT-2 gets the answers of a straight reading."""

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from bench.core_gpt2 import Gpt2, compare_with_peer, evaluate, main, missing_part, open_gpt2
from nanochat_core.evaluate.core_tasks import open_suite
from nanochat_core.evaluate.intervals import mean_of
from tests.support.nanochat_core.evaluate.core_reference import (
    likely_continuations,
    straight_core,
    write_bundle,
)

WINDOW, BOS = 128, 256
pytestmark = pytest.mark.torch


def byte_vocabulary() -> dict[str, int]:
    """GPT-2's letters for bytes, each with the byte as its id."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(i if i in printable else next(others)): i for i in range(256)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves a model and its tokenizer."""
    import tokenizers  # here: five seconds that only this file's worker spends
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("gpt2")
    words = tokenizers.Tokenizer(tokenizers.models.BPE(byte_vocabulary(), []))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.add_special_tokens(["<|endoftext|>"])
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<|endoftext|>").save_pretrained(
        folder
    )
    shape = GPT2Config(
        vocab_size=BOS + 1, n_positions=WINDOW, n_embd=32, n_layer=2, n_head=2, bos_token_id=BOS
    )
    model = GPT2LMHeadModel(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=generator)
        model.transformer.wte.weight[: ord("a")] *= 0.2
        model.transformer.wte.weight[ord("z") + 1 :] *= 0.2
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(weights: Path) -> Gpt2:
    return open_gpt2(weights, torch.device("cpu"))


@pytest.fixture(scope="module")
def straight(weights: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """All logits of one text, of its last WINDOW tokens; no numbers where it was cut."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(weights).eval()

    @torch.no_grad()
    def read(ids: torch.Tensor) -> torch.Tensor:
        cut = max(0, ids.shape[1] - WINDOW)
        logits = model(input_ids=ids[:, cut:]).logits
        return torch.cat([torch.full((1, cut, BOS + 1), torch.nan), logits], dim=1)

    return read


@pytest.fixture(scope="module")
def bundle(gpt2: Gpt2, straight: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundle")
    write_bundle(directory)
    return write_bundle(directory, likely=likely_continuations(straight, gpt2, directory))


def test_it_answers_as_a_straight_reading_of_each_text(
    gpt2: Gpt2, straight: Any, bundle: Path
) -> None:
    suite = open_suite(bundle, max_per_task=None)
    shots = " ".join(json.dumps(item) for item in suite.tasks[0].items)
    assert len(gpt2.encode(shots)) > 4 * WINDOW  # prompts with ten shots are cropped
    found = list(evaluate(gpt2, suite))
    expected = straight_core(straight, gpt2, bundle)
    assert {score.label: list(score.answers) for score in found} == expected["answers"]
    assert mean_of([score.centred for score in found]).value == pytest.approx(expected["core"])
    shares = expected["accuracy"].values()
    assert min(shares) < 0.3 < 0.4 < max(shares)


def test_every_verdict_is_nanochats(gpt2: Gpt2, bundle: Path) -> None:
    if "NANOCHAT_DIR" not in os.environ:
        pytest.skip("NANOCHAT_DIR names no checkout of nanochat")
    suite = open_suite(bundle, max_per_task=None)
    scores = list(evaluate(gpt2, suite))
    equal, asked = compare_with_peer(gpt2, suite, scores, Path(os.environ["NANOCHAT_DIR"]), 20)
    assert equal == asked > 90


def test_text_becomes_the_tokens_of_the_folder(gpt2: Gpt2) -> None:
    rng = random.Random(1)
    text = "".join(map(chr, rng.choices(range(32, 0x2FF), k=50)))
    assert gpt2.encode(text) == list(text.encode())
    assert (gpt2.bos, gpt2.window) == (BOS, WINDOW)


def test_without_files_it_is_skipped_with_a_reason(
    tmp_path: Path,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert missing_part(None, None) == (
        "no CORE bundle: --bundle or CORE_BUNDLE names no folder with core.yaml"
    )
    assert "no weights: --weights or GPT2_WEIGHTS" in str(missing_part(bundle, tmp_path))
    for name in ("CORE_BUNDLE", "GPT2_WEIGHTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["core_gpt2"])
    main()
    assert capsys.readouterr().out.startswith("core_gpt2 is skipped: no CORE bundle")
