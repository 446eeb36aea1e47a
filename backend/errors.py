"""What can go wrong in the backend, as types. Messages say what to do next."""

from __future__ import annotations


class BackendError(Exception):
    """Base of every error that the backend raises on purpose."""


class WeightsNotFound(BackendError):
    """Weights that are not where they were said to be, or are not readable as a model."""


class ModelNotSupported(BackendError):
    """A model that loads but cannot be served exactly: sliding window, recurrent state, unknown attention."""


class DraftNotSupported(BackendError):
    """A draft whose tokens do not mean what the target's tokens mean."""


class BadRequest(BackendError):
    """A request that cannot be served as asked. `param` names the field, `code` is that of the wire table."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class QueueFull(BackendError):
    """More requests wait than the queue holds. `retry_after_s` is an estimate from the present rate."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
