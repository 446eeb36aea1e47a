"""What the dialects that are translated to chat completions share: reading a foreign body, saying no, building ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from proxy.openai.errors import ApiError, invalid
from proxy.openai.requests import Call, Fields, empty_body, parse_chat

Object = dict[str, Any]

CHAT_ONLY = frozenset(
    {
        "audio",
        "function_call",
        "functions",
        "logprobs",
        "max_completion_tokens",
        "modalities",
        "n",
        "prediction",
        "reasoning_effort",
        "response_format",
        "web_search_options",
    }
)
"""Fields of chat completions that mean nothing in another dialect, and would change what an answer looks like."""

_decoder = msgspec.json.Decoder(Object)
_cut = msgspec.json.Decoder(Fields)


def read_object(body: bytes) -> tuple[Object, Fields]:
    """The fields of a body, as values and as they were written. Raises ApiError 400."""
    if not body:
        raise empty_body()
    try:
        return _decoder.decode(body), _cut.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"The request body is not a JSON object: {error}.") from None


def typed(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], path: str = "") -> Any:
    """A field that may be missing or null: then None. Raises ApiError 400 that names it."""
    value = fields.get(name)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if value is None:
        return None
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(_NAMES[item] for item in kinds)
        raise invalid(f"Wrong type at `{path}{name}`: expected {expected}.", path + name)
    return value


def required(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], path: str = "") -> Any:
    """Raises ApiError 400 that names the field."""
    value = typed(fields, name, kind, path)
    if value is None:
        raise invalid(f"The field `{path}{name}` is required.", path + name)
    return value


def objects(values: list[Any], path: str) -> list[tuple[Object, str]]:
    """Each item of a list with its own path, such as `input[3]`. Raises ApiError 400."""
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise invalid(f"Wrong type at `{path}[{index}]`: expected an object.", f"{path}[{index}]")
    return [(value, f"{path}[{index}]") for index, value in enumerate(values)]


def unsupported(param: str, why: str) -> ApiError:
    """400: the dialect knows it, we do not serve it. why: a clause that says what to do instead."""
    return invalid(f"`{param}` is not supported: {why}.", param, "unsupported_parameter")


def refuse_chat_fields(fields: Collection[str], allowed: Collection[str] = ()) -> None:
    """Raises ApiError 400 for a field of chat completions that has another name in this dialect, or none."""
    for name in fields:
        if name in CHAT_ONLY and name not in allowed:
            raise unsupported(name, "it belongs to /v1/chat/completions")


def chat_call(chat: Object, names: Mapping[str, str], asked: Any, body_bytes: int) -> Call:
    """The call of a translated request. names: chat field → the field of the dialect, for complaints.

    body_bytes: of the request as it was written; what a translation leaves out, an upstream that needs none reads.
    """
    try:
        call = parse_chat(encoded({name: value for name, value in chat.items() if value is not None}))
    except ApiError as error:
        if error.param is None:
            raise
        name = names.get(error.param, error.param)
        raise invalid(error.message.replace(f"`{error.param}`", f"`{name}`"), name, error.code) from None
    call.asked = asked
    call.prompt_tokens_bound += max(0, body_bytes - call.body_bytes)
    return call


def encoded(value: Any) -> bytes:
    """What was read, as JSON again. Raises ApiError 400 for numbers that are out of range."""
    try:
        return msgspec.json.encode(value)
    except (OverflowError, ValueError, RecursionError) as error:
        raise invalid(f"The request body cannot be translated: {error}.") from None


def function_tool(name: str, description: Any, parameters: Any, **more: Any) -> Object:
    """A chat tool; what is None is left out."""
    function = {"name": name, "description": description, "parameters": parameters, **more}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def merge_calls(messages: list[Object], call: Object) -> None:
    """Add a call to the assistant's last message: chat wants those of one turn in one message."""
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def plain_text_or_parts(parts: list[Object]) -> str | list[Object]:
    """Chat content: one string where there is only text (many servers take nothing else), else the parts."""
    if all(part.get("type") == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


_NAMES: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
