"""Count what is wrong with a text while it is read, so that a person learns it before training."""

import hashlib
import re
from collections.abc import Iterable, Iterator

from nanochat_core.data.text.documents import Document

LITTLE = 1_000_000  # characters
MAX_SHARE = 0.1  # of documents that are copies, or no text
MAX_REMEMBERED = 1_000_000  # documents that later ones are compared with
_LOOKED_AT = 1000  # characters of a document
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f\ufffd]")
_MAX_IN_TEXT = 0.05  # of the characters looked at


class CountedText(Iterable[Document]):
    """The documents it was given, counted as they are taken."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self._remembered: set[bytes] = set()
        self._characters = self._copies = self._no_text = self._count = 0

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self._add(document.text)
            yield document

    def _add(self, text: str) -> None:
        if not text.strip():
            return  # blank documents are left out of every text
        self._count += 1
        self._characters += len(text)
        name = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if name in self._remembered:
            self._copies += 1
        elif len(self._remembered) < MAX_REMEMBERED:
            self._remembered.add(name)
        begin = text[:_LOOKED_AT]
        self._no_text += len(_NO_TEXT.findall(begin)) > _MAX_IN_TEXT * len(begin)

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for each thing that a person should know of the text so far."""
        if self._characters < LITTLE:
            yield f"the text has only {self._characters:,} characters"
        for number, what in (
            (self._copies, "are copies of an earlier one"),
            (self._no_text, "look like no text: they have control characters"),
        ):
            if number > MAX_SHARE * self._count:
                yield f"{number:,} of {self._count:,} documents {what}"
