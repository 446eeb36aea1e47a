"""Errors as Anthropic's clients expect them: the type follows the status, our code stands in the message. Pure.

Source: https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.openai.errors import ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(_error(error))


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


def _error(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = _told_by_upstream(error) or error.object()
    message, code = str(told.get("message") or error.message), told.get("code")
    if code and code not in message:
        message = f"{code}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _told_by_upstream(error: ApiError) -> dict[str, Any] | None:
    """The error object that an upstream sent and we pass on."""
    try:
        told = msgspec.json.decode(error.body())["error"]
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError):
        return None
    return told if isinstance(told, dict) else {"message": told}
