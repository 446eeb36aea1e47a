"""What the fake provider says, as values: the same request always gets the same tokens and the same usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.upstream.faults import Fault, Usage

DEFAULT_TOKENS = 16
CALL = ('{"city":', ' "Berlin"', "}")
"""The arguments of a call, token by token."""
OBJECT = CALL
"""An answer that follows a schema."""
CREATED = 1_767_225_600
WORDS = ("the ", "bill ", "is ", "what ", "was ", "used, ", "not ", "a ", "token ", "more ", "or ", "less. ")
MULTIBYTE = ("账单 ", "正确 ", "😀 ", "é ", "한국 ", "ß", "\u2028", "👩‍👩‍👧 ")


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens[i] is the text of the i-th generated token that is content; reasoning comes before, calls after."""

    id: str
    model: str
    chat: bool
    prompt_tokens: int
    tokens: tuple[str, ...]
    finish_reason: str | None
    reasoning: tuple[str, ...] = ()
    calls: tuple[dict[str, Any], ...] = ()

    @property
    def generated(self) -> int:
        return len(self.reasoning) + len(self.tokens) + len(CALL) * len(self.calls)

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def prompt_tokens(body: dict[str, Any]) -> int:
    """One per whitespace-separated word of all text in the prompt, and 3 per message; at least 1."""
    if "messages" not in body:
        prompt = body.get("prompt", body.get("input", ""))
        return max(1, sum(_words(part) for part in (prompt if isinstance(prompt, list) else [prompt])))
    messages = [m for m in body["messages"] if isinstance(m, dict)] if isinstance(body["messages"], list) else []
    return max(1, sum(3 + _words(message.get("content")) for message in messages))


def _words(content: Any) -> int:
    if isinstance(content, str):
        return len(content.split())
    if isinstance(content, list):
        return sum(_words(part.get("text")) for part in content if isinstance(part, dict))
    return 0


def answer(body: dict[str, Any], fault: Fault, number: int) -> Answer:
    """The answer to the number-th request. `max_tokens` below the intended length cuts it: finish_reason `length`."""
    default = 0 if fault.calls else len(OBJECT) if fault.json else DEFAULT_TOKENS
    wanted = fault.tokens if fault.tokens is not None else default
    cap = body.get("max_completion_tokens", body.get("max_tokens", body.get("max_output_tokens")))
    count = min(wanted, cap) if isinstance(cap, int) and cap >= 0 else wanted
    words = OBJECT if fault.json else MULTIBYTE if fault.multibyte else WORDS
    finish = "length" if count < wanted and fault.finish_reason else fault.finish_reason
    return Answer(
        id=f"chatcmpl-{number:08d}",
        model=str(body.get("model", "")),
        chat="messages" in body,
        prompt_tokens=prompt_tokens(body),
        tokens=tuple(words[i % len(words)] for i in range(count)),
        finish_reason="tool_calls" if fault.calls and finish == "stop" else finish,
        reasoning=tuple(words[i % len(words)] for i in range(fault.reasoning)),
        calls=tuple(_call(body, number, i) for i in range(fault.calls)),
    )


def _call(body: dict[str, Any], number: int, index: int) -> dict[str, Any]:
    tools = body.get("tools") or [{"function": {"name": "tool"}}]
    name = tools[0]["function"]["name"]
    return {"id": f"call_{number}_{index}", "type": "function", "function": {"name": name, "arguments": "".join(CALL)}}


def usage(prompt: int, generated: int, kind: Usage = "last", reasoning: int = 0) -> Any:
    """The usage object as a provider of that kind reports it."""
    good = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    match kind:
        case "none" | "null":
            return None
        case "zero":
            return dict.fromkeys(good, 0)
        case "negative":
            return {key: -value for key, value in good.items()}
        case "absurd":
            return {key: value + 200_000_000 for key, value in good.items()}
        case "fraction":
            return {key: value + 0.5 for key, value in good.items()}
        case "text":
            return {key: str(value) for key, value in good.items()}
        case "partial":
            return {"prompt_tokens": prompt}
        case "list":
            return list(good.values())
        case "inflated":
            return {**good, "total_tokens": 10 * (prompt + generated)}
        case "cached":
            details = {"cached_tokens": prompt // 2, "cache_write_tokens": 1}
            thought = {"reasoning_tokens": min(reasoning, generated)}
            return {**good, "prompt_tokens_details": details, "completion_tokens_details": thought}
        case "decreasing":
            return {**good, "completion_tokens": max(0, 100 - generated)}
        case _:
            return {**good, "prompt_tokens_details": {"cached_tokens": 0}}


def plain_body(answer: Answer, fault: Fault) -> bytes:
    """The body of an answer that is not streamed."""
    if answer.chat:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = "".join(answer.reasoning)
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": list(answer.calls)}
        choice: dict[str, Any] = {"index": 0, "message": message}
    else:
        choice = {"index": 0, "text": answer.text}
    body: dict[str, Any] = {
        "id": answer.id,
        "object": "chat.completion" if answer.chat else "text_completion",
        "created": CREATED,
        "model": answer.model,
        "choices": [{**choice, "logprobs": None, "finish_reason": answer.finish_reason}],
        "x_provider": {"kept": "as it is"},
    }
    if fault.usage != "none":
        body["usage"] = usage(answer.prompt_tokens, answer.generated, fault.usage, len(answer.reasoning))
    return json.dumps(body, ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its JSON text (or `[DONE]`), and how many tokens have been generated once it is out."""

    data: str
    generated: int
    reported: Any = None
    token: bool = False


def events(answer: Answer, fault: Fault, options: dict[str, Any]) -> Iterator[Event]:
    """The events of a streamed answer that ends as it should."""
    each = fault.usage in ("each", "decreasing") or (options.get("continuous_usage_stats") and fault.usage == "last")
    asked = bool(options.get("include_usage"))

    def event(choices: list[dict[str, Any]], generated: int, *, report: bool = False, token: bool = False) -> Event:
        body: dict[str, Any] = {
            "id": answer.id,
            "object": "chat.completion.chunk" if answer.chat else "text_completion",
            "created": CREATED,
            "model": answer.model,
            "choices": choices,
        }
        reported = usage(answer.prompt_tokens, generated, fault.usage, len(answer.reasoning)) if report else None
        if report or asked:
            body["usage"] = reported
        return Event(json.dumps(body, ensure_ascii=False), generated, reported, token)

    def choice(text: str | None, finish: str | None = None, **more: Any) -> list[dict[str, Any]]:
        if answer.chat:
            delta = {} if text is None else {**more, "content": text}
            return [{"index": 0, "delta": delta, "finish_reason": finish}]
        return [{"index": 0, "text": text or "", "logprobs": None, "finish_reason": finish}]

    if answer.chat:
        yield event(choice("", role="assistant"), 0, report=fault.usage == "first")
    thought = len(answer.reasoning)
    for done, text in enumerate(answer.reasoning, 1):
        delta = {"reasoning_content": text}
        yield event([{"index": 0, "delta": delta, "finish_reason": None}], done, report=bool(each), token=True)
    for done, text in enumerate(answer.tokens, 1 + thought):
        if fault.empty_deltas:
            yield event(choice(""), done - 1)
        yield event(choice(text), done, report=bool(each), token=True)
    called = [
        {"index": index, **(call if piece == 0 else {}), "function": {**name, "arguments": text}}
        for index, call in enumerate(answer.calls)
        for piece, text in enumerate(CALL)
        for name in [{"name": call["function"]["name"]} if piece == 0 else {}]
    ]
    for done, part in enumerate(called, 1 + thought + len(answer.tokens)):
        delta = {"tool_calls": [part]}
        yield event([{"index": 0, "delta": delta, "finish_reason": None}], done, report=bool(each), token=True)
    count = answer.generated
    if answer.finish_reason is not None:
        yield event(choice(None, answer.finish_reason), count, report=bool(each) or fault.usage == "finish")
    if fault.usage not in ("none", "finish", "first") and (asked or fault.usage == "always"):
        yield event([], count, report=True)
        if fault.usage == "twice":
            yield event([], count + 1, report=True)
    if fault.done:
        yield Event("[DONE]", count)
