"""What a person is warned of before training on a text."""

import pytest

from nanochat_core.data.text.counted_text import CountedText
from nanochat_core.data.text.documents import Document

ROWS = [f"row letter {i}: {'dear ' * (i % 7)}" for i in range(100)]
BAD = ["\x00\x01binary\x02"] * 60 + ["the same"] * 200 + [" "] * 500


@pytest.mark.parametrize(
    ("texts", "warnings"),
    [
        (
            ROWS + BAD,
            [
                "the text has only 5,105 characters",
                "258 of 360 documents are copies of an earlier one",
                "60 of 360 documents look like no text: they have control characters",
            ],
        ),
        ([f"{text} {'and so on ' * 1000}" for text in ROWS], []),
    ],
)
def test_the_log_warns_of_what_is_wrong_with_the_text(texts, warnings):
    counted = CountedText(Document(text=text, group=text) for text in texts)
    assert [document.text for document in counted] == texts
    assert [*counted.warnings()] == warnings
