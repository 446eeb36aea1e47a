"""The equations between usage rows and what they were added up to, transfers and rollups. Corrections
(`ledger.corrections`) count in."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.entries import REVERSAL, ROLLUP_KEYS, ROLLUP_SUMS, TransferKey
from ledger.periods import HOUR_MS
from ledger.schema import transfers
from ledger.sums import exact_sum, read_sum
from ledger.verify_rows import Result, UsageSums, billed_in_month

CORRECTED = "#"
"""In the slot of a rollup that corrects another: what follows names the correction."""
_SLOT = {
    "sqlite": "CASE instr(slot_id, '#') WHEN 0 THEN slot_id ELSE substr(slot_id, 1, instr(slot_id, '#') - 1) END",
    "postgresql": "split_part(slot_id, '#', 1)",
}
RollupKey = tuple[Any, ...]
"""In the order of ROLLUP_KEYS."""


async def check_transfers(c: AsyncConnection, sums: UsageSums, month: str | None) -> Result:
    """What was moved between accounts is what the usage rows add up to, by every key."""
    counted, wrong = await transfer_differences(c, sums, month)
    for key, (moved, should) in wrong.items():
        return counted, f"{words_of(key)}: {moved} pico were moved, usage comes to {should}"
    return counted, None


async def transfer_differences(
    c: AsyncConnection, sums: UsageSums, month: str | None
) -> tuple[int, dict[TransferKey, tuple[int, int]]]:
    """(keys compared, of those that differ what was moved and what usage comes to)."""
    keys = [transfers.c[name] for name in TransferKey._fields]
    query = select(*keys, *exact_sum(transfers.c.amount_pico)).where(transfers.c.batch_id.is_not(None)).group_by(*keys)
    if month is not None:
        query = query.where(transfers.c.period == month)
    moved: dict[TransferKey, int] = {}
    for row in (await c.execute(query)).mappings():
        key, amount = TransferKey(*(row[name] for name in TransferKey._fields)), read_sum(row, "amount_pico")
        if key.kind.endswith(REVERSAL):
            key, amount = reverse(key), -amount
        moved[key] = moved.get(key, 0) + amount
    both = moved.keys() | sums.transfers.keys()
    pairs = {key: (moved.get(key, 0), sums.transfers.get(key, 0)) for key in sorted(both)}
    return len(pairs), {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def reverse(key: TransferKey) -> TransferKey:
    """The key of what takes back; and of that, what it takes back."""
    kind = key.kind.removesuffix(REVERSAL) if key.kind.endswith(REVERSAL) else key.kind + REVERSAL
    return key._replace(kind=kind, source=key.destination, destination=key.source)


def words_of(key: TransferKey) -> str:
    return f"{key.kind} {key.source} → {key.destination} in {key.period}"


async def check_rollups(c: AsyncConnection, month: str | None) -> Result:
    """The hourly sums are the sums of the rows, compared by the database."""
    where = "" if month is None else " WHERE (period = :month AND billed_in = '' OR billed_in = :month)"
    bound = {} if month is None else {"month": month}
    counted = (await c.execute(text(f"SELECT count(*) FROM rollups{where}"), bound)).scalar_one()
    for key in await rollup_differences(c, month, limit=1):
        names = zip(ROLLUP_KEYS, key, strict=True)
        return (
            counted,
            f"the rollup is not the sum of its rows: {', '.join(f'{name}={value}' for name, value in names)}",
        )
    return counted, None


async def rollup_differences(c: AsyncConnection, month: str | None, limit: int) -> dict[RollupKey, tuple[int, ...]]:
    """What has to be added to rollups, in the order of ROLLUP_SUMS, so that they are the sums of their rows."""
    hour = f"created_ms - created_ms % {HOUR_MS}"
    of_rows = {"hour_ms": hour, "draft_model": "coalesce(draft_model, '')", "billed_in": "coalesce(billed_in, '')"}
    of_rollups = {"slot_id": _SLOT[c.dialect.name]}

    def keys(derived: dict[str, str]) -> str:
        return ", ".join(f"{derived.get(name, name)} AS {name}" for name in ROLLUP_KEYS)

    def sums(sign: str) -> str:
        return ", ".join(f"{sign}sum({name}) AS {name}" for name in ROLLUP_SUMS)

    rows_where = "" if month is None else f" WHERE {billed_in_month(':month')}"
    where = "" if month is None else " WHERE (period = :month AND billed_in = '' OR billed_in = :month)"
    groups = ", ".join(str(n) for n in range(1, len(ROLLUP_KEYS) + 1))
    counted = sums("").replace("sum(requests)", "count(*)")
    from_rows = f"SELECT {keys(of_rows)}, {counted} FROM usage{rows_where} GROUP BY {groups}"
    from_rollups = f"SELECT {keys(of_rollups)}, {sums('-')} FROM rollups{where} GROUP BY {groups}"
    differ = " OR ".join(f"sum({name}) <> 0" for name in ROLLUP_SUMS)
    query = (
        f"SELECT {keys({})}, {sums('')} FROM ({from_rows} UNION ALL {from_rollups}) AS both_sides "
        f"GROUP BY {groups} HAVING {differ} ORDER BY {groups} LIMIT {limit}"
    )
    found = (await c.execute(text(query), {} if month is None else {"month": month})).all()
    width = len(ROLLUP_KEYS)
    return {tuple(row[:width]): tuple(int(value) for value in row[width:]) for row in found}
