"""What people give that cannot be used: which stage says so, where in the input, and what to do.

The readers' own tests know more kinds of damage; here whole stages run, and nothing half-written
may be left for the stage that follows.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.profiles import open_profile
from nanochat_core.config import RowsConfig, TokenizerConfig
from nanochat_core.data import rows
from nanochat_core.data import tokens as tokenize
from nanochat_core.data.row_files import Rows
from nanochat_core.data.shard_files import shard_name
from nanochat_core.errors import ConfigError, DataError, ModelError
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import tokenizer as tokenizer_stage

# A job's log stays open for as long as its process lives.

TEXTS = [f"word{i} thing{i * 7}" for i in range(300)]
SETTINGS = TokenizerConfig(vocab_size=300, max_chars=10**6, document_cap=10**5)
BAD_SHARDS = {
    "numbers": ({"text": [1, 2]}, "has a column 'text' of int64, not strings"),
    "not utf-8": (
        {"text": pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())},
        "is not UTF-8 in row 1 .row group 0.",
    ),
}


@pytest.mark.parametrize("kind", BAD_SHARDS)
@pytest.mark.parametrize("stage", ["tokenizer", "tokens"])
def test_a_bad_shard_stops_the_stage_that_reads_it(
    kind, stage, make_job, write_shards, tokenizer_dir
):
    shards = write_shards([TEXTS, TEXTS, ["held out"]])
    table, complaint = BAD_SHARDS[kind]
    pq.write_table(pa.table(table), shards / shard_name(1))
    job = make_job(stage, {"shards": shards, "tokenizer": tokenizer_dir}, tokenizer=SETTINGS)
    run = {"tokenizer": tokenizer_stage.run, "tokens": tokenize.run}[stage]
    with pytest.raises(DataError, match=rf"shard_00001\.parquet {complaint}") as error:
        run(job)
    assert error.value.hint
    assert "\n" not in str(error.value)
    # Other shards may be finished, for the next attempt; of the bad one there is nothing.
    left = {path.name.partition(".")[0] for path in job.output.iterdir()}
    assert left <= {"shard_00000", "shard_00002"}


@pytest.fixture
def rows_dir(make_job, write_shards, tokenizer_dir):
    """Rows of 33 tokens of a vocabulary of 300."""
    inputs = {"shards": write_shards([TEXTS, TEXTS]), "tokenizer": tokenizer_dir}
    tokens = make_job("tokens", inputs)
    tokenize.run(tokens)
    settings = RowsConfig(policy="default", sequence_len=32, buffer_documents=50)
    job = make_job("rows", {"tokens": tokens.output}, rows=settings)
    rows.run(job)
    return job.output


def test_rows_of_another_tokenizer_or_of_another_model_are_named_with_both_values(
    rows_dir, tokenizer_dir
):
    made = Rows.open(rows_dir, "train")
    made.check_tokenizer(Tokenizer.load(tokenizer_dir).digest())
    made.check_model(vocab_size=300, sequence_len=32)
    with pytest.raises(DataError, match="rows have vocab_size 300, the model has 512") as error:
        made.check_model(vocab_size=512, sequence_len=32)
    assert error.value.hint
    with pytest.raises(DataError, match="rows have sequence_len 32, the model has 64"):
        made.check_model(vocab_size=300, sequence_len=64)
    with pytest.raises(DataError, match=r"made with tokenizer .*, the one given is 0000") as error:
        made.check_tokenizer("0" * 64)
    assert error.value.hint


def test_a_tokenizer_of_another_vocabulary_is_named_with_both_numbers(tokenizer_dir):
    tokenizer = Tokenizer.load(tokenizer_dir)
    tokenizer.check_model(300)
    with pytest.raises(ModelError, match="has 300 tokens, the model has 32768") as error:
        tokenizer.check_model(32768)
    assert error.value.hint


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (
            'sft.mixture=[{"task": "poems", "num_examples": null, "epochs": 1}]',
            "the task 'poems' is not among task_data.datasets",
        ),
        ("model.vocab_size=4096", "model.vocab_size 4096 differs from tokenizer.vocab_size"),
        ("rows.sequence_len=256", "model.sequence_len .* differs from rows.sequence_len 256"),
        ("sft.eval_examples=0", "sft.eval_examples is 0, expected at least 1"),
        (
            'sft.mixture=[{"task": "identity", "num_examples": null, "epochs": 0}]',
            r"sft.mixture\[0\].epochs is 0, expected at least 1",
        ),
        (
            'chat_eval.tasks=[{"name": "identity", "max_examples": -5, "max_new_tokens": 8}]',
            r"chat_eval.tasks\[0\].max_examples is -5, expected at least 1",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused_before_anything_runs(override, complaint):
    with pytest.raises(ConfigError, match=complaint):
        open_profile("tiny", depth=2, overrides=[override])


def test_a_stage_that_trains_on_no_conversation_needs_none_to_test_with():
    overrides = ["midtrain.mixture=[]", "midtrain.eval_examples=0"]
    assert open_profile("tiny", depth=2, overrides=overrides).run.midtrain.eval_examples == 0
