"""Lists in pages: a cursor names the last row seen, so a page neither skips nor repeats while rows are added."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.errors import Invalid

MAX_LIMIT = 1_000
T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Some rows of a list, and the cursor of the next page (None: this was the last)."""

    items: list[T]
    next_cursor: str | None = None


async def page(
    c: AsyncConnection,
    query: Select[Any],
    key: Sequence[ColumnElement[Any]],
    make: Callable[[Any], T],
    *,
    cursor: str | None = None,
    limit: int = 100,
    newest_first: bool = False,
) -> Page[T]:
    """Up to `limit` rows of `query` after `cursor`, ordered by the unique columns `key`.

    The query must select the key columns. Raises Invalid for a cursor that is not ours or a limit outside 1…1000.
    """
    if not 1 <= limit <= MAX_LIMIT:
        raise Invalid(f"limit must be 1 to {MAX_LIMIT}, not {limit}", "limit")
    if cursor is not None:
        after = _decode(cursor, len(key))
        query = query.where(tuple_(*key) < after if newest_first else tuple_(*key) > after)
    query = query.order_by(*(column.desc() if newest_first else column for column in key)).limit(limit + 1)
    rows = (await c.execute(query)).all()
    more = len(rows) > limit
    rows = rows[:limit]
    next_cursor = _encode([rows[-1]._mapping[column] for column in key]) if more else None
    return Page([make(row) for row in rows], next_cursor)


def _encode(values: list[Any]) -> str:
    return urlsafe_b64encode(msgspec.json.encode(values)).decode().rstrip("=")


def _decode(cursor: str, width: int) -> tuple[Any, ...]:
    try:
        values = msgspec.json.decode(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=list[int | str])
    except (msgspec.DecodeError, binascii.Error, ValueError):
        values = []
    if len(values) != width:
        raise Invalid("this cursor is not one that a list gave out; start again without it", "cursor")
    return tuple(values)
