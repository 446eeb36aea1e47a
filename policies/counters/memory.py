"""Counters of one process. A decision touches no lock, no file and no socket, and never yields to the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from policies.counters.rules import SLOT_WAIT_MS, Denial, Grant, Kind, Rule, Watch, bucket_wait_ms, drain, refundable
from policies.windows import NEVER, settle_window

SWEEP_EVERY = 20_000
IDLE_BUCKET_MS = 2 * 3_600_000
IDLE_CALENDAR_MS = 64 * 24 * 3_600_000


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryCounters:
    """Buckets run on the monotonic clock, so no jump of the wall clock refills or blocks them; calendars on the wall's.

    A counter is [level, mark]: for a bucket the time of the level, for a calendar the start of its window.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], int] = monotonic_ms,
        wall: Callable[[], int] = wall_ms,
        watch: Watch | None = None,
    ) -> None:
        self._monotonic = monotonic
        self.wall_ms = wall
        self.watch = watch
        self._buckets: dict[str, list[int]] = {}
        self._calendars: dict[str, list[int]] = {}
        self._slots: dict[str, int] = {}
        self._decisions = 0
        self._decided = 0

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    def decisions(self) -> Mapping[str, int]:
        return {"process": self._decided}

    def degraded(self) -> list[str]:
        return []

    async def admit(self, rules: tuple[Rule, ...], tokens: int) -> Grant | Denial:
        return self.decide(rules, tokens)

    def decide(self, rules: tuple[Rule, ...], tokens: int) -> Grant | Denial:
        """`admit`, for callers that are not coroutines."""
        self._decided += 1
        now = self._monotonic()
        levels: list[int] = []
        marks: list[int] = []
        worst: Rule | None = None
        wait: int | None = 0
        for rule in rules:
            limit, cost = rule.limit, tokens if rule.metric == "tokens" else 1
            if rule.kind == Kind.BUCKET:
                window = rule.window_ms
                state = self._buckets.get(rule.key)
                level = cost * window + (0 if state is None else drain(state[0], state[1], now, limit))
                over = level - limit * window
                mark = now
            elif rule.kind == Kind.CALENDAR:
                mark, level = self._window(rule)
                level += cost
                over = level - limit
            else:
                level = self._slots.get(rule.key, 0) + 1
                over, mark = level - limit, 0
            levels.append(level)
            marks.append(mark)
            if over > 0 and rule.hard and (worst is None or wait is not None):
                needed = self._wait_ms(rule, over, cost)
                if worst is None or needed is None or (wait is not None and needed > wait):
                    worst, wait = rule, needed
        if worst is not None:
            return Denial(worst, wait, rules, self._without(rules, levels, tokens))
        self._store(rules, levels, marks, tokens)
        return Grant(rules, tokens, levels, marks)

    def correct(self, grant: Grant, tokens: int) -> None:
        more = tokens - grant.tokens
        if more:
            for i, rule in enumerate(grant.rules):
                if rule.metric == "tokens":
                    self._adjust(grant, i, more)
            grant.tokens = tokens

    def release(self, grant: Grant, tokens: int | None = None) -> None:
        if tokens is not None:
            self.correct(grant, tokens)
        if not grant.finished:
            grant.finished = True
            for rule in grant.rules:
                if rule.kind == Kind.SLOTS:
                    self._free(rule.key)

    def cancel(self, grant: Grant) -> None:
        if not grant.finished:
            for i, rule in enumerate(grant.rules):
                if rule.kind != Kind.SLOTS:
                    self._adjust(grant, i, -rule.cost(grant.tokens))
            self.release(grant)

    def observe(self, rule: Rule, level: int, mark: int) -> None:
        """Take over a level that another store reported just now."""
        if rule.kind == Kind.BUCKET:
            self._buckets[rule.key] = [level, self._monotonic()]
        elif rule.kind == Kind.CALENDAR:
            self._calendars[rule.key] = [level, mark]

    def _store(self, rules: tuple[Rule, ...], levels: list[int], marks: list[int], tokens: int) -> None:
        for i, rule in enumerate(rules):
            if rule.kind == Kind.BUCKET:
                self._buckets[rule.key] = [levels[i], marks[i]]
            elif rule.kind == Kind.CALENDAR:
                self._calendars[rule.key] = [levels[i], marks[i]]
            else:
                self._slots[rule.key] = levels[i]
            if rule.watched and self.watch is not None:
                self.watch(rule, levels[i] - rule.units(tokens), levels[i])
        self._decisions += 1
        if self._decisions % SWEEP_EVERY == 0:
            self._sweep()

    def _window(self, rule: Rule) -> tuple[int, int]:
        """(start, used) of a calendar counter now."""
        assert rule.calendar is not None
        start, end = rule.calendar.bounds(self.wall_ms())
        state = self._calendars.get(rule.key)
        if state is None:
            return start, 0
        start, used = settle_window(state[1], state[0], start, end)
        if start < state[1]:  # moved back: that must last, whatever is decided now
            state[1] = start
        return start, used

    def _wait_ms(self, rule: Rule, over: int, cost: int) -> int | None:
        if cost > rule.limit:
            return None
        if rule.kind == Kind.BUCKET:
            return bucket_wait_ms(over, rule.limit)
        if rule.calendar is None:
            return SLOT_WAIT_MS
        now = self.wall_ms()
        _, end = rule.calendar.bounds(now)
        return None if end == NEVER else end - now

    def _adjust(self, grant: Grant, i: int, more: int) -> None:
        """Charge or give back so many units; never more than is still there."""
        rule = grant.rules[i]
        if rule.kind == Kind.BUCKET:
            now = self._monotonic()
            level, at = self._buckets.get(rule.key) or (0, now)
            before = drain(level, at, now, rule.limit)
            change = more * rule.window_ms
            if change < 0:
                change = -refundable(-change, grant.levels[i], grant.marks[i], now, rule.limit)
            after = max(0, before + change)
            grant.levels[i] += change
            self._buckets[rule.key] = [after, now]
        else:
            state = self._calendars.get(rule.key)
            if state is None or state[1] != grant.marks[i]:
                return  # that window is over
            before = state[0]
            after = state[0] = max(0, before + more)
        if rule.watched and self.watch is not None:
            self.watch(rule, before, after)

    def _free(self, key: str) -> None:
        left = self._slots.get(key, 0) - 1
        if left > 0:
            self._slots[key] = left
        else:
            self._slots.pop(key, None)

    def _without(self, rules: tuple[Rule, ...], levels: list[int], tokens: int) -> tuple[int, ...]:
        return tuple(level - rule.units(tokens) for rule, level in zip(rules, levels, strict=True))

    def _sweep(self) -> None:
        """Forget counters that no longer limit anything: one per end user would otherwise stay for ever."""
        bucket_horizon = self._monotonic() - IDLE_BUCKET_MS
        calendar_horizon = self.wall_ms() - IDLE_CALENDAR_MS
        self._buckets = {key: state for key, state in self._buckets.items() if state[1] > bucket_horizon}
        self._calendars = {k: s for k, s in self._calendars.items() if s[1] == 0 or s[1] > calendar_horizon}
