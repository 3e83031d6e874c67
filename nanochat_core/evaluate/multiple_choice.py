"""Answer questions with lettered choices by the likeliest letter, without generating text.

Of the logits of an answer's first token only those of the letters are compared, as in nanochat.
"""

from collections.abc import Sequence

import torch

from nanochat_core.errors import DataError
from nanochat_core.model.gpt import GPT
from nanochat_core.model.trees import PackedTree, Tree, packs_of, tokens_of_pack
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_for_completion
from tasks.base import Conversation


def has_letters(conversation: Conversation) -> bool:
    """Return whether the conversation is answered by one of its letters."""
    return "letters" in conversation


@torch.no_grad()
def likeliest_letters(
    model: GPT, tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> list[str]:
    """Return the letter with the highest logit as first token of each answer, the first of equals.

    Prompts may be longer than the model's training context. Raises DataError if a letter is not a
    single token.
    """
    device = model.lm_head.weight.device
    trees = [_tree(render_for_completion(tokenizer, c)) for c in conversations]
    ids = [[_token(tokenizer, letter) for letter in c["letters"]] for c in conversations]
    # The logits of all letters of all questions, a few columns instead of the vocabulary.
    wanted = sorted({token for tokens in ids for token in tokens})
    column = {token: i for i, token in enumerate(wanted)}
    every = torch.tensor(wanted, device=device)
    # Copied to the host only at the end, so that no pack waits for the GPU.
    scores = [torch.zeros(0, len(wanted))]
    for part in packs_of((tree.num_tokens for tree in trees), tokens_of_pack(device)):
        HEARTBEAT.beat("evaluating")
        pack = PackedTree(trees[part.start : part.stop], device)
        scores.append(model.logits_at(pack.read(model), every).float())
    table = torch.cat([some.cpu() for some in scores])
    answers: list[str] = []
    for row, tokens, conversation in zip(table, ids, conversations, strict=True):
        answers.append(conversation["letters"][int(row[[column[t] for t in tokens]].argmax())])
    return answers


def _tree(prompt: Sequence[int]) -> Tree:
    return Tree(trunk=prompt, branches=(), rows=(len(prompt) - 1,))


def _token(tokenizer: Tokenizer, letter: str) -> int:
    ids = tokenizer.encode(letter)
    if len(ids) != 1:
        raise DataError(f"the letter {letter!r} is {len(ids)} tokens, expected one")
    return ids[0]
