"""What a worker holds of one account."""

from __future__ import annotations

import asyncio
from typing import Any

from ledger.money import Currency


class Slice:
    """What this slot holds of one account. `free` is what nobody has drawn yet; the other fields explain it:
    taken - returned = free + owed + spent + what open holds have drawn + what is on its way back.

    `owed` is what the account has given out beyond a limit that went down since: it is not drawn on, and returns. What
    open holds have of it makes `free` less than nothing until they end."""

    __slots__ = (
        "account_id",
        "currency",
        "dry",
        "dry_until_ms",
        "empty_until_ms",
        "free",
        "idle_since_ms",
        "kind",
        "lock",
        "low_water",
        "on_its_way",
        "owed",
        "refill",
        "returned",
        "revision",
        "seen_free",
        "spent",
        "synced",
        "taken",
        "wanted",
    )

    def __init__(self, account_id: str, kind: str, currency: Currency, now_ms: int) -> None:
        self.account_id = account_id
        self.kind = kind
        self.currency: Currency = currency
        self.free = 0
        self.spent = 0
        self.taken = 0
        self.returned = 0
        self.revision = 0
        self.on_its_way = 0
        self.owed = 0
        self.synced = True  # a new epoch has leased nothing yet
        self.low_water = 0
        self.wanted = 0
        self.refill: asyncio.Task[int] | None = None
        self.lock = asyncio.Lock()
        self.dry = False
        self.dry_until_ms = 0
        self.empty_until_ms = 0
        self.seen_free = 0
        self.idle_since_ms = now_ms

    def held(self) -> int:
        """What open holds have drawn."""
        return self.taken - self.returned - self.free - self.owed - self.spent - self.on_its_way

    def owe(self, excess_pico: int) -> None:
        """The account has given out so much more than it may, here and elsewhere."""
        owed = max(0, min(excess_pico, self.free + self.owed + self.held()))  # a lease that was lost owes no less
        self.free += self.owed - owed
        self.owed = owed

    def returnable_debt(self) -> int:
        """What is owed and not held by a request that still runs."""
        return max(0, self.owed + min(0, self.free))


def adopt(slice: Slice, row: Any) -> None:
    """Take over SQL's word on what was taken and returned, and work out what is free from that."""
    taken, returned, revision = (
        (0, 0, 0) if row is None else (int(row.taken_pico), int(row.returned_pico), row.revision)
    )
    slice.free += slice.on_its_way + (taken - returned) - (slice.taken - slice.returned)
    slice.on_its_way = 0
    slice.taken, slice.returned, slice.revision, slice.synced = taken, returned, revision, True
