"""`/v1/messages` requests → chat completions. Pure. What cannot be served is refused by the name of its field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.anthropic.content import messages_of
from proxy.openai.errors import invalid
from proxy.openai.requests import Call, Fields
from proxy.openai.translation import (
    Object,
    chat_call,
    function_tool,
    objects,
    read_object,
    refuse_chat_fields,
    required,
    typed,
    unsupported,
)

_REFUSED = {
    "container": "code runs at Anthropic only",
    "context_management": "send messages that fit",
    "mcp_servers": "connect to MCP servers in your own client",
    "inference_geo": "the route decides where a model runs",
}
_TRANSLATED = frozenset(
    {
        "cache_control",
        "diagnostics",
        "max_tokens",
        "messages",
        "metadata",
        "output_config",
        "service_tier",
        "speed",
        "stop_sequences",
        "stream_options",
        "system",
        "thinking",
        "tool_choice",
        "tools",
        "user",
        *_REFUSED,
    }
)
_NAMES = {"stop": "stop_sequences", "user": "metadata.user_id"}
_EFFORTS = {"max": "xhigh"}
_LOW_BUDGET_TOKENS = 4_096
_MEDIUM_BUDGET_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer needs of its request."""

    stop_sequences: frozenset[str]
    written: Fields
    """The request, field by field, as it was written."""


def parse_messages(body: bytes) -> Call:
    """Raises ApiError 400 that names the field."""
    return _parse(body, counts_only=False)


def parse_count(body: bytes) -> Call:
    """A request of count_tokens: the same, without `max_tokens`. Raises ApiError 400."""
    return _parse(body, counts_only=True)


def _parse(body: bytes, *, counts_only: bool) -> Call:
    fields, written = read_object(body)
    for name, why in _REFUSED.items():
        if fields.get(name) is not None:
            raise unsupported(name, why)
    refuse_chat_fields(fields)
    stop = typed(fields, "stop_sequences", list) or []
    if not all(isinstance(item, str) for item in stop):
        raise invalid("Wrong type at `stop_sequences`: expected strings.", "stop_sequences")
    tool_choice, one_call = _tool_choice(fields)
    output = typed(fields, "output_config", dict) or {}
    metadata = typed(fields, "metadata", dict) or {}
    chat: Object = {name: value for name, value in written.items() if name not in _TRANSLATED}
    chat |= {
        "messages": messages_of(typed(fields, "system", (str, list)), required(fields, "messages", list)),
        "max_tokens": None if counts_only else required(fields, "max_tokens", int),
        "stop": stop or None,
        "tools": _tools(fields) or None,
        "tool_choice": tool_choice,
        "parallel_tool_calls": False if one_call else None,
        "reasoning_effort": _effort(fields, output),
        "response_format": _response_format(output),
        "user": typed(metadata, "user_id", str, "metadata."),
    }
    return chat_call(chat, _NAMES, Asked(frozenset(stop), written), len(body))


def _tools(fields: Object) -> list[Object]:
    tools = []
    for tool, path in objects(typed(fields, "tools", list) or [], "tools"):
        if tool.get("type") not in (None, "custom"):
            raise unsupported(f"{path}.type", f"only tools with an `input_schema` are served, not {tool['type']!r}")
        name = required(tool, "name", str, f"{path}.")
        schema = required(tool, "input_schema", dict, f"{path}.")
        tools.append(function_tool(name, tool.get("description"), schema, strict=tool.get("strict")))
    return tools


def _tool_choice(fields: Object) -> tuple[Any, bool]:
    """The choice as chat knows it, and whether only one call at a time is wanted."""
    choice = typed(fields, "tool_choice", dict)
    if choice is None:
        return None, False
    one_call = typed(choice, "disable_parallel_tool_use", bool, "tool_choice.") or False
    match choice.get("type"):
        case "auto" | "none" as same:
            return same, one_call
        case "any":
            return "required", one_call
        case "tool":
            name = required(choice, "name", str, "tool_choice.")
            return {"type": "function", "function": {"name": name}}, one_call
        case _:
            raise invalid("`tool_choice.type` must be one of: auto, any, tool, none.", "tool_choice.type")


def _effort(fields: Object, output: Object) -> str | None:
    """How much to think: said as an effort, or as a budget of tokens."""
    effort: str | None = typed(output, "effort", str, "output_config.")
    if effort is not None:
        return _EFFORTS.get(effort, effort)
    thinking = typed(fields, "thinking", dict)
    if thinking is None or thinking.get("type") != "enabled":
        return None
    budget: int = required(thinking, "budget_tokens", int, "thinking.")
    if budget <= _LOW_BUDGET_TOKENS:
        return "low"
    return "medium" if budget <= _MEDIUM_BUDGET_TOKENS else "high"


def _response_format(output: Object) -> Object | None:
    wanted = typed(output, "format", dict, "output_config.")
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema":
        raise unsupported("output_config.format.type", "only json_schema is served")
    schema = required(wanted, "schema", dict, "output_config.format.")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
