"""What the fake provider says on `/messages` and `/responses`: the same tokens, in the words of those dialects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.upstream.answers import CREATED, Answer, Event, Fault

PATHS = ("/messages", "/responses")
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def plain_body(path: str, answer: Answer, fault: Fault) -> bytes:
    """The body of an answer that is not streamed."""
    made = _message(answer, fault) if path == "/messages" else _response(answer, fault)
    return json.dumps(made, ensure_ascii=False).encode()


def events(path: str, answer: Answer, fault: Fault) -> Iterator[Event]:
    """The events of a streamed answer; their names are their `type`."""
    yield from _message_events(answer, fault) if path == "/messages" else _response_events(answer, fault)


def _usage(answer: Answer, fault: Fault, generated: int) -> dict[str, Any]:
    cached, written = (answer.prompt_tokens // 2, 1) if fault.usage == "cached" else (0, 0)
    return {
        "input_tokens": answer.prompt_tokens - cached - written,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": generated,
        "service_tier": "standard",
    }


def _message(answer: Answer, fault: Fault) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    for call in answer.calls:
        arguments = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": STOPS.get(answer.finish_reason or ""),
        "stop_sequence": None,
        "usage": _usage(answer, fault, answer.generated) if fault.usage != "none" else None,
        "x_provider": {"kept": "as it is"},
    }


def _message_events(answer: Answer, fault: Fault) -> Iterator[Event]:
    def event(kind: str, generated: int, *, token: bool = False, **fields: Any) -> Event:
        return Event(json.dumps({"type": kind, **fields}, ensure_ascii=False), generated, None, token)

    told = fault.usage != "none"
    start = {**_message(answer, fault), "content": [], "stop_reason": None}
    yield event("message_start", 0, message={**start, "usage": _usage(answer, fault, 1) if told else None})
    yield event("ping", 0)
    yield event("content_block_start", 0, index=0, content_block={"type": "text", "text": ""})
    for done, text in enumerate(answer.tokens, 1):
        delta = {"type": "text_delta", "text": text}
        yield event("content_block_delta", done, token=True, index=0, delta=delta)
    yield event("content_block_stop", answer.generated, index=0)
    delta = {"stop_reason": STOPS.get(answer.finish_reason or ""), "stop_sequence": None}
    usage = {"output_tokens": answer.generated} if told else {}
    yield event("message_delta", answer.generated, delta=delta, usage=usage)
    yield event("message_stop", answer.generated)


def _response(answer: Answer, fault: Fault, status: str | None = None) -> dict[str, Any]:
    cut = answer.finish_reason == "length"
    part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    cached = answer.prompt_tokens // 2 if fault.usage == "cached" else 0
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": answer.generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.generated,
    }
    done = status is None
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": CREATED,
        "status": status or ("incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if done and cut else None,
        "error": None,
        "model": answer.model,
        "output": [message] if done else [],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "usage": usage if done and fault.usage != "none" else None,
        "x_provider": {"kept": "as it is"},
    }


def _response_events(answer: Answer, fault: Fault) -> Iterator[Event]:
    number = iter(range(1_000_000))

    def event(kind: str, generated: int, *, token: bool = False, **fields: Any) -> Event:
        body = {"type": kind, "sequence_number": next(number), **fields}
        return Event(json.dumps(body, ensure_ascii=False), generated, None, token)

    final = _response(answer, fault)
    item = final["output"][0]
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    yield event("response.created", 0, response=_response(answer, fault, "in_progress"))
    begun = {**item, "content": [], "status": "in_progress"}
    yield event("response.output_item.added", 0, output_index=0, item=begun)
    yield event("response.content_part.added", 0, part=part, **at)
    for done, text in enumerate(answer.tokens, 1):
        yield event("response.output_text.delta", done, token=True, delta=text, logprobs=[], **at)
    count = answer.generated
    yield event("response.output_text.done", count, text=answer.text, logprobs=[], **at)
    yield event("response.content_part.done", count, part={**part, "text": answer.text}, **at)
    yield event("response.output_item.done", count, output_index=0, item=item)
    yield event(f"response.{final['status']}", count, response=final)
