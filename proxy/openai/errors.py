"""Every refusal and failure as OpenAI's clients expect it: one exception, one object, one table (design: the wire)."""

from __future__ import annotations

from typing import Any

import msgspec

from ledger.errors import (
    Conflict,
    IdempotencyExpired,
    IdempotencyInProgress,
    IdempotencyMismatch,
    InsufficientQuota,
    Invalid,
    LedgerError,
    LedgerUnavailable,
    NotFound,
    PriceNotFound,
)
from policies.refusal import Refusal

INVALID = "invalid_request_error"
PERMISSION = "permission_error"
API = "api_error"


class ApiError(Exception):
    """An answer that is an error. `str(error)` tells the caller what to do next.

    retry_after_ms: exact wait in milliseconds, sent as `retry-after` (whole seconds, rounded up) and `retry-after-ms`.
    should_retry: `x-should-retry`; None sends no header.
    body: bytes to send in place of our own object (an upstream's error, passed through).
    """

    def __init__(
        self,
        status: int,
        type: str,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        retry_after_ms: int | None = None,
        should_retry: bool | None = None,
        body: bytes | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.should_retry = should_retry
        self._body = body
        self._headers = headers

    def body(self) -> bytes:
        """`{"error": {…}}`, or the upstream's own bytes."""
        if self._body is not None:
            return self._body
        return msgspec.json.encode({"error": self.object()})

    def object(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def event(self) -> bytes:
        """The error as the last event of a stream that has begun; no `[DONE]` follows."""
        return b"data: " + msgspec.json.encode({"error": self.object()}) + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What SDKs read to decide on a retry."""
        headers = [*self._headers]
        if self.retry_after_ms is not None:
            seconds = -(-self.retry_after_ms // 1000)
            headers.append((b"retry-after", b"%d" % seconds))
            headers.append((b"retry-after-ms", b"%d" % self.retry_after_ms))
        if self.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, INVALID, code, message, param=param)


def invalid_api_key(message: str) -> ApiError:
    return ApiError(401, INVALID, "invalid_api_key", message)


def no_embeddings(model: str, place: str) -> ApiError:
    message = f"The model `{model}` makes no embeddings: `{place}`, which serves it, has no such endpoint."
    return ApiError(404, INVALID, "embeddings_not_supported", message, param="model")


def model_not_found(model: str) -> ApiError:
    return ApiError(404, INVALID, "model_not_found", f"The model `{model}` does not exist; GET /v1/models lists them.")


def too_large(limit_bytes: int) -> ApiError:
    limit = f"{limit_bytes // 2**20} MiB"
    return ApiError(413, INVALID, "request_too_large", f"The request body is larger than {limit}.")


def head_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        431,
        INVALID,
        "headers_too_large",
        f"The request's address and headers are larger than {limit_bytes // 1024} KiB.",
    )


def not_found(path: str) -> ApiError:
    return ApiError(404, INVALID, "not_found", f"There is nothing at {path}.")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    headers = ((b"allow", allowed.encode()),)
    return ApiError(
        405, INVALID, "method_not_allowed", f"{method} is not possible at {path}; use {allowed}.", headers=headers
    )


def internal_error() -> ApiError:
    return ApiError(500, API, "internal_error", "TallyGate failed; the request id names the log entry.")


def shutting_down(*, begun: bool = False) -> ApiError:
    """begun: the client has seen a part of its answer."""
    message = "TallyGate is stopping here and has cut this answer short; what came of it is billed."
    return ApiError(
        503,
        API,
        "shutting_down",
        message if begun else "TallyGate is stopping here; ask again in a moment.",
        retry_after_ms=1_000,
        should_retry=True,
    )


def upstream_error(message: str, *, status: int = 502) -> ApiError:
    return ApiError(status, API, "upstream_error", message, should_retry=False)


def upstream_timeout(message: str) -> ApiError:
    return ApiError(504, API, "upstream_timeout", message, should_retry=False)


def no_deployment_available(model: str, retry_after_ms: int) -> ApiError:
    return ApiError(
        503,
        API,
        "no_deployment_available",
        f"Every deployment of `{model}` has failed lately and is cooling down.",
        retry_after_ms=retry_after_ms,
        should_retry=True,
    )


def from_refusal(refusal: Refusal) -> ApiError:
    """A policy's no; policies name the wire's own words."""
    return ApiError(
        refusal.status,
        refusal.type,
        refusal.code,
        refusal.message,
        param=refusal.param,
        retry_after_ms=refusal.retry_after_ms,
        should_retry=refusal.should_retry,
        headers=tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in refusal.headers.items()),
    )


def from_ledger(error: LedgerError) -> ApiError:
    """What the ledger cannot do, told to a caller."""
    match error:
        case InsufficientQuota():
            return ApiError(429, "insufficient_quota", "insufficient_quota", str(error), should_retry=False)
        case PriceNotFound():
            return ApiError(403, PERMISSION, "price_not_found", str(error), should_retry=False)
        case LedgerUnavailable(retry_after_ms=wait):
            return ApiError(503, API, "ledger_unavailable", str(error), retry_after_ms=wait, should_retry=True)
        case IdempotencyInProgress():
            return ApiError(409, INVALID, "idempotency_in_progress", str(error), should_retry=False)
        case IdempotencyMismatch():
            return ApiError(422, INVALID, "idempotency_mismatch", str(error), should_retry=False)
        case IdempotencyExpired():
            return ApiError(410, INVALID, "idempotency_expired", str(error), should_retry=False)
        case Invalid(field=name):
            return invalid(str(error), name)
        case NotFound():
            return ApiError(404, INVALID, "not_found", str(error))
        case Conflict():
            return ApiError(409, INVALID, "conflict", str(error), should_retry=False)
        case _:
            return internal_error()


def as_api_error(error: Exception) -> ApiError:
    """Whatever was raised, as the wire says it; what nobody expected is a 500."""
    match error:
        case ApiError():
            return error
        case Refusal():
            return from_refusal(error)
        case LedgerError():
            return from_ledger(error)
        case _:
            return internal_error()
