"""Chat answers as a sequence of blocks (reasoning, text, refusal, calls), for dialects that tell them one by one.

`Block` is one of them; `AnswerInBlocks` reads an answer in one piece, `BlockReader` a stream. A dialect says how a
block looks in its own words. Counting and paying stay with what they extend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Raw

from proxy.openai.chunks import Piece, StreamReader
from proxy.openai.plain import NoAnswer, PlainAnswer
from proxy.openai.requests import Call
from proxy.openai.sse import data_of

Kind = Literal["reasoning", "text", "refusal", "call"]


@dataclass(slots=True)
class Block:
    """One part of an answer, in the pieces in which it came."""

    index: int
    kind: Kind
    parts: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    logprobs: list[Raw] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments, as JSON text."""
        return "".join(self.parts)


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    """A message, or a delta of one."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None

    def texts(self) -> tuple[tuple[Kind, str], ...]:
        reasoning = _text(self.reasoning_content) or _text(self.reasoning)
        return ("reasoning", reasoning), ("text", _text(self.content)), ("refusal", self.refusal or "")


class _Logprobs(msgspec.Struct):
    content: list[Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    """vLLM and SGLang: the stop sequence that was met."""

    @property
    def probabilities(self) -> list[Raw]:
        return (self.logprobs.content or []) if self.logprobs is not None else []


class Frame(msgspec.Struct):
    """A chat answer, or a chunk of one."""

    model: str | None = None
    service_tier: str | None = None
    choices: list[_Choice] | None = None


_frames = msgspec.json.Decoder(Frame)


class AnswerInBlocks(PlainAnswer):
    """A chat answer in one piece. Raises NoAnswer also when its first choice holds no message."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body, "choices")
        try:
            self.frame = _frames.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise NoAnswer(f"it cannot be translated: {error}") from None
        choice = self.frame.choices[0] if self.frame.choices else _Choice()
        if choice.message is None:
            raise NoAnswer("it has no message")
        self.finish_reason = choice.finish_reason
        self.stop_reason = choice.stop_reason
        self.blocks: list[Block] = []
        for kind, text in choice.message.texts():
            if text:
                probabilities = choice.probabilities if kind == "text" else []
                self.blocks.append(Block(len(self.blocks), kind, [text], logprobs=probabilities))
        for call in choice.message.tool_calls or ():
            function = call.function or _Function()
            block = Block(len(self.blocks), "call", [function.arguments or ""], call.id or "", function.name or "")
            self.blocks.append(block)


class BlockReader(StreamReader):
    """A chat stream, told block by block: one is open at a time, and what was closed stays closed."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.frame = Frame()
        self._began = False
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}
        self._next: Frame | None = None

    def read(self, event: bytes) -> Piece:
        """As the base does; a chunk that cannot be translated is the upstream's error."""
        self._next = None
        piece = super().read(event)
        if not piece.read or piece.done or piece.error is not None:
            return piece
        payload = data_of(piece.out)
        if payload:
            try:
                self._next = _frames.decode(payload)
            except (msgspec.MsgspecError, RecursionError) as error:
                return Piece(b"", error=str(error).encode())
            if self._is_late(self._next):
                return Piece(b"", error=b"a call goes on after another one began")
        return piece

    def accept(self, piece: Piece) -> bytes:
        super().accept(piece)
        frame, self._next = self._next, None
        if frame is None:
            return b""
        if not self._began:
            self.frame = frame
        out = [self.start()]
        for choice in (frame.choices or ())[:1]:
            if choice.delta is not None:
                self._say(choice.delta, choice.probabilities, out)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self.stop_reason = choice.stop_reason
        return b"".join(out)

    def start(self) -> bytes:
        """What comes before everything else, once."""
        if self._began:
            return b""
        self._began = True
        return self.begin()

    def close_open(self, status: str = "completed") -> bytes:
        """End the block that is open."""
        block, self._open = self._open, None
        return b"" if block is None else self.closed(block, status)

    # What a dialect says

    def begin(self) -> bytes:
        raise NotImplementedError

    def opened(self, block: Block) -> bytes:
        raise NotImplementedError

    def grown(self, block: Block, text: str, logprobs: list[Raw]) -> bytes:
        raise NotImplementedError

    def closed(self, block: Block, status: str) -> bytes:
        """status: completed, or incomplete where the answer was cut in the middle of it."""
        raise NotImplementedError

    # Which block it belongs to

    def _say(self, delta: _Said, logprobs: list[Raw], out: list[bytes]) -> None:
        for kind, text in delta.texts():
            if text:
                if self._open is None or self._open.kind != kind:
                    self._begin_block(Block(len(self.blocks), kind), out)
                self._grow(text, logprobs if kind == "text" else [], out)
        for call in delta.tool_calls or ():
            function = call.function or _Function()
            known = self._known(call)
            if known is None:
                known = Block(len(self.blocks), "call", [], call.id or "", function.name or "")
                self._calls[len(self._calls) if call.index is None else call.index] = known
                self._begin_block(known, out)
            if function.arguments:
                self._grow(function.arguments, [], out)

    def _begin_block(self, block: Block, out: list[bytes]) -> None:
        out.append(self.close_open())
        self.blocks.append(block)
        self._open = block
        out.append(self.opened(block))

    def _grow(self, text: str, logprobs: list[Raw], out: list[bytes]) -> None:
        block = self._open
        assert block is not None
        block.parts.append(text)
        block.logprobs += logprobs
        out.append(self.grown(block, text, logprobs))

    def _known(self, call: _ToolCall) -> Block | None:
        """The block of a call that goes on. A new id begins a new one: some upstreams give all the same index."""
        if call.index is None:
            last = self.blocks[-1] if self.blocks and self.blocks[-1].kind == "call" else None
            return last if last is not None and call.id in (None, "", last.call_id) else None
        known = self._calls.get(call.index)
        return known if known is not None and call.id in (None, "", known.call_id) else None

    def _is_late(self, frame: Frame) -> bool:
        for choice in (frame.choices or ())[:1]:
            for call in (choice.delta.tool_calls or ()) if choice.delta is not None else ():
                known = self._known(call)
                if known is not None and known is not self._open and call.function and call.function.arguments:
                    return True
        return False


def _text(content: Any) -> str:
    """Of a string, or of a list of text parts (Mistral)."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""
