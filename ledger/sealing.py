"""The billing months of a running slot: what runs in each, and which it may no longer admit to.

A slot that is told of a month's close admits to later months at once, whatever its clock says. It journals SEAL when
the last request that it had admitted to that month has ended: nothing of the month can follow in this epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

from ledger.months import ToSeal
from ledger.periods import next_period
from ledger.records import Seal


class BillingMonth:
    """One month of one time zone. `running`: requests that were admitted to it and have not ended."""

    __slots__ = ("period", "running", "shut", "timezone")

    def __init__(self, period: str, timezone: str) -> None:
        self.period = period
        self.timezone = timezone
        self.running = 0
        self.shut = False


class BillingMonths:
    """All of one gate. `at` finds the month of a period, `admit` enters a request into one that is not shut."""

    def __init__(self) -> None:
        self._months: dict[tuple[str, str], BillingMonth] = {}
        self._shut_through: dict[str, str] = {}
        self._to_seal: dict[str, str] = {}
        self._sealed_through: dict[str, str] = {}

    def at(self, period: str, timezone: str) -> BillingMonth:
        """The month that bills what is admitted in `period`: a later one when that is shut."""
        shut_through = self._shut_through.get(timezone, "")
        if period <= shut_through:
            period = next_period(shut_through)
        month = self._months.get((timezone, period))
        if month is None:
            month = self._months[timezone, period] = BillingMonth(period, timezone)
        return month

    def admit(self, month: BillingMonth) -> BillingMonth:
        """The month that the request is in from now on."""
        if month.shut:
            month = self.at(month.period, month.timezone)
        month.running += 1
        return month

    def learn(self, asked: Iterable[ToSeal]) -> None:
        """What SQL says: months that are closing or closed."""
        self._to_seal = {}
        for row in asked:
            if row.period > self._shut_through.get(row.timezone, ""):
                self._shut_through[row.timezone] = row.period
            if row.closing and row.period > self._sealed_through.get(row.timezone, ""):
                self._to_seal[row.timezone] = row.period
        for (timezone, period), month in self._months.items():
            month.shut = period <= self._shut_through.get(timezone, "")

    def due(self) -> list[Seal]:
        """The seals that can be journalled now."""
        return [Seal(period, zone) for zone, period in self._to_seal.items() if not self._running_in(zone, period)]

    def sealed(self, seal: Seal) -> None:
        """It is durable."""
        assert seal.timezone is not None, "made by `due`"
        self._sealed_through[seal.timezone] = seal.period
        if self._to_seal.get(seal.timezone) == seal.period:
            del self._to_seal[seal.timezone]

    def unsealed(self) -> int | None:
        """How many requests still run in months to be sealed; None: there is no such month."""
        if not self._to_seal:
            return None
        return sum(self._running_in(zone, period) for zone, period in self._to_seal.items())

    def _running_in(self, timezone: str, period: str) -> int:
        months = self._months.values()
        return sum(month.running for month in months if month.timezone == timezone and month.period <= period)
