"""The proof: usage = transfers = rollups = balances = leases = journal = hash chains = invoices.

It reads one snapshot of the database beside a live server, in memory that does not grow with the number of requests,
and names the first difference of each check. What is journalled and not yet posted is counted, not complained about.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from sqlalchemy import exists, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.corrections import check_corrections
from ledger.database import Database
from ledger.month_figures import draft_statement
from ledger.movements import drawn_on_credit
from ledger.periods import next_period
from ledger.posting_sql import UNBELIEVED
from ledger.publishing import verify_versions
from ledger.schema import invoices, periods, rollups, suspense, teams
from ledger.sums import exact_sum, read_sum
from ledger.verify_acts import check_acts
from ledger.verify_journal import check_batches, check_journals
from ledger.verify_keys import check_keys
from ledger.verify_rows import check_accounts, check_leases, check_topups, read_usage
from ledger.verify_sums import check_rollups, check_transfers

Progress = Callable[[str], None]
"""Told the name of each check as it begins."""


class Check(msgspec.Struct, frozen=True):
    """One equation. `counted`: how many things were compared; `difference`: the first that does not hold."""

    name: str
    ok: bool
    counted: int
    difference: str | None = None


class Report(msgspec.Struct, frozen=True):
    """`ok`: everything holds. `unposted`: durable SETTLE records that the poster has still to bring into SQL."""

    ok: bool
    checks: list[Check]
    unposted: int

    @property
    def first_difference(self) -> str | None:
        return next((f"{check.name}: {check.difference}" for check in self.checks if not check.ok), None)


async def verify(
    db: Database, journal_dir: Path | None, month: str | None = None, *, progress: Progress | None = None
) -> Report:
    """Check everything, or only the requests, transfers, rollups and invoices of a billing month "YYYY-MM".

    Raises Invalid for what is no month: it has no rows, so all would seem well.
    """
    if month is not None:
        next_period(month)
    checks: list[Check] = []
    unposted = 0

    async def run(name: str, check: Callable[[], Awaitable[tuple[int, str | None]]]) -> None:
        if progress is not None:
            progress(name)
        counted, difference = await check()
        checks.append(Check(name, difference is None, counted, difference))

    async with db.snapshot() as c:
        sums = None

        async def usage() -> tuple[int, str | None]:
            nonlocal sums
            sums = await read_usage(c, month)
            return sums.rows, sums.difference

        async def journals() -> tuple[int, str | None]:
            nonlocal unposted
            assert journal_dir is not None
            counted, difference, unposted = await check_journals(c, journal_dir)
            return counted, difference

        await run("usage", usage)
        assert sums is not None
        found = sums
        await run("transfers", lambda: check_transfers(c, found, month))
        await run("rollups", lambda: check_rollups(c, month))
        await run("accounts", lambda: check_accounts(c))
        await run("leases", lambda: check_leases(c, found if month is None else None))
        await run("top-ups", lambda: check_topups(c))
        await run("batches", lambda: check_batches(c))
        if journal_dir is not None:
            await run("journal", journals)
        await run("suspense", lambda: _check_suspense(c))
        await run("prices", lambda: verify_versions(c))
        await run("audit", lambda: audit.verify_chain(c))
        await run("acts", lambda: check_acts(c))
        await run("corrections", lambda: check_corrections(c))
        await run("keys", lambda: check_keys(c))
        await run("months", lambda: _check_late(c))
        await run("invoices", lambda: _check_invoices(c, month))
    return Report(all(check.ok for check in checks), checks, unposted)


async def _check_suspense(c: AsyncConnection) -> tuple[int, str | None]:
    """A record that SQL refused is a request that no bill shows: somebody has to decide."""
    s = suspense.c
    query = select(s.slot_id, s.epoch, s.seq, s.reason).where(s.resolved_ms.is_(None), s.reason != UNBELIEVED)
    rows = (await c.execute(query.order_by(s.at_ms))).all()
    if not rows:
        return 0, None
    first = rows[0]
    return len(rows), (
        f"{len(rows)} records in suspense, first frame {first.seq} of epoch {first.epoch} of slot {first.slot_id}: "
        f"{first.reason}"
    )


async def _check_late(c: AsyncConnection) -> tuple[int, str | None]:
    """What another month bills belongs to one that was closed, and comes after it."""
    r, p = rollups.c, periods.c
    closed = exists().where(p.timezone == teams.c.timezone, p.period >= r.period, p.state == "closed")
    query = (
        select(r.team_id, r.period, r.billed_in, closed.label("closed"))
        .join(teams, teams.c.id == r.team_id)
        .where(r.billed_in != "")
        .distinct()
    )
    rows = (await c.execute(query.order_by(r.team_id, r.period, r.billed_in))).all()
    for row in rows:
        if not row.closed or row.billed_in <= row.period:
            return len(rows), f"usage of team {row.team_id} in {row.period} is billed in {row.billed_in}"
    return len(rows), None


async def _check_invoices(c: AsyncConnection, month: str | None) -> tuple[int, str | None]:
    """What was finalized is what the ledger's rows still come to, record by record (the Merkle root)."""
    i = invoices.c
    query = select(i.number, i.team_id, i.period, i.exact_pico, i.merkle_root, i.document).where(
        i.kind == "invoice", i.state.in_(("finalized", "paid"))
    )
    if month is not None:
        query = query.where(i.period == month)
    counted = 0
    for row in (await c.execute(query.order_by(i.period, i.team_id))).all():
        now = await draft_statement(c, row.team_id, row.period)
        counted += 1
        with_promo = b'"promo_pico"' in row.document  # an older version billed what promo credit paid, too
        said, found = int(row.exact_pico), now.exact_pico if with_promo else now.consumption_pico
        if said != found:
            return counted, f"invoice {row.number} says {said} pico, the month's usage {found}"
        if now.merkle_root != row.merkle_root:
            return counted, f"invoice {row.number} does not seal the records that the month has now"
    return counted, await _asked_for_too_much(c)


async def _asked_for_too_much(c: AsyncConnection) -> str | None:
    """No team's invoices together leave more to be paid than it drew on credit."""
    i = invoices.c
    query = select(i.team_id, func.max(i.period).label("last"), *exact_sum(i.due_pico))
    query = query.where(i.kind == "invoice", i.state.in_(("finalized", "paid"))).group_by(i.team_id)
    for row in (await c.execute(query.order_by(i.team_id))).mappings().all():
        due, drawn = read_sum(row, "due_pico"), await drawn_on_credit(c, row["team_id"], row["last"])
        if due > drawn:
            return f"the invoices of team {row['team_id']} ask for {due} pico, it drew {drawn} on credit"
    return None
