"""SmolTalk: general conversations, in the version for small models (Ben Allal et al. 2025,
arXiv:2502.02737).
"""

from tasks.base import Conversation, TaskError, check_conversation, kind_of
from tasks.kinds.sources import HubDataset, HubTask, Row


def convert(row: Row) -> Conversation:
    """Convert a row (messages) to a conversation. Its last question may have no answer."""
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise TaskError("column 'messages' holds no list")
    conversation = {"messages": [_message(message) for message in messages]}
    check_conversation(conversation)
    if all(message["role"] != "assistant" for message in conversation["messages"]):
        raise TaskError("the conversation has no answer")
    return conversation


def _message(message: object) -> dict[str, object]:
    if not isinstance(message, dict):
        raise TaskError(f"a message is {kind_of(message)}")
    return {"role": message.get("role"), "content": message.get("content")}


TASK = HubTask(
    name="smoltalk",
    dataset=HubDataset(
        repository="HuggingFaceTB/smol-smoltalk",
        revision="main",
        files={split: f"data/{split}-*.parquet" for split in ("train", "test")},
    ),
    convert=convert,
    grader=None,
)
