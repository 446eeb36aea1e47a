"""Between text and tokens: prompts from chat messages, answer text from tokens as they come, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backend.errors import BadRequest

_REPLACEMENT = "�"
_HELD_TOKENS = 8  # a character is at most 4 bytes, so at most 4 tokens; longer tails are not going to become valid


class TextStream:
    """The text of an answer, token by token. Holds back incomplete UTF-8 and what may become a stop string.

    decode: token ids → text. context: the last tokens of the prompt, so that a first token keeps its leading space.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens = list(context)
        self._prefix, self._read = 0, len(self._tokens)
        self._released = 0
        self._finished = False
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; True when a stop string is complete: the text then ends before it, and takes nothing more."""
        assert not self.stopped
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        after = self._decode(self._tokens[self._prefix :])
        waiting = len(self._tokens) - self._read
        if after.endswith(_REPLACEMENT) and waiting < _HELD_TOKENS:
            return False
        self._prefix, self._read = self._read, len(self._tokens)
        return self._append(after[len(before) :])

    def finish(self) -> None:
        """The answer is over: what was held is text now, also an incomplete character."""
        if not self.stopped and self._read < len(self._tokens):
            before = self._decode(self._tokens[self._prefix : self._read])
            self._append(self._decode(self._tokens[self._prefix :])[len(before) :])
        self._finished = True

    def take(self) -> str:
        """Text that is certain and was not taken before."""
        end = len(self.text)
        if not self._finished and not self.stopped:
            end -= self._possible_stop()
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece

    @property
    def taken(self) -> int:
        """Characters taken so far."""
        return self._released

    def _append(self, piece: str) -> bool:
        longest = max(map(len, self._stop), default=1)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
        return self.stopped

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0


class Tokenizer:
    """The target's tokenizer: chat template, encoding, decoding, and the bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.size: int = len(tokenizer)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._pieces = {token: piece for piece, token in vocabulary.items()}
        self._special = frozenset(tokenizer.all_special_ids)
        self._byte_level = "Ġ" in "".join(list(vocabulary)[:2000]) or "Ġt" in vocabulary
        self._bytes = {character: byte for byte, character in _byte_characters().items()}

    @property
    def eos_token(self) -> int | None:
        token: int | None = self._tokenizer.eos_token_id
        return token

    @property
    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    @property
    def fast(self) -> Any:
        """The transformers tokenizer itself."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def template_mentions(self, word: str) -> bool:
        return word in str(self._tokenizer.chat_template or "")

    def encode(self, text: str, *, special: bool) -> list[int]:
        """special: add what the tokenizer adds around a text of its own (a begin token, say)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, also where they are only a part of a character."""
        piece = self._pieces.get(token)
        if piece is None:
            return b""
        if token in self._special or not self._byte_level:
            if len(piece) == 6 and piece.startswith("<0x"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace("▁", " ").encode()
        try:
            return bytes(self._bytes[character] for character in piece)
        except KeyError:
            return piece.encode()

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[int]:
        """Prompt tokens of a conversation. A final assistant message is continued, also when it is empty.

        Raises BadRequest where the model's template refuses the messages.
        """
        told = list(messages)
        begun = ""
        if told and told[-1]["role"] == "assistant" and not told[-1].get("tool_calls"):
            begun = str(told.pop().get("content") or "")
        try:
            text = self._tokenizer.apply_chat_template(
                told, tools=tools or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever Jinja raises
            raise BadRequest(f"the model's chat template refused these messages: {error}", param="messages") from error
        return self.encode(text + begun, special=False)


def _byte_characters() -> dict[int, str]:
    """GPT-2's byte alphabet: which printable character stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    for n, byte in enumerate(byte for byte in range(256) if byte not in characters):
        characters[byte] = chr(256 + n)
    return characters
