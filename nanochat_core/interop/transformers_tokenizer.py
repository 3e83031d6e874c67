"""Write and read a tokenizer of Hugging Face transformers: tokenizer.json, config, chat template.

It gives the same ids for a text, and the same ids and mask for a conversation, as
nanochat_core/tokenizer/chat.py, with one exception: transformers converts special tokens that are
spelled out in a text to special ids, which ours never does.
"""

import json
from pathlib import Path
from typing import Any

from nanochat_core.errors import ModelError, reason_of
from nanochat_core.interop.pickled_tokenizer import make_tokenizer
from nanochat_core.job import write_json
from nanochat_core.tokenizer.bpe import BOS, SPECIAL_TOKENS, Tokenizer

# All that an assistant writes between two tool results is one {% generation %} block: transformers'
# mask of a block that ends in a character of several tokens misses all but the first of them.
_TEMPLATE = """\
{%- if not messages or messages[-1]['role'] == 'system' -%}
{{- raise_exception('a conversation needs a message of the user') -}}
{%- endif -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] + '\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}
{%- set turns = messages -%}
{%- endif -%}
{{- '<|bos|>' -}}
{%- for message in turns -%}
{%- if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
{{- raise_exception('roles take turns: user, assistant, user, ...') -}}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- '<|user_start|>' + (system if loop.first else '') + message['content'] + '<|user_end|>' -}}
{%- elif message['content'] is string -%}
{{- '<|assistant_start|>' -}}
{%- generation -%}{{- message['content'] + '<|assistant_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- '<|assistant_start|>' -}}
{%- set own = namespace(text='') -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'python_output' -%}
{%- generation -%}{{- own.text -}}{%- endgeneration -%}
{%- set own.text = '' -%}
{{- '<|output_start|>' + part['text'] + '<|output_end|>' -}}
{%- elif part['type'] == 'python' -%}
{%- set own.text = own.text + '<|python_start|>' + part['text'] + '<|python_end|>' -%}
{%- elif part['type'] == 'text' -%}
{%- set own.text = own.text + part['text'] -%}
{%- else -%}
{{- raise_exception('a part is text, python or python_output, not ' + part['type']) -}}
{%- endif -%}
{%- endfor -%}
{%- generation -%}{{- own.text + '<|assistant_end|>' -}}{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant_start|>' -}}
{%- endif -%}
"""


_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}


def write_transformers_tokenizer(tokenizer: Tokenizer, directory: Path, *, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`.

    `context` is the model's context length in tokens.
    """
    # write_json escapes non-ASCII, which loses no readability: the vocabulary is spelled bytes.
    write_json(directory / "tokenizer.json", _tree(tokenizer))
    (directory / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": "<|assistant_end|>",
            "pad_token": "<|assistant_end|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "padding_side": "left",  # generation continues at the right end
        },
    )


def read_transformers_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a tokenizer.json. Raises ModelError unless it is one of nanochat's."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        vocabulary: dict[str, int] = tree["model"]["vocab"]
        pattern = tree["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        special = {item["content"]: item["id"] for item in tree["added_tokens"]}
        spelled = {letter: value for value, letter in _LETTERS.items()}
        ranks = {
            bytes(spelled[letter] for letter in token): rank
            for token, rank in vocabulary.items()
            if token not in special  # other converters list them here too
        }
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {reason_of(error)}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path} is not a tokenizer of nanochat's: {type(error).__name__}: {error}"[:300],
            hint="only tokenizers that nanochat or nanochat-flows trained can be read",
        ) from error
    return make_tokenizer(path, ranks, special, pattern)


def _tree(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of tokenizer.json."""
    # tiktoken merges the two neighbours that form the token of the lowest id, whichever pair they
    # are. So the merges are all pairs that form a token, in order of that token's id.
    ranks = tokenizer.ranks
    spelled = {token: _spell(token) for token in ranks}
    merges: list[list[str]] = []
    for token in ranks:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[spelled[left], spelled[right]] for left, right in known]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": tokenizer.special(name),
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for name in SPECIAL_TOKENS
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": tokenizer.pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                _BYTE_LEVEL,
            ],
        },
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # As in tiktoken: a piece that is a token is not split and merged first.
            "ignore_merges": True,
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def _spell(token: bytes) -> str:
    return "".join(_LETTERS[value] for value in token)


def _letters() -> dict[int, str]:
    """Return GPT-2's printable character for every byte: itself if printable, else one from 256."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in plain]
    return {v: chr(v) for v in plain} | {v: chr(256 + i) for i, v in enumerate(others)}


_LETTERS = _letters()
