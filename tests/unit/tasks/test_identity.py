import pytest

from tasks.base import check_conversation, prompt_key
from tasks.generated import identity


def examples(split, num_examples=1000, *, seed=0):
    return list(identity.generate(split, num_examples, grade=1, seed=seed))


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_file_holds_short_plain_conversations(split):
    for conversation in examples(split):
        check_conversation(conversation)
        assert conversation["messages"][-1]["role"] == "assistant"
        for message in conversation["messages"]:
            assert message["content"].isascii()
            assert 0 < len(message["content"]) <= 120


def test_there_are_conversations_of_one_and_of_two_questions():
    assert len(examples("train")) >= 60
    assert len(examples("test")) >= 10
    assert {len(c["messages"]) for c in examples("train")} == {2, 4}


def test_the_test_questions_are_put_in_other_words():
    train, test = ([prompt_key(c) for c in examples(split)] for split in ("train", "test"))
    assert len(set(train + test)) == len(train) + len(test)


def test_every_test_answer_is_learnt_in_training():
    last = {
        split: {c["messages"][-1]["content"] for c in examples(split)}
        for split in ("train", "test")
    }
    assert last["test"] <= last["train"]


def test_asking_for_more_gives_each_conversation_once_and_for_fewer_a_prefix():
    everything = examples("train")
    assert examples("train", 10) == everything[:10]
    assert examples("train", 10**6) == everything
    assert examples("train", seed=1) != everything
