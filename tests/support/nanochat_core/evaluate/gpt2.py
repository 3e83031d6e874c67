"""A small random GPT-2 with a tokenizer of bytes, in a folder as transformers saves one."""

from pathlib import Path

import torch

BOS = 256


def byte_vocabulary() -> dict[str, int]:
    """GPT-2's letters for bytes, each with the byte as its id."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(i if i in printable else next(others)): i for i in range(256)}


def write_gpt2(folder: Path, *, window: int, template: str | None = None) -> Path:
    """Write the model, which prefers lower-case letters, and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    import tokenizers  # here: five seconds that only the worker of such tests spends
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    # A token for each letter after a space, as GPT-2 has.
    letters = {f"\u0120{letter}": BOS + 1 + i for i, letter in enumerate("ABCD")}
    vocabulary = byte_vocabulary() | {"<|endoftext|>": BOS} | letters
    merges = [("\u0120", letter) for letter in "ABCD"]
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.add_special_tokens(["<|endoftext|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    size = len(vocabulary)
    shape = GPT2Config(
        vocab_size=size,
        n_positions=window,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=BOS,
        eos_token_id=BOS,
    )
    model = GPT2LMHeadModel(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=generator)
        model.transformer.wte.weight[: ord("a")] *= 0.2
        model.transformer.wte.weight[ord("z") + 1 : BOS + 1] *= 0.2
    model.save_pretrained(folder)
    return folder
