"""Messages of content blocks → chat messages. Pure."""

from __future__ import annotations

from typing import Any

from proxy.openai.errors import invalid
from proxy.openai.translation import (
    Object,
    encoded,
    merge_calls,
    objects,
    plain_text_or_parts,
    required,
    typed,
    unsupported,
)


def messages_of(system: str | list[Any] | None, given: list[Any]) -> list[Object]:
    """Raises ApiError 400 that names the block. `system` comes first, as a system message."""
    messages: list[Object] = []
    if system:
        messages.append({"role": "system", "content": _text_only(system, "system")})
    for message, path in objects(given, "messages"):
        role = required(message, "role", str, f"{path}.")
        content = required(message, "content", (str, list), f"{path}.")
        match role:
            case "user":
                _add_user(messages, content, f"{path}.content")
            case "assistant":
                _add_assistant(messages, content, f"{path}.content")
            case "system":
                messages.append({"role": "system", "content": _text_only(content, f"{path}.content")})
            case _:
                raise invalid(f"`{path}.role` must be user or assistant.", f"{path}.role")
    return messages


def _add_user(messages: list[Object], content: str | list[Any], path: str) -> None:
    """Results of tools become messages of their own, before what else the user says; chat wants them there."""
    if isinstance(content, str):
        messages.append({"role": "user", "content": content})
        return
    parts: list[Object] = []
    for block, at in objects(content, path):
        if block.get("type") == "tool_result":
            text, media = _result(block, at)
            tool_use_id = required(block, "tool_use_id", str, f"{at}.")
            messages.append({"role": "tool", "tool_call_id": tool_use_id, "content": text})
            parts += media
        else:
            parts += _parts(block, at)
    if parts:
        messages.append({"role": "user", "content": plain_text_or_parts(parts)})


def _add_assistant(messages: list[Object], content: str | list[Any], path: str) -> None:
    if isinstance(content, str):
        messages.append({"role": "assistant", "content": content})
        return
    texts: list[str] = []
    calls: list[Object] = []
    for block, at in objects(content, path):
        match block.get("type"):
            case "text":
                texts.append(required(block, "text", str, f"{at}."))
            case "tool_use":
                arguments = encoded(typed(block, "input", dict, f"{at}.") or {}).decode()
                name = required(block, "name", str, f"{at}.")
                call_id = required(block, "id", str, f"{at}.")
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case "thinking" | "redacted_thinking":
                pass  # chat completions have no place for what a model thought before
            case other:
                raise unsupported(f"{at}.type", f"{other!r} blocks need tools that Anthropic hosts")
    if texts or not calls:
        messages.append({"role": "assistant", "content": "".join(texts)})
    elif calls:
        messages.append({"role": "assistant", "content": None})
    for call in calls:
        merge_calls(messages, call)


def _result(block: Object, path: str) -> tuple[str, list[Object]]:
    """The text of a tool's result, and what else it shows: chat takes pictures from users only."""
    content = typed(block, "content", (str, list), f"{path}.") or ""
    if isinstance(content, list):
        parts = [part for item, at in objects(content, f"{path}.content") for part in _parts(item, at)]
        content = "\n".join(part["text"] for part in parts if part["type"] == "text")
        media = [part for part in parts if part["type"] != "text"]
    else:
        media = []
    if typed(block, "is_error", bool, f"{path}."):
        content = f"Error: {content}"
    return content, media


def _parts(block: Object, path: str) -> list[Object]:
    match block.get("type"):
        case "text":
            return [_text(required(block, "text", str, f"{path}."))]
        case "image":
            return [{"type": "image_url", "image_url": {"url": _source(block, path)}}]
        case "document":
            return _document(block, path)
        case "search_result":
            content = required(block, "content", list, f"{path}.")
            heading = f"{block.get('title', '')} ({block.get('source', '')})"
            return [_text(heading), _text(_text_only(content, f"{path}.content"))]
        case other:
            raise unsupported(f"{path}.type", f"{other!r} blocks need tools or files that Anthropic hosts")


def _document(block: Object, path: str) -> list[Object]:
    source = required(block, "source", dict, f"{path}.")
    title = typed(block, "title", str, f"{path}.")
    heading = [_text(title)] if title else []
    match source.get("type"):
        case "text":
            return [*heading, _text(required(source, "data", str, f"{path}.source."))]
        case "content":
            content = required(source, "content", (str, list), f"{path}.source.")
            if isinstance(content, str):
                return [*heading, _text(content)]
            inner = objects(content, f"{path}.source.content")
            return heading + [part for item, at in inner for part in _parts(item, at)]
        case _:
            file = {"file_data": _source(block, path, remote=False), "filename": title or "document.pdf"}
            return [{"type": "file", "file": file}]


def _source(block: Object, path: str, *, remote: bool = True) -> str:
    """A data URL, or the URL as it is where upstreams fetch it."""
    source = required(block, "source", dict, f"{path}.")
    match source.get("type"):
        case "base64":
            media_type = required(source, "media_type", str, f"{path}.source.")
            return f"data:{media_type};base64,{required(source, 'data', str, f'{path}.source.')}"
        case "url" if remote:
            url: str = required(source, "url", str, f"{path}.source.")
            return url
        case other:
            raise unsupported(f"{path}.source.type", f"no files are fetched or stored here, so not {other!r}")


def _text_only(content: str | list[Any], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block, at in objects(content, path):
        if block.get("type") != "text":
            raise unsupported(f"{at}.type", "only text can stand here")
        texts.append(required(block, "text", str, f"{at}."))
    return "\n".join(texts)


def _text(text: str) -> Object:
    return {"type": "text", "text": text}
