"""What is exported for transformers computes, encodes and renders what we do."""

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.interop.card import model_card
from nanochat_core.engine.reference import generate_naive
from nanochat_core.eras import ERAS
from nanochat_core.errors import ModelError
from nanochat_core.interop.transformers_files import write_transformers_model
from nanochat_core.interop.transformers_tokenizer import write_transformers_tokenizer
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from nanochat_core.tokenizer.chat import render_conversation, render_for_completion
from tasks.base import prompt_of
from tasks.names import TASKS
from tests.support.nanochat_core.interop.models import a_model, a_tokenizer
from tests.unit.nanochat_core.tokenizer.test_chat import example_of

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not find_spec("transformers"), reason="the export extra is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]
JANUARY = "2026-01-05"
PER_TASK = 8  # conversations
# Of logits up to 15 in fp32. Kernels, and so their rounding, differ between CPUs: 1.1e-5 was seen;
# a wrong mask or position is off by a tenth and more.
CLOSE = 1e-4
LATER = [era for era in ERAS if era != JANUARY]


@pytest.fixture(autouse=True, scope="module")
def quiet(tmp_path_factory):
    """transformers copies modeling files to a directory of these tests."""
    paths = list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("hf"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        yield
    sys.path[:] = paths
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def export(directory, model, dtype=torch.float32):
    directory.mkdir()
    return write_transformers_model(directory, model, a_tokenizer(), dtype=dtype)


def load(directory, *, trust, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=trust, dtype=dtype, attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="module")
def pair_of(quiet, tmp_path_factory):
    """pair_of(era) -> our model, and transformers' reading of its export; made once an era."""

    @cache
    def pair_of(era):
        directory = tmp_path_factory.mktemp("pair") / "out"
        model = a_model(era)
        is_own_code = export(directory, model)
        assert is_own_code == (era != JANUARY) == bool(list(directory.glob("*.py")))
        theirs = load(directory, trust=is_own_code)
        if not is_own_code:
            assert type(theirs).__name__ == "NanoChatForCausalLM"
            round_rope(theirs)
        return model, theirs

    return pair_of


def some_tokens(rows, length):
    return torch.randint(290, (rows, length), generator=torch.Generator().manual_seed(5))


def round_rope(theirs):
    """The rotary table as it was trained with: rounded to bf16, also in fp32."""
    forward = theirs.model.rotary_emb.forward

    def rounded(*args, **kwargs):
        return tuple(table.bfloat16().to(table.dtype) for table in forward(*args, **kwargs))

    theirs.model.rotary_emb.forward = rounded


@pytest.mark.parametrize("era", ERAS)
def test_the_logits_are_ours(pair_of, era):
    model, theirs = pair_of(era)
    tokens = some_tokens(2, 250)  # longer than a short window
    with torch.no_grad():
        ours, got = model(tokens), theirs(tokens).logits
    assert ours.std() > 0.5
    assert (got - ours).abs().max() <= CLOSE


@pytest.mark.parametrize("era", [JANUARY, "2026-03-14"])
def test_bf16_weights_are_the_rounded_ones(tmp_path, era):
    model = a_model(era, precision="bf16")
    trust = export(tmp_path / "out", model, torch.bfloat16)
    theirs = load(tmp_path / "out", trust=trust, dtype=torch.bfloat16)
    tokens = some_tokens(2, 64)
    with torch.no_grad():
        ours, got = model(tokens), theirs(tokens).logits.float()
    exact = a_model(era)
    with torch.no_grad():
        error = (exact(tokens) - ours).abs().mean()
    assert (got - ours).abs().mean() < 1.5 * error


@pytest.mark.parametrize("era", ERAS)
def test_greedy_continuations_are_ours(pair_of, era):
    (model, theirs), tokenizer = pair_of(era), a_tokenizer()
    prompt = [tokenizer.bos, *some_tokens(1, 150)[0].tolist()]
    ours = generate_naive(
        model, tokenizer, prompt, max_tokens=24, temperature=0.0, top_k=None, seed=1
    )
    out = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        temperature=None,
        top_k=None,
        max_length=None,
        max_new_tokens=24,
    )
    got = out[0, len(prompt) :].tolist()
    if ours.finished:
        got = got[:-1]
    assert got == ours.ids


@pytest.mark.parametrize("era", LATER)
def test_padding_to_the_left_and_the_cache_change_nothing(pair_of, era):
    model, theirs = pair_of(era)
    tokens = some_tokens(2, 120)
    mask = torch.ones_like(tokens)
    mask[1, :50] = 0
    with torch.no_grad():
        padded = theirs(tokens, attention_mask=mask, use_cache=False).logits
        alone = model(tokens[1:, 50:])
        read = theirs(tokens[:, :100], attention_mask=mask[:, :100], use_cache=True)
        rest = theirs(
            tokens[:, 100:], attention_mask=mask, past_key_values=read.past_key_values
        ).logits
    assert (padded[0] - model(tokens[:1])[0]).abs().max() <= CLOSE
    assert (padded[1, 50:] - alone[0]).abs().max() <= CLOSE
    assert (rest - padded[:, 100:]).abs().max() <= CLOSE


def test_the_loss_is_that_of_predicting_the_next_token(pair_of):
    model, theirs = pair_of("2026-03-14")
    tokens = some_tokens(2, 40)
    with torch.no_grad():
        expected = model.token_losses(tokens[:, :-1], tokens[:, 1:]).mean()
        got = theirs(tokens, labels=tokens).loss
        summed = theirs(tokens, labels=tokens, num_items_in_batch=10).loss
    torch.testing.assert_close(got, expected, atol=CLOSE, rtol=0)
    torch.testing.assert_close(summed, expected * 78 / 10, atol=1e-4, rtol=0)


def test_what_the_modeling_file_is_asked_for_it_does_or_refuses(pair_of):
    from transformers import StaticCache

    _, theirs = pair_of("2026-03-14")
    tokens = some_tokens(1, 30)
    spread = 2 * torch.arange(30)[None]
    with torch.no_grad():
        whole = theirs(tokens).logits
        assert (theirs(tokens, position_ids=spread).logits - whole).abs().max() > 1e-3
        listed = theirs(tokens, logits_to_keep=torch.tensor([3, 7])).logits
        torch.testing.assert_close(listed, whole[:, [3, 7]], atol=CLOSE, rtol=0)
        assert torch.equal(theirs(tokens, return_dict=False)[0], whole)
        for asked in ({"inputs_embeds": whole}, {"output_hidden_states": True}):
            with pytest.raises(ValueError, match="does not take"):
                theirs(tokens, **asked)
        with pytest.raises(ValueError, match="keeps a DynamicCache"):
            theirs(tokens, past_key_values=StaticCache(theirs.config, 64))


def test_the_cards_own_lines_run_and_need_nothing_of_ours(tmp_path, monkeypatch, capsys):
    code = ""
    for era in (JANUARY, "2026-03-14"):
        directory = tmp_path / era
        own = export(directory, a_model(era))
        card = model_card(None, None, name="x", form="hf", era=None, is_own_code=own)
        lines = card.partition("```python\n")[2].partition("```")[0]
        code += lines.replace("OWNER/NAME", str(directory)) + "\n"
    # What is imported of ours from here on is imported by these lines.
    for name in modules_of_ours():
        monkeypatch.delitem(sys.modules, name)
    exec(code, {})
    assert modules_of_ours() == []
    begin = "<|bos|><|user_start|>Hello<|user_end|><|assistant_start|>"
    printed = capsys.readouterr().out
    assert printed.startswith(begin)
    assert printed.count(begin) == 2


def modules_of_ours():
    ours = ("nanochat_core", "flows", "infra", "tasks")
    return [name for name in sys.modules if name.partition(".")[0] in ours]


def test_fp16_is_refused_with_its_reason(tmp_path):
    with pytest.raises(ModelError, match="leave the range of fp16") as caught:
        export(tmp_path / "out", a_model(JANUARY), torch.float16)
    assert "bf16" in str(caught.value.hint)
    assert not list((tmp_path / "out").iterdir())


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A tokenizer trained on Python's own text, and transformers' reading of it."""
    from transformers import AutoTokenizer

    files = (Path(module.__file__) for module in (shutil, subprocess, os))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    ours = Tokenizer.train(iter([text, "naïve Ångström 数字 12345 don't"] * 2), vocab_size=2000)
    directory = tmp_path_factory.mktemp("tokenizer")
    write_transformers_tokenizer(ours, directory, context=256)
    return ours, AutoTokenizer.from_pretrained(directory)


PIECES = ["def ", "return", "  ", "\n\n", "    if ", "self.", "12", "345", "'ll", "é", "数", "=="]
LETTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from("abcdefgh theron's 01,\n\r\t")
TEXTS = st.lists(st.sampled_from(PIECES) | LETTERS, max_size=100).map("".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(text=TEXTS.filter(lambda text: "<|" not in text))  # what transformers reads as a special one
def test_ids_are_ours(tokenizers, text):
    ours, theirs = tokenizers
    expected = ours.encode(text)
    assert theirs(text)["input_ids"] == expected
    assert theirs.decode(expected) == text


def test_special_tokens_are_single_ids(tokenizers):
    ours, theirs = tokenizers
    for name in SPECIAL_TOKENS:
        assert theirs.convert_tokens_to_ids(name) == ours.special(name)
        assert theirs(name)["input_ids"] == [ours.special(name)]
    ends = (ours.bos, ours.special("<|assistant_end|>"))
    assert (theirs.bos_token_id, theirs.eos_token_id) == ends


SYSTEM = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  the\n\n12 things "},
        {"role": "assistant", "content": " theory\n"},
        {"role": "user", "content": "{{ 7 }} {% if x %}"},
        {"role": "assistant", "content": ""},
    ]
}


@pytest.mark.parametrize("name", ["system", *sorted(TASKS)])
def test_the_template_renders_what_we_render(tokenizers, name):
    ours, theirs = tokenizers
    examples = (example_of(name, seed) for seed in range(PER_TASK)) if name in TASKS else [SYSTEM]
    for conversation in examples:
        ids, mask = render_conversation(ours, conversation, max_tokens=10**6)
        got = theirs.apply_chat_template(
            conversation["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        assert got["input_ids"] == ids
        assert got["assistant_masks"] == mask
        assert any(mask)
        prompt = theirs.apply_chat_template(
            prompt_of(conversation)["messages"], add_generation_prompt=True, return_dict=True
        )
        assert prompt["input_ids"] == render_for_completion(ours, conversation)


ASKED = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "x"}], "roles take turns"),
        ([ASKED, {"role": "tool", "content": "x"}], "roles take turns"),
        ([ASKED, {"role": "system", "content": "x"}, ASKED], "roles take turns"),
        ([{"role": "system", "content": "x"}], "needs a message of the user"),
        ([ASKED, {"role": "assistant", "content": [{"type": "image", "text": "x"}]}], "not image"),
    ],
)
def test_what_we_would_not_render_the_template_refuses(tokenizers, messages, message):
    with pytest.raises(Exception, match=message):
        tokenizers[1].apply_chat_template(messages)
