"""Input items → chat messages. Pure."""

from __future__ import annotations

from typing import Any

from proxy.openai.errors import invalid
from proxy.openai.translation import (
    Object,
    merge_calls,
    objects,
    plain_text_or_parts,
    required,
    typed,
    unsupported,
)

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def messages_of(instructions: str | None, given: str | list[Any]) -> list[Object]:
    """Raises ApiError 400 that names the item. `instructions` come first, as a system message."""
    messages: list[Object] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    for item, path in objects(given, "input"):
        _add(messages, item, path)
    return messages


def _add(messages: list[Object], item: Object, path: str) -> None:
    match item.get("type", "message" if "role" in item else None):
        case "message":
            _add_message(messages, item, path)
        case "function_call":
            call = {
                "id": required(item, "call_id", str, f"{path}."),
                "type": "function",
                "function": {
                    "name": required(item, "name", str, f"{path}."),
                    "arguments": required(item, "arguments", str, f"{path}."),
                },
            }
            merge_calls(messages, call)
        case "function_call_output":
            call_id = required(item, "call_id", str, f"{path}.")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _output(item, path)})
        case "reasoning":
            pass  # chat completions have no place for what a model thought before
        case "item_reference":
            raise unsupported(f"{path}.type", "nothing is stored here; send the item itself")
        case None:
            raise invalid(f"The field `{path}.type` is required.", f"{path}.type")
        case other:
            raise unsupported(f"{path}.type", f"items of type {other!r} need tools that OpenAI hosts")


def _add_message(messages: list[Object], item: Object, path: str) -> None:
    role = required(item, "role", str, f"{path}.")
    if role not in _ROLES:
        raise invalid(f"`{path}.role` must be one of: {', '.join(_ROLES)}.", f"{path}.role")
    content = required(item, "content", (str, list), f"{path}.")
    if isinstance(content, list):
        content = plain_text_or_parts([_part(part, at) for part, at in objects(content, f"{path}.content")])
    messages.append({"role": _ROLES[role], "content": content})


def _output(item: Object, path: str) -> str | list[Object]:
    output = required(item, "output", (str, list), f"{path}.")
    if isinstance(output, str):
        return output
    return plain_text_or_parts([_part(part, at) for part, at in objects(output, f"{path}.output")])


def _part(part: Object, path: str) -> Object:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": required(part, "text", str, f"{path}.")}
        case "refusal":
            return {"type": "text", "text": required(part, "refusal", str, f"{path}.")}
        case "input_image":
            if part.get("file_id") is not None:
                raise unsupported(f"{path}.file_id", "no files are stored here; send `image_url`")
            image: Object = {"url": required(part, "image_url", str, f"{path}.")}
            detail = typed(part, "detail", str, f"{path}.")
            return {"type": "image_url", "image_url": image if detail is None else {**image, "detail": detail}}
        case "input_file":
            for name in ("file_id", "file_url"):
                if part.get(name) is not None:
                    raise unsupported(f"{path}.{name}", "no files are fetched or stored here; send `file_data`")
            file = {"file_data": required(part, "file_data", str, f"{path}.")}
            name = typed(part, "filename", str, f"{path}.")
            return {"type": "file", "file": file if name is None else {**file, "filename": name}}
        case "input_audio":
            return {"type": "input_audio", "input_audio": required(part, "input_audio", dict, f"{path}.")}
        case other:
            raise invalid(f"`{path}.type` is {other!r}, which is no kind of content.", f"{path}.type")
