"""Who did what."""

from __future__ import annotations

from typing import Any

import msgspec

from ledger import audit
from ledger.audit import Entry
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Paging
from proxy.admin.times import required_iso


class AuditFilter(Paging, frozen=True, kw_only=True):
    team: str | None = None
    subject_kind: str | None = None
    subject: str | None = None


class AuditAnswer(msgspec.Struct, frozen=True):
    """One act. `hash` covers all of it and `previous_hash`."""

    seq: int
    at: str
    actor: str
    action: str
    subject_kind: str
    subject_id: str
    team_id: str | None
    reason: str | None
    before: Any
    after: Any
    previous_hash: str
    hash: str

    @classmethod
    def of(cls, entry: Entry) -> AuditAnswer:
        return cls(
            entry.seq,
            required_iso(entry.at_ms),
            entry.actor,
            entry.action,
            entry.subject_kind,
            entry.subject_id,
            entry.team_id,
            entry.reason,
            None if entry.before is None else msgspec.json.decode(entry.before),
            None if entry.after is None else msgspec.json.decode(entry.after),
            entry.previous_hash,
            entry.hash,
        )


async def list_(call: Call) -> Listing[AuditAnswer]:
    query: AuditFilter = call.query
    found = await audit.list_entries(
        call.c,
        team_id=query.team,
        subject_kind=query.subject_kind,
        subject_id=query.subject,
        cursor=query.cursor,
        limit=query.limit,
    )
    return Listing([AuditAnswer.of(entry) for entry in found.items], found.next_cursor)


ENDPOINTS = [
    Endpoint("GET", "/audit", "Who did what, newest first", list_, Listing[AuditAnswer], EVERYONE, query=AuditFilter),
]
