"""The one way a policy says no. It names everything the wire needs, so nobody has to guess a status from a message."""

from __future__ import annotations

from collections.abc import Mapping

NO_HEADERS: Mapping[str, str] = {}


class Refusal(Exception):
    """A request that may not pass. `status`, `type` and `code` are those of the wire table; `message` says what to do.

    retry_after_ms: exact wait until the same request would pass, None when waiting does not help.
    should_retry: becomes `x-should-retry`; None sends no header.
    headers: further response headers, such as `x-ratelimit-*` with the caller's own numbers.
    """

    def __init__(
        self,
        status: int,
        type: str,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_ms: int | None = None,
        should_retry: bool | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.should_retry = should_retry
        self.headers = headers
