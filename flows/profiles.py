"""Profiles: named functions that say what to train and at what pace.

A profile takes the depth and returns every number of a run. No other module depends on a profile's
name; a person may change the depth and single values (`--set`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.datasets import text_snapshot, with_snapshots
from infra.near import nearest, suggest
from infra.placement import (
    Placement,
    count_gpus,
    count_threads,
    default_sinks,
    default_store,
    device_for,
    parse_value,
    read_value,
    with_settings,
)
from nanochat_core import scaling, scaling_january
from nanochat_core.config import (
    BaseEvalConfig,
    ChatEvalConfig,
    ChatTrainConfig,
    EvalTaskConfig,
    MixtureEntry,
    ModelConfig,
    OptimizerConfig,
    PretrainConfig,
    RLConfig,
    RowsConfig,
    RunConfig,
    ShardsConfig,
    TaskDataConfig,
    TokenizerConfig,
)
from nanochat_core.data.text.pydocs import python_snapshot
from nanochat_core.errors import ConfigError
from nanochat_core.job import Compile, Resources
from nanochat_core.section import Section, types_of

_SUGGESTED = 5  # settings in a hint
# What the profiles for one card change besides their size.
_MINUTES = (
    "midtrain.mixture=evening",
    "rl.num_steps=60",
    "base_eval.eval_tokens=10485760",
    "base_eval.core_max_per_task=500",
)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The placement numbers that a profile suggests; no part of any fingerprint."""

    device_batch_size: int
    save_every_seconds: float
    eval_every_steps: int
    max_gpus: int
    max_threads: int | None = None  # of a CPU; None: all. More only cost a small model time
    compile: Compile = "auto"  # on GPUs: not worth a minute for a small model


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A named configuration, and the placement numbers that suit it."""

    run: RunConfig
    pace: Pace


def tiny(depth: int = 3) -> Profile:
    """A model that fits a laptop's CPU and minutes: Python's own documentation, conversations of
    five turns, small sums. Every stage is the real one; only the numbers are small."""
    # Of 272 tokens 265 are bytes and special ones, so nearly every letter is a token of its own:
    # copying a word or a number is then learnt from few examples. So it is with narrow heads, and
    # with windows in which few other words stand. Few channels: a step of 64 takes half the time
    # of one of 128, and twice as many conversations teach more than twice the width.
    sequence_len, vocab_size, heads = 512, 272, 2 * max(1, depth // 2)
    model = ModelConfig(
        depth=depth,
        width=32 * heads,
        num_heads=heads,
        num_kv_heads=heads,
        sequence_len=sequence_len,
        vocab_size=vocab_size,
        windows=(32,) * (depth - 1) + (128,),
    )
    optimizer = OptimizerConfig(
        muon_lr=0.02,
        muon_weight_decay=0.1,
        lm_head_lr=0.004,
        embedding_lr=0.2,
        value_embed_lr=0.1,
        residual_lr=0.005,
        x0_lr=0.2,
        smear_lr=0.1,
    )
    return Profile(
        run=RunConfig(
            seed=42,
            numerics=scaling.numerics("fp32"),
            model=model,
            shards=ShardsConfig(
                source="pydocs",
                path=None,
                num_shards=4,
                snapshot=python_snapshot(),
                revision=None,
            ),
            task_data=TaskDataConfig(
                datasets=(
                    scaling.dataset("conversation", num_train=27000, num_test=200),
                    scaling.dataset("identity", num_train=500, num_test=20),
                    scaling.dataset("spelling", grade=3, num_train=100, num_test=200),
                    scaling.dataset("arithmetic", num_train=1000, num_test=200),
                ),
            ),
            tokenizer=TokenizerConfig(
                vocab_size=vocab_size, max_chars=20_000_000, document_cap=10_000
            ),
            rows=RowsConfig(policy="default", sequence_len=sequence_len, buffer_documents=1000),
            optimizer=optimizer,
            pretrain=PretrainConfig(
                num_steps=50,
                total_batch_size=4 * sequence_len,
                schedule=dataclasses.replace(
                    scaling.pretrain_schedule(), warmup_steps=10, momentum_warmup_steps=100
                ),
                eval_tokens=32_768,
            ),
            base_eval=BaseEvalConfig(
                eval_tokens=32_768,
                prompts=("Return a list of", "The default value is", "Raises an error if"),
                max_new_tokens=32,
            ),
            midtrain=ChatTrainConfig(
                mixture=(
                    MixtureEntry(task="conversation", num_examples=5600, epochs=1),
                    MixtureEntry(task="arithmetic", num_examples=100, epochs=1),
                ),
                num_epochs=1,
                total_batch_size=4 * sequence_len,
                lr_fraction=1.0,
                schedule=scaling.chat_schedule(warmdown_fraction=0.2),
                eval_examples=64,
            ),
            sft=ChatTrainConfig(
                mixture=(
                    MixtureEntry(task="conversation", skip=5600, num_examples=21400, epochs=1),
                    MixtureEntry(task="arithmetic", skip=100, num_examples=50, epochs=1),
                ),
                num_epochs=1,
                total_batch_size=4 * sequence_len,
                lr_fraction=0.7,
                schedule=scaling.chat_schedule(warmdown_fraction=1.0),
                eval_examples=64,
            ),
            rl=RLConfig(
                task="arithmetic",
                num_steps=5,
                examples_per_step=16,
                samples_per_example=16,
                max_new_tokens=48,
                temperature=0.8,
                top_k=50,
                lr_fraction=0.1,
                eval_examples=200,
            ),
            chat_eval=ChatEvalConfig(
                tasks=(
                    EvalTaskConfig(name="conversation", max_examples=200, max_new_tokens=64),
                    EvalTaskConfig(name="spelling", max_examples=200, max_new_tokens=64),
                    EvalTaskConfig(name="arithmetic", max_examples=200, max_new_tokens=48),
                ),
                prompts=scaling.CHAT_PROMPTS,
            ),
        ),
        pace=Pace(
            device_batch_size=8,
            save_every_seconds=10.0,
            eval_every_steps=200,
            max_gpus=1,
            # With 64 channels a second thread costs 40 % more CPU time, and no second is gained.
            max_threads=1 if heads == 2 else None,
            compile=False,
        ),
    )


def d12(depth: int = 12) -> Profile:
    """GPT-1 size, 286 M parameters: the smallest model worth comparing with others."""
    return _gpu(scaling.run_for_depth(depth))


def speedrun(depth: int = 24) -> Profile:
    """nanochat's speedrun: depth 24, 8 tokens per parameter, GPT-2 grade. One 8xH100 node."""
    return _gpu(scaling.run_for_depth(depth, tokens_per_param=8.0))


def d26(depth: int = 26) -> Profile:
    """Depth 26, compute-optimal. One 8xH100 node."""
    return _gpu(scaling.run_for_depth(depth))


def d32(depth: int = 32) -> Profile:
    """Depth 32, compute-optimal: 2.8 B parameters. One 8xH100 node."""
    return _gpu(scaling.run_for_depth(depth), device_batch_size=8)


def d20_seed(depth: int = 20) -> Profile:
    """nanochat's $100 model of 5 January 2026: a plainer architecture, 20 tokens per parameter."""
    return _gpu(scaling_january.january_run(depth))


def evening8(depth: int = 8) -> Profile:
    """An evening on a card of 8 GB, 126 M parameters. Planned, not trained."""
    return _one_card(scaling.run_for_depth(depth), device_batch_size=8)


def evening24(depth: int = 12) -> Profile:
    """An evening on a card of 24 GB, 286 M parameters. Planned, not trained."""
    return _one_card(scaling.run_for_depth(depth), device_batch_size=16)


def hour(depth: int = 12) -> Profile:
    """An hour of one H100, 286 M parameters, 8 tokens per parameter. Planned, not trained."""
    return _one_card(scaling.run_for_depth(depth, tokens_per_param=8.0), device_batch_size=32)


PROFILES: dict[str, Callable[..., Profile]] = {
    "tiny": tiny,
    "evening8": evening8,
    "evening24": evening24,
    "hour": hour,
    "d12": d12,
    "d20_seed": d20_seed,
    "speedrun": speedrun,
    "d26": d26,
    "d32": d32,
}


def is_profile_file(name: str) -> bool:
    """Return whether a command that takes a profile was given a file (flows/profile_file.py)."""
    return name.endswith(".toml")


def _gpu(run: RunConfig, *, device_batch_size: int = 16) -> Profile:
    return Profile(
        run=run,
        pace=Pace(
            device_batch_size=device_batch_size,
            save_every_seconds=600.0,
            eval_every_steps=250,
            max_gpus=8,
        ),
    )


def _one_card(run: RunConfig, *, device_batch_size: int) -> Profile:
    """Return a run whose chat stages and evaluations take minutes where pretraining takes hours."""
    tree = run.tree()
    for override in _MINUTES:
        _apply(tree, override)
    run = RunConfig.from_tree(tree, where="the run")
    # No HumanEval: models of this size solve none of it, and it needs a sandbox.
    tasks = tuple(
        dataclasses.replace(task, max_examples=min(task.max_examples, 1000))
        for task in run.chat_eval.tasks
        if task.name != "humaneval"
    )
    run = dataclasses.replace(run, chat_eval=dataclasses.replace(run.chat_eval, tasks=tasks))
    profile = _gpu(run, device_batch_size=device_batch_size)
    return dataclasses.replace(profile, pace=dataclasses.replace(profile.pace, max_gpus=1))


def open_profile(
    name: str,
    *,
    depth: int | None = None,
    overrides: Sequence[str] = (),
    snapshots: bool = True,
) -> Profile:
    """Return the profile called `name`, at `depth` if given, with `section.name=value` overrides.

    Without `snapshots`, text and datasets on this machine are not read: for stages that are made
    from artifacts alone.

    Raises ConfigError for an unknown profile, a depth below 1, an unknown setting or a wrong value.
    """
    if name not in PROFILES:
        # Read where the command runs: a worker, on another machine, cannot open it.
        file = "a TOML file is for the command line: nanochat run FILE.toml"
        hint = file if is_profile_file(name) else suggest(name, list(PROFILES))
        raise ConfigError(f"there is no profile '{name}'", hint=hint)
    if depth is not None and not 1 <= depth <= 100:
        raise ConfigError(
            f"depth {depth} is not between 1 and 100",
            hint="it is the number of layers: tiny has 3, speedrun 24",
        )
    profile = PROFILES[name]() if depth is None else PROFILES[name](depth)
    tree = profile.run.tree()
    for override in overrides:
        _apply(tree, override)
    # After all overrides: checks across settings hold for the result, in any order of --set.
    run = RunConfig.from_tree(tree, where="the run")
    if not snapshots:
        return dataclasses.replace(profile, run=run)
    shards = dataclasses.replace(run.shards, snapshot=text_snapshot(run.shards))
    run = dataclasses.replace(run, shards=shards, task_data=with_snapshots(run.task_data))
    return dataclasses.replace(profile, run=run)


def make_placement(
    pace: Pace,
    *,
    home: Path,
    store: str | None = None,
    gpus: int | None = None,
    settings: Sequence[str] = (),
) -> Placement:
    """Make a run's placement: from the arguments, else the environment, else this machine.

    `settings` are applied last, each a `name=value`. Raises ConfigError on a wrong one. On a CPU
    nothing is compiled, whatever they say.
    """
    # A profile's batch may be too small for all GPUs of a machine; an explicit number is obeyed.
    gpus = min(count_gpus(), pace.max_gpus) if gpus is None else gpus
    threads = max(1, count_threads() // max(1, gpus))  # of each of a machine's processes
    resources = Resources(
        device=device_for(gpus),
        threads=min(threads, pace.max_threads or threads),
        device_batch_size=pace.device_batch_size,
        save_every_seconds=pace.save_every_seconds,
        eval_every_steps=pace.eval_every_steps,
        compile=pace.compile,
        sinks=default_sinks(),
    )
    resources = with_settings(resources, settings)
    if resources.device == "cpu":
        # torch.compile's kernels are no faster there than torch's and our own, and take minutes.
        resources = dataclasses.replace(resources, compile=False)
    return Placement(home=home, store=store or default_store(home), gpus=gpus, resources=resources)


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one `section.name=value` in the tree."""
    path, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"'{override}' is not of the form section.name=value")
    setting = path.strip()
    if (expected := setting_types().get(setting)) is None:
        raise _no_setting(setting)
    *parents, name = setting.split(".")
    for parent in parents:
        tree = tree[parent]
    # A mixture may be given by its name or .toml file or, like any list, as JSON.
    if name == "mixture" and not text.strip().startswith("["):
        tree[name] = [entry.tree() for entry in scaling.open_mixture(text.strip())]
        return
    # White space around a value is not part of it, but divides documents. Of `name = value` the
    # space after the sign is no part of either.
    if name != "separator" or text.strip() == "null":
        text = text.strip()
    elif path.endswith(" "):
        text = text.removeprefix(" ")
    read_value(expected, text, where=setting)  # here, so that the error names the setting
    tree[name] = parse_value(expected, text)


def setting_types(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Return the types of all single settings of a section by their dotted names."""
    found: dict[str, Any] = {}
    for name, expected in types_of(section).items():
        if isinstance(expected, type) and issubclass(expected, Section):
            found |= setting_types(expected, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = expected
    return found


def _no_setting(path: str) -> ConfigError:
    known = [*setting_types()]
    likely = ", ".join(nearest(path, known, least=0.0)[:_SUGGESTED])
    hint = f"the nearest are {likely}; docs/reference/config.md has all"
    return ConfigError(
        f"there is no setting '{path}'",
        hint=suggest(path, known) if nearest(path, known) else hint,
    )
