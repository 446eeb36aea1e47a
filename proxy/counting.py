"""Counting what an upstream does not say: with its own tokenizer where one is configured, by rules of thumb where not.

Nothing is downloaded: a tokenizer is a local directory with a `tokenizer.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ledger.errors import Invalid

BYTES_PER_BILLED_TOKEN = 6
"""More than most texts have, so that nobody pays for more than was used."""


class Counting(Protocol):
    """How the tokens of one upstream's texts are counted."""

    needs_text: bool
    """Whether a stream's text must be kept until its end."""

    def prompt_tokens(self, text: str) -> int: ...

    def answer_tokens(self, text: str, deltas: int | None) -> int:
        """deltas: of a stream, how many brought something."""
        ...


class RulesOfThumb:
    """A token per six bytes, cautiously; of a stream one per delta that says something."""

    needs_text = False

    def prompt_tokens(self, text: str) -> int:
        return max(1, _bytes(text) // BYTES_PER_BILLED_TOKEN)

    def answer_tokens(self, text: str, deltas: int | None) -> int:
        return -(-_bytes(text) // BYTES_PER_BILLED_TOKEN) if deltas is None else deltas


class OwnTokenizer:
    """The upstream's own tokenizer. Raises Invalid when there is none in the directory, or no library to read it."""

    needs_text = True

    def __init__(self, directory: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise Invalid("`tokenizer:` needs the package `tokenizers`: pip install tokenizers", "tokenizer") from None
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise Invalid(f"no tokenizer: {path} does not exist", "tokenizer")
        self._tokenizer: Any = Tokenizer.from_file(str(path))

    def prompt_tokens(self, text: str) -> int:
        return max(1, self._count(text))

    def answer_tokens(self, text: str, deltas: int | None) -> int:
        return self._count(text)

    def _count(self, text: str) -> int:
        """As a batch of one: only for batches does the library let other threads run meanwhile."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def counting_of(directory: str | None) -> Counting:
    """For an upstream's `tokenizer:` setting. Raises Invalid."""
    return RulesOfThumb() if directory is None else OwnTokenizer(directory)


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))
