"""The bench that calibrates CORE: a small random GPT-2 gets the answers of a straight reading."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from bench.core_gpt2 import compare_with_peer, evaluate
from nanochat_core.evaluate.core_tasks import open_suite
from nanochat_core.evaluate.foreign import ForeignModel, open_foreign
from nanochat_core.evaluate.intervals import mean_of
from tests.support.nanochat_core.evaluate.core_reference import (
    likely_continuations,
    straight_core,
    write_bundle,
)
from tests.support.nanochat_core.evaluate.gpt2 import write_gpt2

WINDOW = 128
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("gpt2"), window=WINDOW)


@pytest.fixture(scope="module")
def gpt2(weights: Path) -> ForeignModel:
    return open_foreign(weights, torch.device("cpu"))


@pytest.fixture(scope="module")
def straight(weights: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """All logits of one text, of its last WINDOW tokens; no numbers where it was cut."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(weights).eval()

    @torch.no_grad()
    def read(ids: torch.Tensor) -> torch.Tensor:
        cut = max(0, ids.shape[1] - WINDOW)
        logits = model(input_ids=ids[:, cut:]).logits
        return torch.cat([torch.full((1, cut, logits.size(-1)), torch.nan), logits], dim=1)

    return read


@pytest.fixture(scope="module")
def bundle(gpt2: ForeignModel, straight: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundle")
    write_bundle(directory)
    return write_bundle(directory, likely=likely_continuations(straight, gpt2, directory))


def test_it_answers_as_a_straight_reading_of_each_text(
    gpt2: ForeignModel, straight: Any, bundle: Path
) -> None:
    suite = open_suite(bundle, max_per_task=None)
    shots = " ".join(json.dumps(item) for item in suite.tasks[0].items)
    assert len(gpt2.encode(shots)) > 4 * WINDOW  # prompts with ten shots are cropped
    found = evaluate(gpt2, suite)
    expected = straight_core(straight, gpt2, bundle)
    assert {score.label: list(score.answers) for score in found} == expected["answers"]
    assert mean_of([score.centred for score in found]).value == pytest.approx(expected["core"])
    shares = expected["accuracy"].values()
    assert min(shares) < 0.3 < 0.4 < max(shares)


def test_every_verdict_is_nanochats(gpt2: ForeignModel, bundle: Path) -> None:
    if "NANOCHAT_DIR" not in os.environ:
        pytest.skip("NANOCHAT_DIR names no checkout of nanochat")
    suite = open_suite(bundle, max_per_task=None)
    scores = evaluate(gpt2, suite)
    equal, asked = compare_with_peer(gpt2, suite, scores, Path(os.environ["NANOCHAT_DIR"]), 20)
    assert equal == asked > 90
