"""What an admin endpoint is: a method, a path, typed input and output, who may call it, and one function.

Routes and the OpenAPI document are both made from a list of these, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.audit import By
from ledger.database import Database
from proxy.settings import Settings

Role = Literal["admin", "finance", "viewer"]
EVERYONE: frozenset[Role] = frozenset({"admin", "finance", "viewer"})
FINANCE: frozenset[Role] = frozenset({"admin", "finance"})
ADMIN: frozenset[Role] = frozenset({"admin"})

T = TypeVar("T")


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that comes in: a field we do not know is a 400 that names it."""


class Paging(Strict, frozen=True, kw_only=True):
    """The query of every list."""

    limit: int = 100
    cursor: str | None = None


class Listing(msgspec.Struct, Generic[T], frozen=True):
    """The answer of every list."""

    data: list[T]
    next_cursor: str | None = None


@dataclass(frozen=True)
class Document:
    """An answer that is a file and not JSON."""

    content: bytes
    media_type: str
    filename: str


@dataclass(frozen=True)
class Installation:
    """What the admin API works on."""

    settings: Settings
    key_secret: bytes
    """Hashes API keys and admin tokens, and seals stored answers."""

    @property
    def journal_dir(self) -> Path:
        return self.settings.storage.journal_path


@dataclass(frozen=True)
class Call:
    """One request to an endpoint, decoded. `c` is in a write transaction when the endpoint writes."""

    installation: Installation
    db: Database
    c: AsyncConnection
    by: By
    path: dict[str, str]
    query: Any = None
    body: Any = None
    prepared: Any = None
    """What the endpoint's `prepare` returned."""


@dataclass(frozen=True)
class Endpoint:
    """`path` is below /admin/v1, with {names}. `query` and `body` are Strict structs, or a list of them.

    `answer` is a type, or a tuple of types when it can be one or the other.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    summary: str
    run: Callable[[Call], Awaitable[Any]]
    answer: Any
    roles: frozenset[Role] = ADMIN
    query: type[Strict] | None = None
    body: Any = None
    body_optional: bool = False
    status: int = 200
    prepare: Callable[[Database, By, Any], Awaitable[Any]] | None = None
    """Given the body: what takes transactions of its own and comes before that of the call."""
    own_transactions: bool = False
    """A POST that writes nothing, or only in short transactions of its own: it is run in none that writes, and an
    Idempotency-Key stores no answer, so the same call again must do the same."""
    media_types: tuple[str, ...] = field(default=("application/json",))

    @property
    def writes(self) -> bool:
        return self.method != "GET" and not self.own_transactions
