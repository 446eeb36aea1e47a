"""What a worker decides on its own while the counter store does not answer, and what it then owes the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from policies.counters.memory import MemoryCounters, monotonic_ms
from policies.counters.rules import SLOT_WAIT_MS, Denial, Grant, Kind, Rule, drain

MAX_MIRRORS = 20_000


@dataclass(slots=True)
class Debt:
    """What the store must still be told of one counter: units of its level (negative: less), and slots to free.

    mark is the window of a calendar; for a bucket the time of `units`, which drain like the bucket itself.
    """

    rule: Rule
    units: int = 0
    mark: int = 0
    members: set[str] = field(default_factory=set)


class Apart:
    """Counts this worker's share of each limit (limit / live workers), and never past what the store last reported.

    held: the members of concurrency slots that this worker has, by counter, wherever they were granted.
    """

    def __init__(self, wall: Callable[[], int], workers: int, held: Mapping[str, set[str]]) -> None:
        self._wall = wall
        self._workers = workers
        self._held = held
        self._local = MemoryCounters(wall=wall)
        self._mirrors: dict[Rule, tuple[Rule, Rule | None]] = {}
        self._debts: dict[str, Debt] = {}

    @property
    def workers(self) -> int:
        return self._workers

    @workers.setter
    def workers(self, workers: int) -> None:
        if workers != self._workers:
            self._workers = workers
            self._mirrors.clear()

    def decide(self, rules: tuple[Rule, ...], tokens: int, member: str) -> Grant | Denial:
        """Decide here, and owe the store what is let through."""
        mirrors = [self._mirror(rule) for rule in rules]
        for rule, (share, _) in zip(rules, mirrors, strict=True):
            if rule.kind == Kind.SLOTS and rule.hard and (held := len(self._held.get(rule.key, ()))) >= share.limit:
                return Denial(share, SLOT_WAIT_MS, (share,), (held,))
        own = tuple(share for share, _ in mirrors if share.kind != Kind.SLOTS)
        whole = tuple(seen for _, seen in mirrors if seen is not None)
        decision = self._local.decide(own + whole, tokens)
        if isinstance(decision, Denial):
            return decision
        marks = [rule.calendar.bounds(self._wall())[0] if rule.calendar else 0 for rule in rules]
        for rule, mark in zip(rules, marks, strict=True):
            self.owe(rule, rule.units(tokens), mark)
        shares = iter(decision.levels)
        levels = [0 if rule.kind == Kind.SLOTS else next(shares) for rule in rules]
        return Grant(rules, tokens, levels, marks, member, local=decision)

    def correct(self, grant: Grant, tokens: int) -> None:
        if grant.local is not None:
            self._local.correct(grant.local, tokens)

    def release(self, grant: Grant, tokens: int | None) -> None:
        if grant.local is not None:
            self._local.release(grant.local, tokens)

    def cancel(self, grant: Grant) -> None:
        if grant.local is not None:
            self._local.cancel(grant.local)

    def observe(self, rules: tuple[Rule, ...], levels: list[int], marks: list[int]) -> None:
        """The store reports these levels; what it has not been told yet comes on top."""
        for i, rule in enumerate(rules):
            _, seen = self._mirror(rule)
            if seen is not None:
                debt = self._debts.get(rule.key)
                more = 0 if debt is None else _units_now(debt)
                self._local.observe(seen, max(0, levels[i] + more), marks[i])

    def owe(self, rule: Rule, units: int, mark: int) -> None:
        """The level of a rule must change by so much on the store. Slots are told by heartbeats, not here."""
        if rule.kind == Kind.SLOTS or not units:
            return
        debt = self._debts.setdefault(rule.key, Debt(rule))
        if rule.kind == Kind.BUCKET:
            debt.units, debt.mark = _units_now(debt) + units, monotonic_ms()
        elif debt.mark == mark:
            debt.units += units
        else:
            debt.units, debt.mark = units, mark

    def owe_release(self, rule: Rule, member: str) -> None:
        """A slot must be freed on the store."""
        self._debts.setdefault(rule.key, Debt(rule)).members.add(member)

    def take_debts(self, payable: Callable[[str], bool]) -> list[Debt]:
        """The debts of counters whose node can be told now; they count as paid."""
        paid = [key for key in self._debts if payable(key)]
        debts = [self._debts.pop(key) for key in paid]
        for debt in debts:
            debt.units = _units_now(debt)
        return debts

    def _mirror(self, rule: Rule) -> tuple[Rule, Rule | None]:
        """The rule as this worker's share, and as the whole that the store last reported (hard windows only)."""
        mirror = self._mirrors.get(rule)
        if mirror is None:
            if len(self._mirrors) >= MAX_MIRRORS:
                self._mirrors.clear()
            seen = rule.share(1, "seen:") if rule.hard and rule.kind != Kind.SLOTS else None
            mirror = self._mirrors[rule] = (rule.share(self._workers, "share:"), seen)
        return mirror


def _units_now(debt: Debt) -> int:
    if debt.rule.kind == Kind.BUCKET and debt.units > 0:
        return drain(debt.units, debt.mark, monotonic_ms(), debt.rule.limit)
    return debt.units
