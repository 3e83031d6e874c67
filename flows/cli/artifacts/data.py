"""`nanochat data`: print one conversation as a model is trained on it, with its loss mask."""

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.names import open_usable
from flows.cli.options import AsJson, StoreOptions
from flows.cli.output import print_json, print_line, print_warning, styled
from flows.render.text import escaped
from flows.stages import TASK_DATA, TOKENIZER
from infra.near import suggest
from infra.storage.base import Store
from nanochat_core.errors import ConfigError

# Training cuts a conversation to the length of a row; here it is shown whole.
_NO_LIMIT = 2**62


def data(
    task: str,
    /,
    *,
    index: int = 0,
    split: Literal["train", "test"] = "train",
    run: str = "tiny",
    place: StoreOptions = StoreOptions(),
    as_json: AsJson = False,
) -> None:
    """Print a conversation as its tokens, what the model learns to write in colour.

    Without colours the learnt part stands between {+ and +}.

    Args:
        task: Name of a dataset, as task_data lists them.
        index: Which example, from 0.
        split: Of which split.
        run: A profile, run or tag whose datasets are shown.
    """
    from nanochat_core.tokenizer.bpe import Tokenizer
    from nanochat_core.tokenizer.chat import render_conversation

    with place.cache as cache:
        store = place.open_store()
        examples, tokens = (_fetch(store, s.name, run, cache) for s in (TASK_DATA, TOKENIZER))
        conversation = _open_example(examples, task, split, index)
        tokenizer = Tokenizer.load(tokens)
    ids, mask = render_conversation(tokenizer, conversation, max_tokens=_NO_LIMIT)
    # Datasets come from the network: escape control characters, which could move the cursor.
    pieces = [(is_target, escaped(tokenizer.decode(part))) for is_target, part in _spans(ids, mask)]
    if as_json:
        tree = {"ids": ids, "mask": mask, "conversation": conversation}
        print_json({"task": task, "split": split, "index": index, **tree})
        return
    print_line(f"{task} {split} {index}: {len(ids)} tokens, {sum(mask)} of them learnt")
    for is_target, text in pieces:
        shown = styled(text, "bold green" if is_target else "dim", sys.stdout)
        # No terminal, or NO_COLOR: the learnt part is marked.
        sys.stdout.write(f"{{+{text}+}}" if is_target and shown == text else shown)
    sys.stdout.write("\n")


def _fetch(store: Store, stage: str, run: str, cache: Cache) -> Path:
    manifest = open_usable(store, f"{stage}@{run}", warn=print_warning)
    return fetch(store, manifest, cache) / "files"


def _open_example(directory: Path, task: str, split: str, index: int) -> dict[str, object]:
    from nanochat_core.data.conversations.examples import open_task

    # Each dataset is a folder; other entries are files of the stage itself.
    known = sorted(path.name for path in directory.iterdir() if path.is_dir())
    if task not in known:
        raise ConfigError(f"there is no dataset '{task}' in this run", hint=suggest(task, known))
    examples = open_task(task, directory, split)
    if not 0 <= index < len(examples):
        raise ConfigError(
            f"--index is {index}, {task} has {len(examples)} examples for {split}",
            hint="the first is 0",
        )
    return examples[index]


def _spans(ids: Sequence[int], mask: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    """Yield runs of neighbouring tokens with the same mask: (is target, token ids)."""
    for is_target, group in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        yield is_target, [token for token, _ in group]
