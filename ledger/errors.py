"""What the ledger refuses, and why. The proxy turns each of these into one wire error; the CLI into one line."""

from __future__ import annotations


class LedgerError(Exception):
    """Base of all; `str(error)` is a sentence a person can act on."""


class InsufficientQuota(LedgerError):
    """The balance or a budget cannot cover the request. `account_kind` says which: prepaid, credit_line, budget."""

    def __init__(self, message: str, account_kind: str) -> None:
        super().__init__(message)
        self.account_kind = account_kind


class PriceNotFound(LedgerError):
    """No price version in force names this model: refused before it costs anything."""


class LedgerUnavailable(LedgerError):
    """The ledger cannot record or decide right now (SQL away and no lease, disk low, journal failed)."""

    def __init__(self, message: str, retry_after_ms: int = 1_000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class NotFound(LedgerError):
    """No such team, key, invoice…; the message names what was looked for."""


class Conflict(LedgerError):
    """The change contradicts what is already there (a reference used twice, an overlapping price version…)."""


class Invalid(LedgerError):
    """A value that cannot be accepted. `field` names it in the caller's words."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class JournalDamaged(LedgerError):
    """Bytes that were durable no longer read back: start is refused until an operator decides."""


class IdempotencyInProgress(LedgerError):
    """The first request of this Idempotency-Key still runs (`request_id`), or its answer was too large to keep."""

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class IdempotencyMismatch(LedgerError):
    """This Idempotency-Key was used with another body."""


class IdempotencyExpired(LedgerError):
    """The request of this Idempotency-Key was answered and its answer is no longer kept. It is never run again."""

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class AlreadyAnswered(LedgerError):
    """Not a refusal: this Idempotency-Key has its answer (`answer`, as given with the outcome). Send it again."""

    def __init__(self, request_id: str, answer: bytes) -> None:
        super().__init__(f"request {request_id} has been answered: replay it")
        self.request_id = request_id
        self.answer = answer
