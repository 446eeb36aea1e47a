"""`/v1/responses` requests → chat completions. Pure. What cannot be served is refused by the name of its field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Raw

from proxy.openai.errors import invalid
from proxy.openai.requests import Call, Fields
from proxy.openai.responses.items import messages_of
from proxy.openai.translation import (
    Object,
    chat_call,
    encoded,
    function_tool,
    objects,
    read_object,
    refuse_chat_fields,
    required,
    typed,
    unsupported,
)

_REFUSED = {
    "previous_response_id": "nothing is stored here; send the whole conversation in `input`",
    "conversation": "nothing is stored here; send the whole conversation in `input`",
    "prompt": "prompt templates are stored at OpenAI; send `instructions` and `input`",
    "context_management": "send an `input` that fits",
    "moderation": "call a moderation model of your own",
}
_TRANSLATED = frozenset(
    {
        "background",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "reasoning",
        "store",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
        "messages",
        "max_tokens",
        *_REFUSED,
    }
)
_NAMES = {"max_tokens": "max_output_tokens", "messages": "input"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a response repeats of its request."""

    echo: Object
    logprobs: bool
    written: Fields
    """The request, field by field, as it was written."""


def parse_responses(body: bytes) -> Call:
    """Raises ApiError 400 that names the field."""
    fields, written = read_object(body)
    _refuse(fields)
    text = typed(fields, "text", dict) or {}
    tools, tool_choice = _tools(fields)
    include = typed(fields, "include", list) or []
    logprobs = "message.output_text.logprobs" in include
    reasoning = typed(fields, "reasoning", dict) or {}
    chat: Object = {name: value for name, value in written.items() if name not in _TRANSLATED}
    chat |= {
        "messages": messages_of(typed(fields, "instructions", str), required(fields, "input", (str, list))),
        "max_tokens": typed(fields, "max_output_tokens", int),
        "tools": tools or None,
        "tool_choice": tool_choice,
        "response_format": _response_format(text),
        "verbosity": text.get("verbosity", fields.get("verbosity")),
        "reasoning_effort": typed(reasoning, "effort", str, "reasoning."),
        "logprobs": True if logprobs else None,
        "top_logprobs": typed(fields, "top_logprobs", int) if logprobs else None,
    }
    return chat_call(chat, _NAMES, Asked(_echo(fields, text), logprobs, written), len(body))


def _refuse(fields: Object) -> None:
    for name, why in _REFUSED.items():
        if fields.get(name) is not None:
            raise unsupported(name, why)
    if typed(fields, "background", bool):
        raise unsupported("background", "answers are given at once or streamed")
    if typed(fields, "store", bool):
        raise unsupported("store", "nothing is stored here; send false, or leave it out")
    if fields.get("truncation") not in (None, "disabled"):
        raise unsupported("truncation", "nothing is cut from the input; send an `input` that fits")
    for name in ("messages", "max_tokens"):
        if name in fields:
            raise unsupported(name, f"it belongs to /v1/chat/completions; here it is `{_NAMES[name]}`")
    refuse_chat_fields(fields)


def _tools(fields: Object) -> tuple[list[Object], Any]:
    """Tools and choice as chat knows them; a choice among allowed tools leaves the others out."""
    tools = {}
    for tool, path in objects(typed(fields, "tools", list) or [], "tools"):
        if tool.get("type") != "function":
            raise unsupported(f"{path}.type", f"only function tools are served, not {tool.get('type')!r}")
        name = required(tool, "name", str, f"{path}.")
        parameters = typed(tool, "parameters", dict, f"{path}.")
        tools[name] = function_tool(name, tool.get("description"), parameters, strict=tool.get("strict"))
    choice = typed(fields, "tool_choice", (str, dict))
    if not isinstance(choice, dict):
        return list(tools.values()), choice
    match choice.get("type"):
        case "function":
            return list(tools.values()), {"type": "function", "function": {"name": _chosen(choice, tools)}}
        case "allowed_tools":
            allowed = objects(required(choice, "tools", list, "tool_choice."), "tool_choice.tools")
            return [tools[_chosen(tool, tools)] for tool, _ in allowed], choice.get("mode", "auto")
        case other:
            raise unsupported("tool_choice.type", f"only function tools are served, not {other!r}")


def _chosen(choice: Object, tools: Object) -> str:
    name: str = required(choice, "name", str, "tool_choice.")
    if name not in tools:
        raise invalid(f"`tool_choice` names {name!r}, which is not among `tools`.", "tool_choice")
    return name


def _response_format(text: Object) -> Object | None:
    format_ = typed(text, "format", dict, "text.")
    match (format_ or {}).get("type"):
        case None | "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            assert format_ is not None
            required(format_, "schema", dict, "text.format.")
            schema = {name: format_[name] for name in ("name", "description", "schema", "strict") if name in format_}
            return {"type": "json_schema", "json_schema": schema}
        case other:
            raise unsupported("text.format.type", f"it is {other!r}; there are text, json_object, json_schema")


def _echo(fields: Object, text: Object) -> Object:
    """The request as a response repeats it, with the defaults of the reference."""
    reasoning = fields.get("reasoning") or {}
    echo = {
        "background": False,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.get("max_tool_calls"),
        "metadata": fields.get("metadata") or {},
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "prompt_cache_key": fields.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": fields.get("safety_identifier"),
        "store": False,
        "temperature": fields.get("temperature"),
        "text": {"format": {"type": "text"}, **{name: value for name, value in text.items() if value is not None}},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "top_logprobs": fields.get("top_logprobs") or 0,
        "top_p": fields.get("top_p"),
        "truncation": "disabled",
        "user": fields.get("user"),
    }
    return {name: Raw(encoded(value)) for name, value in echo.items()}
