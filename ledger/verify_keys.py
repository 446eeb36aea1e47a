"""The equation between the audit chain and the keys: a key that was made, changed or revived by hand is named."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.keys import key_row
from ledger.schema import audit, key_secrets, keys

PAGE = 1_000


async def check_keys(c: AsyncConnection) -> tuple[int, str | None]:
    """Every key is as the last act on it left it, and has as many secrets as were made for it."""
    expected, secrets = await _acts(c)
    counted, last = 0, ""
    while True:
        page = (await c.execute(select(keys).where(keys.c.id > last).order_by(keys.c.id).limit(PAGE))).mappings().all()
        if not page:
            break
        ids = [row["id"] for row in page]
        there = await _secrets(c, ids)
        for row in page:
            counted += 1
            wrong = _wrong(row, expected.pop(row["id"], None), there.get(row["id"], 0), secrets[row["id"]])
            if wrong is not None:
                return counted, f"key {row['id']}: {wrong}"
        last = ids[-1]
    missing = next(iter(sorted(expected)), None)
    return counted, None if missing is None else f"key {missing} is not there any more"


async def _acts(c: AsyncConnection) -> tuple[dict[str, dict[str, Any]], Counter[str]]:
    """What the chain says each key is, and how many secrets it was given."""
    expected: dict[str, dict[str, Any]] = {}
    secrets: Counter[str] = Counter()
    a, last = audit.c, 0
    query = select(a.seq, a.action, a.subject_id, a.after).where(a.subject_kind == "key").order_by(a.seq).limit(PAGE)
    while page := (await c.execute(query.where(a.seq > last))).all():
        for row in page:
            expected[row.subject_id] = msgspec.json.decode(row.after)
            secrets[row.subject_id] += row.action in ("key.create", "key.rotate")
        last = page[-1].seq
    return expected, secrets


async def _secrets(c: AsyncConnection, ids: list[str]) -> dict[str, int]:
    s = key_secrets.c
    made = func.count().label("secrets")
    found = await c.execute(select(s.key_id, made).where(s.key_id.in_(ids)).group_by(s.key_id))
    return {row.key_id: int(row.secrets) for row in found}


def _wrong(row: Any, act: dict[str, Any] | None, secrets: int, made: int) -> str | None:
    if act is None:
        return "no act made it"
    for name, should in key_row(act).items():
        if row[name] != should:
            return f"{name} is {row[name]!r}, the audit chain says {should!r}"
    if secrets != made:
        return f"it has {secrets} secrets, {made} were made"
    return None
