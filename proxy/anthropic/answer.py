"""Chat answers → messages, in one piece or as events. Pure.

Source: https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from proxy.anthropic.errors import error_event
from proxy.anthropic.request import Asked
from proxy.openai.blocks import AnswerInBlocks, Block, BlockReader
from proxy.openai.errors import ApiError
from proxy.openai.requests import Call
from proxy.openai.translation import Object

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


class PlainMessage(AnswerInBlocks):
    """Raises NoAnswer."""

    def __init__(self, request_id: str, call: Call, body: bytes) -> None:
        super().__init__(body)
        self._id = message_id(request_id)
        self._call = call

    def body(self, usage: bytes) -> bytes:
        content = [_content(block) for block in self.blocks]
        reason, sequence = stopped(self.finish_reason, self.stop_reason, self.blocks, self._call.asked)
        model = self.frame.model or self._call.model
        return msgspec.json.encode(_message(self._id, model, content, reason, sequence, usage_of(usage)))


class MessageReader(BlockReader):
    """A chat stream told as the events of a message."""

    keep_alive = PING

    def __init__(self, request_id: str, call: Call) -> None:
        super().__init__(call)
        self._id = message_id(request_id)
        self._call = call

    def begin(self) -> bytes:
        told = self.usage
        usage = {
            "input_tokens": 0 if told is None else told.prompt_tokens or 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = _message(self._id, self.frame.model or self._call.model, [], None, None, usage)
        return event_of("message_start", message=message) + PING

    def opened(self, block: Block) -> bytes:
        match block.kind:
            case "call":
                shown: Object = {"type": "tool_use", "id": _call_id(block), "name": block.name, "input": {}}
            case "reasoning":
                shown = {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                shown = {"type": "text", "text": ""}
        return event_of("content_block_start", index=block.index, content_block=shown)

    def grown(self, block: Block, text: str, logprobs: list[Raw]) -> bytes:
        match block.kind:
            case "call":
                delta = {"type": "input_json_delta", "partial_json": text}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": text}
            case _:
                delta = {"type": "text_delta", "text": text}
        return event_of("content_block_delta", index=block.index, delta=delta)

    def closed(self, block: Block, status: str) -> bytes:
        return event_of("content_block_stop", index=block.index)

    def tail(self, usage: bytes, *, cut: bool) -> bytes:
        if cut:
            self.finish_reason = "length"
        reason, sequence = stopped(self.finish_reason, self.stop_reason, self.blocks, self._call.asked)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        start, end = self.start(), self.close_open()
        return start + end + event_of("message_delta", delta=delta, usage=usage_of(usage)) + event_of("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        return error_event(error)


def message_id(request_id: str) -> str:
    return f"msg_{request_id.replace('-', '')}"


def stopped(finish_reason: str | None, stop_reason: Any, blocks: list[Block], asked: Asked) -> tuple[str, str | None]:
    """Why it ended, and the stop sequence that ended it where the upstream says."""
    reason = _STOP_REASONS.get(finish_reason or "stop", "end_turn")
    if reason != "end_turn":
        return reason, None
    if isinstance(stop_reason, str) and stop_reason in asked.stop_sequences:
        return "stop_sequence", stop_reason
    return "tool_use" if any(block.kind == "call" for block in blocks) else reason, None


def usage_of(usage: bytes) -> Object:
    """The usage of a message from the settled usage object of chat completions: cached tokens are counted apart."""
    used = msgspec.json.decode(usage)
    details = used["prompt_tokens_details"]
    cached, written = details["cached_tokens"], details.get("cache_write_tokens", 0)
    told: Object = {
        "input_tokens": used["prompt_tokens"] - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": used["completion_tokens"],
    }
    reasoning = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    if reasoning:
        told["output_tokens_details"] = {"thinking_tokens": reasoning}
    return {**told, "tallygate": used["tallygate"]}


def _message(
    id_: str, model: str, content: list[Object], reason: str | None, sequence: str | None, usage: Object
) -> Object:
    return {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage,
    }


def _content(block: Block) -> Object:
    match block.kind:
        case "call":
            return {"type": "tool_use", "id": _call_id(block), "name": block.name, "input": _input(block.text)}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case _:
            return {"type": "text", "text": block.text}


def _input(arguments: str) -> Object:
    """A call's arguments; those that are no JSON object are handed over as they are."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"invalid_arguments": arguments}


def _call_id(block: Block) -> str:
    return block.call_id or f"toolu_{block.index:02x}"


def event_of(name: str, /, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
