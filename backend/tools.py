"""Tool calls: told to the model through its chat template (or in words), parsed back from its answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend import grammar
from backend.errors import BadRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TOLD = """You may call functions. Their signatures, as JSON schemas:
<tools>
{tools}
</tools>
For each call, answer with a JSON object between these tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request. forced: the answer has to be a call, of one of `functions`."""

    tools: list[dict[str, Any]]
    functions: list[dict[str, Any]]
    forced: bool

    @property
    def grammar(self) -> str | None:
        return grammar.grammar_of_calls(self.functions, OPEN, CLOSE) if self.forced else None


def tools_of(tools: Sequence[dict[str, Any]] | None, choice: str | Mapping[str, Any] | None) -> Tools | None:
    """What `tools` and `tool_choice` ask for; None where no tool may be called. Raises BadRequest."""
    if not tools or choice == "none":
        return None
    functions: list[dict[str, Any]] = []
    for at, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise BadRequest("a tool must be a function with a name", param=f"tools[{at}]")
        functions.append(function)
    if choice in (None, "auto", "required"):
        return Tools(list(tools), functions, choice == "required")
    wanted = (choice.get("function") or {}).get("name") if isinstance(choice, Mapping) else None
    chosen = [function for function in functions if function["name"] == wanted]
    if not chosen:
        raise BadRequest("`tool_choice` must be none, auto, required, or a function among `tools`", param="tool_choice")
    return Tools(list(tools), chosen, True)


def told_in_words(messages: Sequence[dict[str, Any]], tools: Tools | None) -> list[dict[str, Any]]:
    """For templates that know nothing of tools: signatures go into the system message, calls and results into text."""
    told: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            told.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        elif message.get("tool_calls"):
            calls = [_call_text(call) for call in message["tool_calls"]]
            told.append({"role": "assistant", "content": "\n".join([*([content] if content else []), *calls])})
        else:
            told.append(message)
    if tools is not None:
        words = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools.tools))
        if told and told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{words}"}
        else:
            told.insert(0, {"role": "system", "content": words})
    return told


def with_argument_objects(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Templates want the arguments of earlier calls as objects; the wire carries them as JSON text."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    try:
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        pass  # the template gets what the client sent
    return {**call, "function": function}


def _call_text(call: dict[str, Any]) -> str:
    function = _with_object(call)["function"]
    text = json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, ensure_ascii=False)
    return f"{OPEN}\n{text}\n{CLOSE}"


def parse_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(text outside of calls, calls as the wire has them). What is not a well-formed call stays text."""
    kept, calls, rest = [], [], text
    while (start := rest.find(OPEN)) >= 0:
        end = rest.find(CLOSE, start)
        inside = rest[start + len(OPEN) : end if end >= 0 else len(rest)]
        call = _parse_call(inside)
        if call is None:
            cut = start + len(OPEN)
            kept.append(rest[:cut])
        else:
            cut = end + len(CLOSE) if end >= 0 else len(rest)
            kept.append(rest[:start])
            calls.append(call)
        rest = rest[cut:]
    kept.append(rest)
    outside = "".join(kept)
    return (outside.strip() if calls else outside), calls


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(name, str):
        return None
    encoded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    identity = f"call_{uuid.uuid4().hex[:24]}"
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": encoded}}


def safe_length(text: str) -> int:
    """How much of a growing answer can be shown before it is known whether a call begins."""
    start = text.find(OPEN)
    if start >= 0:
        return start
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            return len(text) - length
    return len(text)
