"""Every scenario with the real `curl`."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from scenarios import API_KEY, BASE_URL, BROKEN_MODEL, MESSAGES, PICTURE, TOOLS, run


def curl(body: dict[str, Any], *options: str) -> tuple[dict[str, str], str]:
    """(headers with `:status`, body) of one request."""
    bearer = f"authorization: Bearer {API_KEY}"
    command = ["curl", "-sS", "-N", "-i", "-H", bearer, "-H", "content-type: application/json", "-d", "@-", *options]
    done = subprocess.run(
        [*command, f"{BASE_URL}/chat/completions"], input=json.dumps(body).encode(), capture_output=True
    )
    head, _, rest = done.stdout.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return headers | {":status": status.split()[1]}, rest


def payloads(body: str) -> list[Any]:
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ()))


def plain() -> Any:
    headers, body = curl({"model": "m", "messages": MESSAGES})
    answer = json.loads(body)
    return {
        "text": answer["choices"][0]["message"]["content"],
        "tokens": answer["usage"]["completion_tokens"],
        "request_id": headers["x-request-id"],
    }


def stream() -> Any:
    _, body = curl({"model": "m", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}})
    assert body.endswith("data: [DONE]\n\n")
    chunks = payloads(body)
    return {"text": text_of(chunks), "tokens": chunks[-1]["usage"]["completion_tokens"]}


def calls() -> Any:
    _, body = curl({"model": "m@calls", "messages": MESSAGES, "tools": TOOLS})
    call = json.loads(body)["choices"][0]["message"]["tool_calls"][0]["function"]
    return {"name": call["name"], "arguments": json.loads(call["arguments"])}


def parsed() -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "City", "schema": {"type": "object"}}}
    _, body = curl({"model": "m@json", "messages": MESSAGES, "response_format": form})
    return {"city": json.loads(json.loads(body)["choices"][0]["message"]["content"])["city"]}


def picture() -> Any:
    headers, body = curl({"model": "m", "messages": PICTURE})
    return {"text": json.loads(body)["choices"][0]["message"]["content"], "request_id": headers["x-request-id"]}


def refused() -> Any:
    headers, body = curl({"model": "unknown", "messages": MESSAGES})
    return {
        "kind": "NotFoundError",
        "status": int(headers[":status"]),
        "code": json.loads(body)["error"]["code"],
        "request_id": headers["x-request-id"],
    }


def broken() -> Any:
    _, body = curl({"model": BROKEN_MODEL, "messages": MESSAGES, "stream": True})
    *chunks, last = payloads(body)
    return {"text": text_of(chunks), "code": last["error"]["code"]}


def cancelled() -> Any:
    headers, body = curl({"model": "m@slow-chunks", "messages": MESSAGES, "stream": True}, "--max-time", "0.5")
    return {"seen": len(text_of(payloads(body.rpartition("\n")[0])).split()), "request_id": headers["x-request-id"]}


run(plain, stream, calls, parsed, picture, refused, broken, cancelled)
