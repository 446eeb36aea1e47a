"""Small GET requests to our own processes while they start, without the cost of an HTTP client library."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

MAX_BYTES = 1024 * 1024


async def get_json(url: str, headers: dict[str, str] | None = None, timeout_s: float = 2.0) -> tuple[int, object]:
    """(status, decoded body) of an http:// URL; status 0 when nobody answers, body None when it is not JSON."""
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await _get(url, headers or {})
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return 0, None
    try:
        return status, json.loads(body)
    except ValueError:
        return status, None


async def _get(url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"GET {path or '/'} HTTP/1.0", f"Host: {parts.netloc}", "Accept: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        answer = await reader.read(MAX_BYTES)
        while chunk := await reader.read(MAX_BYTES):
            answer += chunk
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body
