"""An answer in one piece to a request for a stream: some servers do not stream what has tools or a schema.

It is told on as the stream that was asked for, of one chunk.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.http1 import ConnectionLost
from proxy.openai.chunks import StreamReader
from proxy.openai.sse import BYTE_ORDER_MARK, DONE_EVENT, data_event
from proxy.upstream import Answer, read_all

_KEPT = ("id", "created", "model", "service_tier", "system_fingerprint", "usage")


def is_unstreamed(answer: Answer) -> bool:
    """Whether it says itself that it is JSON."""
    return answer.headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


class Unstreamed:
    """Behaves as the stream that the upstream should have sent; what is no answer breaks it off. A stream that is only
    called JSON passes."""

    def __init__(self, answer: Answer, reader: StreamReader) -> None:
        self._answer = answer
        self._reader = reader
        self._first = True
        self.status = answer.status
        self.headers = answer.headers

    async def chunk(self) -> bytes:
        if not self._first:
            return b"" if self._reader.is_whole else await self._answer.chunk()
        self._first = False
        begins = b""
        while not begins.strip():
            part = await self._answer.chunk()
            begins += part
            if not part:
                break
        if begins.strip().startswith((b"data:", b"event:", b"id:", b"retry:", b":", BYTE_ORDER_MARK)):
            return begins
        self._reader.is_whole = True
        self._reader.keep_text()
        return as_events(begins + await read_all(self._answer))

    def close(self) -> None:
        self._answer.close()

    def leave(self) -> None:
        self._answer.leave()


def as_events(body: bytes) -> bytes:
    """The events of a plain answer. Raises ConnectionLost when it is none."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        raise ConnectionLost("its answer is none: it is not a JSON object") from None
    if isinstance(answer, dict) and answer.get("error"):
        return data_event(body.replace(b"\r", b" ").replace(b"\n", b" "))
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise ConnectionLost("its answer is none: it has no `choices`")
    chunk = {name: answer[name] for name in _KEPT if name in answer}
    chunk["object"] = "chat.completion.chunk" if "message" in choices[0] else "text_completion"
    chunk["choices"] = [_as_delta(choice) for choice in choices]
    return data_event(msgspec.json.encode(chunk)) + DONE_EVENT


def _as_delta(choice: dict[str, Any]) -> dict[str, Any]:
    if "message" not in choice:
        return choice
    message = choice["message"] if isinstance(choice["message"], dict) else {}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        numbered = [{"index": index, **call} for index, call in enumerate(calls) if isinstance(call, dict)]
        message = {**message, "tool_calls": numbered}
    return {name: value for name, value in choice.items() if name != "message"} | {"delta": message}
