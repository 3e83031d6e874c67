"""What a bench says without what it compares with, and which limits it finds that are not kept."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from bench import core_gpt2, infer, llama, parity, serve, store, train
from tests.integration.bench.test_train import TINY, measured

pytestmark = pytest.mark.torch
NO_CHECKOUT = "NANOCHAT_DIR names no checkout of nanochat"
SKIPS: dict[str, tuple[Callable[[], object], str]] = {
    "infer": (infer.main, f"bench infer is skipped: {NO_CHECKOUT}\n"),
    "infer --device cuda": (
        infer.main,
        "bench infer is skipped: --device cuda, and torch sees no GPU\n",
    ),
    "llama": (llama.main, "bench llama is skipped: xllamacpp and gguf not installed\n"),
    "core_gpt2": (
        core_gpt2.main,
        "core_gpt2 is skipped: no CORE bundle: --bundle or CORE_BUNDLE names no folder",
    ),
    "parity": (parity.main, "NANOCHAT_DIR names no checkout"),
}


@pytest.mark.parametrize("command", SKIPS)
def test_without_what_it_compares_with_a_bench_says_so_and_measures_nothing(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NANOCHAT_DIR", "CORE_BUNDLE", "GPT2_WEIGHTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(llama, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", command.split())
    main, said = SKIPS[command]
    assert not main()
    assert said in capsys.readouterr().out


def of_infer(at_least: float | None, **ratios: float) -> list[str]:
    case = {"depth": 4, "batch": 8, "prompt": 64}
    rows = [case | {"side": side, "ratio_rest": ratio} for side, ratio in ratios.items()]
    return infer.find_failures(rows, field="ratio_rest", at_least=at_least)


def of_train(at_least: float, **rounds: list[float]) -> list[str]:
    found = {side: measured(*seconds) for side, seconds in rounds.items()}
    return train.find_failures([{"case": asdict(TINY), "rounds": found}], at_least=at_least)


def of_store(at_least: float, **directions: list[float]) -> list[str]:
    """Of each direction: our seconds, then those of each aws; only medians count."""
    times: dict[str, dict[str, list[float]]] = {}
    for direction, (ours, *theirs) in directions.items():
        aws = {f"aws-{n}": [s, 9 * s, 0.0] for n, s in enumerate(theirs)}
        times[direction] = {"nanochat": [ours, ours, 99.0], **aws, "rclone": [0.001]}
    return store.find_failures(times, at_least=at_least)


def of_serve(**changes: Any) -> list[str]:
    ours = {"one_first_token_ms": 13.0, "health_ms": 21.0, "slot_free_ms": 49.0}
    found = {"ours": ours, "ratio_tokens_per_second": 8.0, "ratio_first_token": 19.9}
    limits = {"at_least": 8.0, "at_least_first_token": 20, "most_health_ms": 20}
    limits |= {"most_slot_free_ms": 50, "most_first_token_ms": 12} | changes
    return serve.broken_limits(argparse.Namespace(**limits), found)


def test_a_step_next_to_llama_cpp_is_the_median_of_the_rounds() -> None:
    times = {"own_first": [3.0, 1.0, 2.0], "own_rest": [0.1, 0.2, 0.3], "first": [1.0]}
    row = llama.summarise(times | {"rest": [0.4]}, 2)
    assert row["tokens_per_cpu_second"] == 2 * (llama.TOKENS - 1) / 0.2
    assert (row["first_ms"], row["llama_first_ms"]) == (2000.0, 1000.0)


SIDES = {"native": 1.5, "torch": 1.2, infer.PEER: 1.0}
NO_LIMITS = dict.fromkeys(("at_least", "at_least_first_token", "most_health_ms"))
LIMITS: list[tuple[Callable[[], list[str]], list[str]]] = [
    *((partial(of_infer, limit, **SIDES), []) for limit in (None, 1.2)),
    (
        partial(of_infer, 1.3, **SIDES),
        ["d4 batch 8 prompt 64: torch is 1.20 times the peer, 1.3 is wanted"],
    ),
    (partial(of_infer, 0.1, **{infer.PEER: 1.0}), ["no side was measured"]),
    # The last round times sections, and the medians of the others count.
    (partial(of_train, 1.0, ours=[1.0, 9.0, 1.0, 50.0], peer=[1.2, 1.2, 1.2, 0.1]), []),
    (
        partial(of_train, 1.25, ours=[1.0, 9.0, 1.0, 50.0], peer=[1.2, 1.2, 1.2, 0.1]),
        ["d1 eager: 1.20 times the peer, 1.25 is wanted"],
    ),
    (partial(of_train, 1.0, ours=[], peer=[1.0, 1.0]), ["d1 eager: ours failed"]),
    (partial(of_train, 1.0, ours=[1.0, 1.0], peer=[]), []),
    (partial(of_train, 1.0, ours=[1.0, 1.0]), []),
    *((partial(of_store, 0.9, push=times), []) for times in ([10.0, 9.0, 30.0], [10.0])),
    (
        partial(of_store, 0.9, push=[10.0, 30.0, 8.9]),
        ["push: 0.89 times aws-1, at least 0.9 is wanted"],
    ),
    (
        partial(of_store, 0.9, push=[1.0, 2.0], pull=[4.0, 2.0]),
        ["pull: 0.50 times aws-0, at least 0.9 is wanted"],
    ),
    (
        of_serve,
        [
            "first token: 19.9 times, at least 20 wanted",
            "one client's first token: 13.0 ms, at most 12 wanted",
            "/health: 21.0 ms, at most 20 wanted",
        ],
    ),
    (partial(of_serve, **NO_LIMITS, most_slot_free_ms=None, most_first_token_ms=None), []),
]


@pytest.mark.parametrize(("find", "expected"), LIMITS)
def test_each_limit_that_is_not_kept_is_named(
    find: Callable[[], list[str]], expected: list[str]
) -> None:
    assert find() == expected
