"""What a worker decides on its own while the counter store does not answer, and what it then owes the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from policies.counters.memory import MemoryCounters, monotonic_ms
from policies.counters.rules import LEASE_MS, SLOT_WAIT_MS, Denial, Grant, Kind, Rule, drain

MAX_SHARES = 20_000


@dataclass(slots=True)
class Debt:
    """What the store must still be told of one counter: units of its level (negative: less), and slots to free.

    mark is the window of a calendar; for a bucket the time of `units`, which drain like the bucket itself.
    """

    rule: Rule
    units: int = 0
    mark: int = 0
    members: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _SeenSlots:
    """So many slots were taken when the store last said so, `held` of them by this worker."""

    taken: int
    held: int
    at_ms: int


class Apart:
    """Counts this worker's share of each limit (limit / live workers). What the store last reported as used counts in
    equal parts in all shares: together the workers let through what was left then, and no more.

    held: the members of concurrency slots that this worker has, by counter, wherever they were granted.
    """

    def __init__(self, wall: Callable[[], int], workers: int, held: Mapping[str, set[str]]) -> None:
        self._wall = wall
        self._workers = workers
        self._held = held
        self._local = MemoryCounters(wall=wall)
        self._shares: dict[Rule, Rule] = {}
        self._debts: dict[str, Debt] = {}
        self._slots: dict[str, _SeenSlots] = {}

    @property
    def workers(self) -> int:
        return self._workers

    @workers.setter
    def workers(self, workers: int) -> None:
        if workers != self._workers:
            self._workers = workers
            self._shares.clear()

    def decide(self, rules: tuple[Rule, ...], tokens: int, member: str) -> Grant | Denial:
        """Decide here, and owe the store what is let through."""
        shares = [self._share(rule) for rule in rules]
        for rule, share in zip(rules, shares, strict=True):
            if rule.kind == Kind.SLOTS and rule.hard and not self._has_slot(rule, share):
                return Denial(share, SLOT_WAIT_MS, (share,), (self._held_slots(rule),))
        decision = self._local.decide(tuple(share for share in shares if share.kind != Kind.SLOTS), tokens)
        if isinstance(decision, Denial):
            return decision
        marks = [rule.calendar.bounds(self._wall())[0] if rule.calendar else 0 for rule in rules]
        for rule, mark in zip(rules, marks, strict=True):
            self.owe(rule, rule.units(tokens), mark)
        reached = iter(decision.levels)
        levels = [0 if rule.kind == Kind.SLOTS else next(reached) for rule in rules]
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
            if rule.hard and rule.kind != Kind.SLOTS:
                debt = self._debts.get(rule.key)
                used = max(0, levels[i] + (0 if debt is None else _units_now(debt)))
                self._local.observe(self._share(rule), -(-used // self._workers), marks[i])
            elif rule.hard:
                if len(self._slots) >= MAX_SHARES:
                    self._slots.clear()
                self._slots[rule.key] = _SeenSlots(levels[i], self._held_slots(rule), monotonic_ms())

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

    def _has_slot(self, rule: Rule, share: Rule) -> bool:
        """Whether one more slot fits here. As long as the leases last that the store has reported, all of them count,
        and every other worker may take as many more as this one; later only the own share does."""
        held = self._held_slots(rule)
        seen = self._slots.get(rule.key)
        if seen is not None and monotonic_ms() - seen.at_ms < LEASE_MS:
            more = max(0, held - seen.held) + 1
            if seen.taken - seen.held + held + 1 + (self._workers - 1) * more > rule.limit:
                return False
        return held < share.limit

    def _held_slots(self, rule: Rule) -> int:
        return len(self._held.get(rule.key, ()))

    def _share(self, rule: Rule) -> Rule:
        """The rule as this worker counts it apart."""
        share = self._shares.get(rule)
        if share is None:
            if len(self._shares) >= MAX_SHARES:
                self._shares.clear()
            share = self._shares[rule] = rule.share(self._workers, "share:")
        return share


def _units_now(debt: Debt) -> int:
    if debt.rule.kind == Kind.BUCKET and debt.units > 0:
        return drain(debt.units, debt.mark, monotonic_ms(), debt.rule.limit)
    return debt.units
