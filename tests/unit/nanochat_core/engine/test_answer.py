"""An answer's calls of the calculator, its limit and its end, token by token."""

import re

import pytest

from nanochat_core.engine.answer import Answer, end_tokens
from nanochat_core.engine.tools.calls import ToolTokens
from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER

CALL, END, RESULT, RESULT_END = (
    f"<|{name}|>" for name in ("python_start", "python_end", "output_start", "output_end")
)
WITHOUT_RESULT = {
    "not ended": f"{CALL}12*3 is what?",
    "not begun": f"12*3{END} is what?",
    "empty": f"{CALL}{END}.",
    "no value": f"{CALL}1/0{END}.",
    "not arithmetic": f"{CALL}import os{END}.",
    "a special token inside": f"{CALL}1+{RESULT}2{END}.",
    "a result of the model's own": f"{RESULT}36{RESULT_END}.",
}
ANSWERS = {  # what the model writes, the tokens that may be written, the answer
    **{name: (text, 99, text) for name, text in WITHOUT_RESULT.items()},
    "a call": (f"is {CALL}12*3{END}!", 99, f"is {CALL}12*3{END}{RESULT}36{RESULT_END}!"),
    "begun twice": (
        f"{CALL}5*{CALL}7/2{END}",
        99,
        f"{CALL}5*{CALL}7/2{END}{RESULT}3.5{RESULT_END}",
    ),
    "ended twice": (f"{CALL}1+2{END}{END}", 99, f"{CALL}1+2{END}{RESULT}3{RESULT_END}{END}"),
    "two calls": (
        f"{CALL}1{END}{CALL}'aXbX'.count('X'){END}",
        99,
        f"{CALL}1{END}{RESULT}1{RESULT_END}{CALL}'aXbX'.count('X'){END}{RESULT}2{RESULT_END}",
    ),
    "just enough room": (f"{CALL}12*3{END}!!!!", 10, f"{CALL}12*3{END}{RESULT}36{RESULT_END}"),
    "a token too little": (f"{CALL}12*3{END}!!!!", 9, f"{CALL}12*3{END}!!!"),
    "cut in a call": (f"{CALL}12*3{END}", 3, f"{CALL}12"),
    "no room": ("a", 0, ""),
}


def tokens_of(text):
    parts = re.split(r"(<\|\w+\|>)", text)
    ids = [[TOKENIZER.special(p)] if p.startswith("<|") else TOKENIZER.encode(p) for p in parts]
    return [token for some in ids for token in some]


@pytest.mark.parametrize("end", ["<|assistant_end|>", "<|bos|>"])
@pytest.mark.parametrize(("written", "limit", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_results_of_calls_are_forced_whole_or_not_at_all(written, limit, expected, end):
    ends = end_tokens(TOKENIZER)
    answer = Answer(ToolTokens.of(TOKENIZER), ends=ends, limit=limit)
    left, forced = iter(tokens_of(written + end)), []
    while not answer.is_over:
        is_forced = answer.is_forced
        answer.take(-1 if is_forced else next(left))
        forced += [0 if is_forced else 1] * (not answer.finished)
    assert TOKENIZER.decode(answer.ids) == expected
    assert answer.finished == (limit == 99)
    assert (answer.last in ends) == answer.finished
    assert answer.mask == forced
    sampled = [token for token, mask in zip(answer.ids, answer.mask, strict=True) if mask]
    assert sampled == tokens_of(written)[: len(sampled)]
