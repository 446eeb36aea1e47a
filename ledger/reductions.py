"""Limits that went down: what this slot has leased of an account beyond what it may still give is not spent any more.

A lease taken under the old limit is money that SQL has given away. The change feed says whose accounts may have
changed; where one has given out more than its new target, the excess is owed: nobody draws on it from that moment, and
it returns, what running requests hold of it as soon as they end. What is not owed stays, and more is taken under the
new limit, as ever.
"""

from __future__ import annotations

from collections.abc import Set

from sqlalchemy import and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.leases import Leases
from ledger.schema import accounts, leases
from ledger.slices import Slice


class Reductions:
    """Of one slot's slices. `look` at every refresh: it asks SQL only after a change, and while something is owed."""

    def __init__(self, mine: Leases) -> None:
        self._leases = mine
        self._watched: set[str] = set()
        """Accounts that are owed something, or could not be judged yet."""

    async def look(self, c: AsyncConnection, team_ids: Set[str | None]) -> list[Slice]:
        """Which slices have something to return. team_ids: of the changes since the last call; None: anybody's.

        Several slots may owe the same excess: then all return it, and take anew what is free.
        """
        if not team_ids and not self._watched:
            return []
        rows = await self._given_too_much(c, team_ids)
        self._watched.clear()
        found = []
        for account_id, (excess_pico, revision) in rows.items():
            slice = self._leases.slices.get(account_id)
            if slice is None:
                continue
            if slice.lock.locked() or not slice.synced or slice.revision != revision:
                self._watched.add(account_id)  # an operation of ours is under way: what we have read says too little
                continue
            slice.owe(max(0, excess_pico))
            if slice.owed:
                self._watched.add(account_id)
            if slice.returnable_debt():
                found.append(slice)
        return found

    async def _given_too_much(self, c: AsyncConnection, team_ids: Set[str | None]) -> dict[str, tuple[int, int]]:
        """Account → by how much it has given out more than it may, and the revision of our lease on it. Those that are
        watched are told in any case."""
        a, mine = accounts.c, self._leases
        excess = a.debits_pico + a.leased_pico - a.target_pico
        changed = excess > 0
        if None not in team_ids:
            changed = and_(changed, a.team_id.in_([team_id for team_id in team_ids if team_id is not None]))
        query = select(a.id, excess.label("excess"), leases.c.revision)
        query = query.join_from(accounts, leases, leases.c.account_id == a.id)
        query = query.where(leases.c.slot_id == mine.slot_id, leases.c.epoch == mine.epoch)
        query = query.where(or_(changed, a.id.in_(self._watched)))
        return {row.id: (int(row.excess), row.revision) for row in await c.execute(query)}
