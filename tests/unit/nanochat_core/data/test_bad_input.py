"""What people give that cannot be used: which stage says so, where in the input, and what to do.

The readers' own tests know more kinds of damage; here whole stages run, and nothing half-written
may be left for the stage that follows.
"""

from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.profiles import open_profile
from nanochat_core.config import TokenizerConfig
from nanochat_core.data import tokens as tokenize
from nanochat_core.data.shard_files import shard_name
from nanochat_core.errors import ConfigError, ModelError
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import tokenizer as tokenizer_stage
from tests.support.nanochat_core.data.fixtures import refused

TEXTS = [f"word{i} thing{i * 7}" for i in range(300)]
SETTINGS = TokenizerConfig(vocab_size=300, max_chars=10**6, document_cap=10**5)


@pytest.mark.parametrize("stage", ["tokenizer", "tokens"])
def test_a_bad_shard_stops_the_stage_that_reads_it(stage, make_job, write_shards, tokenizer_dir):
    shards = write_shards([TEXTS, TEXTS, ["held out"]])
    damaged = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": damaged}), shards / shard_name(1))
    job = make_job(stage, {"shards": shards, "tokenizer": tokenizer_dir}, tokenizer=SETTINGS)
    run = {"tokenizer": tokenizer_stage.run, "tokens": tokenize.run}[stage]
    complaint = r"shard_00001\.parquet is not UTF-8 in row 1 .row group 0."
    refused(complaint, run, job, hint="", leaves=True)
    # Other shards may be finished, for the next attempt; of the bad one there is nothing.
    left = {path.name.partition(".")[0] for path in job.output.iterdir()}
    assert left <= {"shard_00000", "shard_00002"}


def test_a_tokenizer_of_another_vocabulary_is_named_with_both_numbers(tokenizer_dir):
    tokenizer = Tokenizer.load(tokenizer_dir)
    tokenizer.check_model(300)
    complaint = "has 300 tokens, the model has 32768"
    refused(complaint, tokenizer.check_model, 32768, kind=ModelError, hint="")


OVERRIDES = [
    'sft.mixture=[{"task": "poems", "num_examples": null, "epochs": 1}]',
    'sft.mixture=[{"task": "identity", "num_examples": null, "epochs": 0}]',
    'chat_eval.tasks=[{"name": "identity", "max_examples": -5, "max_new_tokens": 8}]',
    *("model.vocab_size=4096", "rows.sequence_len=256", "sft.eval_examples=0"),
]


def test_settings_that_do_not_fit_each_other_are_refused_before_anything_runs(transcript):
    for override in OVERRIDES:
        call = partial(open_profile, depth=2, overrides=[override])
        transcript.refused(override, ConfigError, call, "tiny")


def test_a_stage_that_trains_on_no_conversation_needs_none_to_test_with():
    overrides = ["midtrain.mixture=[]", "midtrain.eval_examples=0"]
    assert open_profile("tiny", depth=2, overrides=overrides).run.midtrain.eval_examples == 0
