"""The equation between the audit chain and what people did by hand: payments, teams, quotas, invoices, write-offs.

These rows follow from no journal, so the chain is their proof: what it says was done is what the tables hold.
"""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from typing import Any

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.credit_notes import bookings as credit_bookings
from ledger.invoices import payment_id
from ledger.periods import window_start
from ledger.posting_sql import UNBELIEVED
from ledger.schema import accounts, audit, invoices, periods, quotas, suspense, teams, transfers
from ledger.topups import refund_id

PAGE = 1_000
_BOOKED = ("topup.credit", "grant.create", "refund.pay", "grant.expire")
_OTHERS = (
    *("team.create", "team.update", "quota.replace", "suspense.retry", "suspense.write_off"),
    *("credit_note.issue", "month.close"),
)
Result = tuple[int, str | None]
Booking = tuple[str, str, int]
"""(kind, transfer; of an expiry the grant, pico)."""


class _Acts:
    """What the chain says there should be."""

    def __init__(self) -> None:
        self.counted = 0
        self.bookings: Counter[Booking] = Counter()
        self.invoices: dict[str, dict[str, Any]] = {}
        self.teams: dict[str, dict[str, Any]] = {}
        self.quotas: dict[str, tuple[dict[str, Any], int]] = {}
        """With the moment from which the limit holds."""
        self.resolved: set[str] = set()
        self.closed_months: dict[str, str] = {}
        """Time zone → the last one."""
        self.taken_off: Counter[str] = Counter()
        """Invoice → what credit notes took off what was due."""
        self.refilled: Counter[str] = Counter()
        """Team → what its credit line was refilled with."""

    def add(self, row: Any) -> None:
        self.counted += 1
        after: Any = msgspec.json.decode(row.after) if row.after is not None else None
        match row.action:
            case "topup.credit":
                self.bookings["topup", row.subject_id, after["amount_pico"]] += 1
            case "grant.create":
                self.bookings["grant", row.subject_id, after["amount_pico"]] += 1
            case "refund.pay":
                self.bookings["refund", refund_id(row.team_id, after["reference"]), after["amount_pico"]] += 1
            case "grant.expire":
                self.bookings["expiry", row.subject_id, after["amount_pico"]] += 1
            case "team.create" | "team.update":
                self.teams[row.subject_id] = after
            case "quota.replace":
                before = {quota["id"]: self.quotas.pop(quota["id"], None) for quota in msgspec.json.decode(row.before)}
                for quota in after:
                    old = before.get(quota["id"])
                    same = old is not None and old[0] == quota
                    self.quotas[quota["id"]] = (quota, old[1] if old is not None and same else row.at_ms)
            case "invoice.finalize" | "invoice.paid" | "invoice.void":
                self.invoices[row.subject_id] = after
                if row.action == "invoice.paid":
                    self._paid(after)
            case "credit_note.issue":
                self.invoices[row.subject_id] = after
                self._credited(after)
            case "month.close":
                latest = self.closed_months.get(after["timezone"], "")
                self.closed_months[after["timezone"]] = max(latest, after["period"])
            case "suspense.retry" | "suspense.write_off":
                self.resolved.add(row.subject_id)

    def _paid(self, invoice: dict[str, Any]) -> None:
        amount = invoice.get("due_pico", 0) - self.taken_off[invoice["id"]]
        if amount > 0:
            self.bookings["payment", payment_id(invoice["id"]), amount] += 1
            self.refilled[invoice["team_id"]] += amount

    def _credited(self, note: dict[str, Any]) -> None:
        for kind, transfer_id, part in credit_bookings(note["id"], -note["billed_pico"], note["due_pico"]):
            self.bookings["credit_note", transfer_id, part] += 1
            if kind == "credit_line":
                self.refilled[note["team_id"]] += part
        self.taken_off[note["refers_to"]] += note["due_pico"]


async def check_acts(c: AsyncConnection) -> Result:
    """(acts compared, the first row that is not what the chain says, or that is missing)."""
    acts = await _read(c)
    for check in (_bookings, _teams, _quotas, _targets, _invoices, _months, _resolved):
        difference = await check(c, acts)
        if difference is not None:
            return acts.counted, difference
    return acts.counted, None


async def _read(c: AsyncConnection) -> _Acts:
    acts, last = _Acts(), 0
    a = audit.c
    wanted = a.action.in_((*_BOOKED, *_OTHERS)) | a.action.like("invoice.%")
    columns = (a.seq, a.at_ms, a.action, a.subject_id, a.team_id, a.before, a.after)
    while True:
        page = (await c.execute(select(*columns).where(a.seq > last, wanted).order_by(a.seq).limit(PAGE))).all()
        if not page:
            return acts
        for row in page:
            acts.add(row)
        last = page[-1].seq


async def _bookings(c: AsyncConnection, acts: _Acts) -> str | None:
    t = transfers.c
    expected, last = acts.bookings.copy(), ""
    while True:
        query = select(t.id, t.kind, t.source, t.amount_pico).where(t.batch_id.is_(None), t.id > last)
        page = (await c.execute(query.order_by(t.id).limit(PAGE))).all()
        for row in page:
            booking = (row.kind, row.source if row.kind == "expiry" else row.id, int(row.amount_pico))
            if not expected[booking]:
                return f"{row.kind} {row.id} of {row.amount_pico} pico was booked, and no act says so"
            expected[booking] -= 1
        if not page:
            break
        last = page[-1].id
    missing = next(iter(+expected), None)
    return None if missing is None else f"{missing[0]} {missing[1]} of {missing[2]} pico is not booked any more"


async def _teams(c: AsyncConnection, acts: _Acts) -> str | None:
    expected = dict(acts.teams)
    for row in (await c.execute(select(teams).order_by(teams.c.id))).mappings():
        wrong = _differs(row, expected.pop(row["id"], None))
        if wrong is not None:
            return f"team {row['id']}: {wrong}"
    return _missing("team", expected)


async def _quotas(c: AsyncConnection, acts: _Acts) -> str | None:
    expected = {quota_id: quota for quota_id, (quota, _) in acts.quotas.items()}
    for row in (await c.execute(select(quotas).order_by(quotas.c.id))).mappings():
        values = dict(row)
        values["limit"], values["hard"] = values.pop("limit_value"), bool(values["hard"])
        wrong = _differs(values, expected.pop(row["id"], None))
        if wrong is not None:
            return f"quota {row['id']}: {wrong}"
    return _missing("quota", expected)


async def _targets(c: AsyncConnection, acts: _Acts) -> str | None:
    """What may be taken from an account: what was paid in, the team's credit limit, or the quota's."""
    last = ""
    while True:
        page = (await c.execute(select(accounts).where(accounts.c.id > last).order_by(accounts.c.id).limit(PAGE))).all()
        if not page:
            return None
        for row in page:
            should = _target(row, acts)
            if should is not None and int(row.target_pico) != should:
                return f"account {row.id}: {row.target_pico} pico may be taken, it should be {should}"
        last = page[-1].id


def _target(row: Any, acts: _Acts) -> int | None:
    if row.kind == "credit_line":
        team = acts.teams.get(row.team_id)
        return None if team is None else int(team["credit_limit_pico"]) + acts.refilled[row.team_id]
    if row.kind != "budget":
        return int(row.credits_pico)
    if row.quota_id not in acts.quotas:
        return None  # removed: nobody takes from it
    quota, since_ms = acts.quotas[row.quota_id]
    team = acts.teams.get(row.team_id, {})
    start = window_start(quota["window"], since_ms, quota["timezone"] or team.get("timezone", "UTC"))
    left = max(0, int(quota["limit"]) - int(row.spent_before_pico))
    return left if quota["hard"] and row.period_start_ms >= start else None


async def _invoices(c: AsyncConnection, acts: _Acts) -> str | None:
    expected = dict(acts.invoices)
    for row in (await c.execute(select(invoices).order_by(invoices.c.id))).mappings():
        if row["state"] == "draft":
            continue
        wrong = _differs(row, expected.pop(row["id"], None))
        if wrong is None and sha256(row["document"] or b"").hexdigest() != row["document_hash"]:
            wrong = "its document is not the one that was finalized"
        if wrong is not None:
            return f"invoice {row['number']}: {wrong}"
    return _missing("invoice", expected)


async def _months(c: AsyncConnection, acts: _Acts) -> str | None:
    """What is closed was closed by somebody, and nothing that was closed is open again."""
    p = periods.c
    query = select(p.timezone, func.max(p.period)).where(p.state == "closed").group_by(p.timezone)
    closed = {row[0]: row[1] for row in await c.execute(query)}
    for timezone in sorted(closed.keys() | acts.closed_months.keys()):
        is_, should = closed.get(timezone), acts.closed_months.get(timezone)
        if is_ != should:
            return f"months of {timezone} are closed up to {is_}, the audit chain says {should}"
    return None


async def _resolved(c: AsyncConnection, acts: _Acts) -> str | None:
    s = suspense.c
    query = select(s.slot_id, s.epoch, s.seq).where(s.resolved_ms.is_not(None), s.reason != UNBELIEVED)
    there = {f"{row.slot_id}:{row.epoch}:{row.seq}" for row in await c.execute(query)}
    for subject in sorted(there ^ acts.resolved):
        words = "is not resolved any more" if subject in acts.resolved else "is resolved, and no act says so"
        return f"record {subject} in suspense {words}"
    return None


def _differs(row: Any, act: dict[str, Any] | None) -> str | None:
    if act is None:
        return "no act made it"
    for name, should in act.items():
        if name in row and row[name] != should:
            return f"{name} is {row[name]!r}, the audit chain says {should!r}"
    return None


def _missing(kind: str, expected: dict[str, Any]) -> str | None:
    return next((f"{kind} {subject} is not there any more" for subject in sorted(expected)), None)
