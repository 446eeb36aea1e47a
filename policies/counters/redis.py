"""Counters on Redis or Valkey, shared by all workers and hosts: one script a decision, never more than 20 ms.

When the server is away or slow, `Apart` decides. What was let through meanwhile is booked on the server once it answers
again. A concurrency slot is a lease that this worker renews every second: a killed worker's slots are free after four.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import hiredis

from policies.counters.apart import Apart
from policies.counters.memory import wall_ms
from policies.counters.nodes import Nodes
from policies.counters.resp import Address, Pending, Unanswered, Word
from policies.counters.rules import LEASE_MS, Denial, Grant, Kind, Rule, Watch
from policies.counters.scripts import SERVER_CLOCK, Scripts

DEADLINE_MS = 15
"""Leaves 5 of the promised 20 ms for the fall-back."""
BEAT_S = 1.0
TEND_S = 0.2
CONNECT_S = 1.0
SILENT_S = 2.0
OUTAGE_RETRY_MS = 1_000
DEGRADED_S = 1.0
WORKERS_KEY = "tg:{workers}"


class RedisCounters:
    """One per worker process. `workers` is how many share the limits at least; the server tells how many live.

    on_outage: `local` counts shares of the limits here, `refuse` refuses with 503 what has limits.
    """

    def __init__(
        self,
        url: str,
        *,
        workers: int = 1,
        on_outage: Literal["local", "refuse"] = "local",
        deadline_ms: float = DEADLINE_MS,
        wall: Callable[[], int] = wall_ms,
        clock: str = SERVER_CLOCK,
        watch: Watch | None = None,
    ) -> None:
        self._scripts = Scripts(clock)
        self._nodes = Nodes(Address.parse(url), deadline_ms / 1_000, self._scripts.texts())
        self._worker = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._configured_workers = max(1, workers)
        self._on_outage = on_outage
        self._wall = wall
        self._offset_ms = 0
        self._held: dict[str, set[str]] = {}
        self._apart = Apart(self.wall_ms, self._configured_workers, self._held)
        self._apart_until = 0.0
        self._tending: asyncio.Task[None] | None = None
        self._next_beat = 0.0
        self.watch = watch
        self.shared_decisions = 0
        self.local_decisions = 0

    # -- life

    async def open(self) -> None:
        """Connect if the server answers within a second; go on without it otherwise, and keep trying."""
        await self._tend_once()
        self._tending = asyncio.create_task(self._tend())

    async def close(self) -> None:
        """Give back this worker's slots and its place among the live workers."""
        if self._tending is not None:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
        self._pay()
        for key, members in [*self._held.items(), (WORKERS_KEY, {self._worker})]:
            if (link := self._nodes.link(key)) is not None:
                with contextlib.suppress(Unanswered, hiredis.HiredisError):
                    await link.ask("ZREM", key, *members, within_s=0.1)
        self._nodes.close()

    def decisions(self) -> Mapping[str, int]:
        return {"shared": self.shared_decisions, "local": self.local_decisions}

    def degraded(self) -> list[str]:
        """Also right after a decision was made without the server, so that a slow one shows."""
        if self._nodes.usable and time.monotonic() > self._apart_until:
            return []
        if self._on_outage == "refuse":
            return ["The counter store does not answer: requests with limits are refused."]
        return [
            "The counter store does not answer: each worker counts on its own, "
            f"1/{self.live_workers} of what was left of every limit."
        ]

    @property
    def live_workers(self) -> int:
        """How many workers share the limits, as last known."""
        return self._apart.workers

    def wall_ms(self) -> int:
        """UTC milliseconds by the server's clock, as last seen."""
        return self._wall() + self._offset_ms

    # -- decisions

    async def admit(self, rules: tuple[Rule, ...], tokens: int) -> Grant | Denial:
        if not rules:
            return Grant(rules, tokens, [], [])
        member = f"{self._worker}:{next(self._numbers)}"
        if not (self._nodes.cluster and rules[0].shared_by_all and not rules[-1].shared_by_all):
            return await self._decide(rules, tokens, member)
        split = next(i for i, rule in enumerate(rules) if not rule.shared_by_all)
        everyone = await self._decide(rules[:split], tokens, member)
        if isinstance(everyone, Denial):
            return everyone
        try:
            tenant = await self._decide(rules[split:], tokens, member)
        except asyncio.CancelledError:
            self.cancel(everyone)
            raise
        if isinstance(tenant, Denial):
            self.cancel(everyone)
            return tenant
        return _joined(everyone, tenant)

    def correct(self, grant: Grant, tokens: int) -> None:
        for part in grant.parts:
            self.correct(part, tokens)
        if not grant.parts and tokens != grant.tokens:
            changes = _token_changes(grant, tokens)
            grant.tokens = tokens
            self._change(grant, changes)
            self._apart.correct(grant, tokens)

    def release(self, grant: Grant, tokens: int | None = None) -> None:
        for part in grant.parts:
            self.release(part, tokens)
        if grant.finished:
            if tokens is not None and not grant.parts:
                self.correct(grant, tokens)
            return
        grant.finished = True
        used = grant.tokens if tokens is None else tokens
        changes = [(i, 0) for i, rule in enumerate(grant.rules) if rule.kind == Kind.SLOTS]
        changes += _token_changes(grant, used)
        grant.tokens = used
        self._change(grant, changes)
        self._apart.release(grant, tokens)

    def cancel(self, grant: Grant) -> None:
        for part in grant.parts:
            self.cancel(part)
        if not grant.finished:
            grant.finished = True
            self._change(grant, [(i, -rule.units(grant.tokens)) for i, rule in enumerate(grant.rules)])
            self._apart.cancel(grant)

    async def _decide(self, rules: tuple[Rule, ...], tokens: int, member: str) -> Grant | Denial:
        link = self._nodes.link(rules[0].key)
        if link is None:
            return self._decide_apart(rules, tokens, member)
        asker = _Decision(self, rules, tokens, member)
        words = self._question(rules, tokens, member)
        pending = link.send("EVALSHA", self._scripts.admit.sha, len(rules), *words, asker=asker)
        try:
            return cast("Grant | Denial", await pending.future)
        except hiredis.HiredisError as error:  # LOADING, MOVED, NOSCRIPT, OOM, READONLY …
            self._nodes.stale = True
            if "NOSCRIPT" in str(error):
                await self._reload()
            return self._decide_apart(rules, tokens, member)
        except asyncio.CancelledError:
            future = pending.future  # answered in this very tick, or answered later: see `_settle_late`
            if not future.cancelled() and not future.exception() and isinstance(grant := future.result(), Grant):
                self.cancel(grant)
            raise

    def _question(self, rules: tuple[Rule, ...], tokens: int, member: str) -> list[Word]:
        words: list[Word] = [rule.key for rule in rules]
        for rule in rules:
            hard = 1 if rule.hard else 0
            if rule.kind == Kind.BUCKET:
                words += ("b", hard, rule.limit, rule.cost(tokens), rule.window_ms, "")
            elif rule.calendar is not None:
                start, end = rule.calendar.bounds(self.wall_ms())
                words += ("c", hard, rule.limit, rule.cost(tokens), start, end)
            else:
                words += ("s", hard, rule.limit, 1, LEASE_MS, member)
        return words

    def _read(self, reply: Any, rules: tuple[Rule, ...], tokens: int, member: str) -> Grant | Denial:
        self.shared_decisions += 1
        now, refusing, wait_ms = reply[0], reply[1], reply[2]
        self._offset_ms = now - self._wall()
        levels: list[int] = reply[3::2]
        marks: list[int] = reply[4::2]
        if refusing:
            self._apart.observe(rules, levels, marks)
            return Denial(rules[refusing - 1], None if wait_ms < 0 else wait_ms, rules, tuple(levels))
        for i, rule in enumerate(rules):
            before = levels[i]
            levels[i] = before + rule.units(tokens)
            if rule.watched and self.watch is not None:
                self.watch(rule, before, levels[i])
        self._hold(rules, member)
        self._apart.observe(rules, levels, marks)
        return Grant(rules, tokens, levels, marks, member)

    def _decide_apart(self, rules: tuple[Rule, ...], tokens: int, member: str) -> Grant | Denial:
        self.local_decisions += 1
        self._apart_until = time.monotonic() + DEGRADED_S
        if self._on_outage == "refuse":
            return Denial(None, OUTAGE_RETRY_MS)
        decision = self._apart.decide(rules, tokens, member)
        if isinstance(decision, Grant):
            self._hold(rules, member)
        return decision

    def _settle_late(
        self, reply: Any, rules: tuple[Rule, ...], tokens: int, member: str, decision: Grant | Denial | None
    ) -> None:
        """The server has decided after all, and the request went on without it, or not at all: count it once."""
        if not isinstance(reply, list):
            return
        granted = not reply[1]
        marks: list[int] = reply[4::2]
        levels = [level + granted * rule.units(tokens) for level, rule in zip(reply[3::2], rules, strict=True)]
        if granted and isinstance(decision, Grant) and not decision.finished:
            for i, rule in enumerate(rules):
                self._apart.owe(rule, -rule.units(tokens), decision.marks[i])
        elif granted:
            undone = Grant(rules, tokens, levels, marks, member)
            self._change(undone, [(i, -rule.units(tokens)) for i, rule in enumerate(rules)])
        self._apart.observe(rules, levels, marks)

    # -- telling the server

    def _change(self, grant: Grant, changes: list[tuple[int, int]]) -> None:
        """Change the level of some rules by so many units; a slot of the grant's member is freed."""
        if not changes:
            return
        self._drop(grant)
        link = self._nodes.link(grant.rules[0].key)
        if link is None:
            for i, units in changes:
                if grant.rules[i].kind == Kind.SLOTS:
                    self._apart.owe_release(grant.rules[i], grant.member)
                else:
                    self._apart.owe(grant.rules[i], units, grant.marks[i])
            return
        rules = [grant.rules[i] for i, _ in changes]
        words: list[Word] = [rule.key for rule in rules]
        for i, units in changes:
            level_after = -1 if grant.local is not None else grant.levels[i]
            grant.levels[i] = max(0, grant.levels[i] + units)
            words += self._correction(grant.rules[i], units, level_after, grant.marks[i], grant.member)
        self._watch_later(link.send("EVALSHA", self._scripts.adjust.sha, len(rules), *words), rules)

    def _correction(self, rule: Rule, units: int, level_after: int, mark: int, member: str) -> tuple[Word, ...]:
        if rule.calendar is None:
            return ("b" if rule.kind == Kind.BUCKET else "s", rule.limit, units, level_after, mark, member)
        _, end = rule.calendar.bounds(self.wall_ms())
        return ("c", rule.limit, units, -1, mark, end)

    def _watch_later(self, pending: Pending, rules: list[Rule]) -> None:
        """Report soft limits once the server has said what a change led to."""

        def watch(future: asyncio.Future[object]) -> None:
            if future.cancelled() or future.exception() is not None or self.watch is None:
                return
            reply: Any = future.result()
            for i, rule in enumerate(rules):
                if rule.watched and reply[2 * i] >= 0:
                    self.watch(rule, reply[2 * i], reply[2 * i + 1])

        pending.future.add_done_callback(watch)

    def _hold(self, rules: tuple[Rule, ...], member: str) -> None:
        for rule in rules:
            if rule.kind == Kind.SLOTS:
                self._held.setdefault(rule.key, set()).add(member)

    def _drop(self, grant: Grant) -> None:
        if not grant.finished:
            return
        for rule in grant.rules:
            if rule.kind == Kind.SLOTS and (members := self._held.get(rule.key)) is not None:
                members.discard(grant.member)
                if not members:
                    del self._held[rule.key]

    # -- tending

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_S)
            await self._tend_once()

    async def _tend_once(self) -> None:
        """Reconnect, book what is owed, beat; an absent server is tried again next time."""
        now = asyncio.get_running_loop().time()
        self._nodes.give_up_on(SILENT_S)
        try:
            if self._nodes.stale:
                await self._nodes.refresh(CONNECT_S)
                self._next_beat = 0.0
        except (OSError, TimeoutError, Unanswered, hiredis.HiredisError):
            self._nodes.stale = True  # other nodes of a cluster are served all the same
        self._pay()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            try:
                await self._beat()
            except (Unanswered, hiredis.HiredisError):
                self._nodes.stale = True

    def _pay(self) -> None:
        """Book on the server what was let through without it, and free what was given back meanwhile."""
        for debt in self._apart.take_debts(lambda key: self._nodes.link(key) is not None):
            rule = debt.rule
            link = self._nodes.link(rule.key)
            if link is None:
                continue
            if debt.members:
                link.tell("ZREM", rule.key, *debt.members)
            if debt.units:
                words = self._correction(rule, debt.units, -1, debt.mark, "")
                self._watch_later(link.send("EVALSHA", self._scripts.adjust.sha, 1, rule.key, *words), [rule])

    async def _beat(self) -> None:
        """Keep this worker's slots and its place among the live workers for another while."""
        for key, members in self._held.items():
            if (link := self._nodes.link(key)) is not None:
                link.tell("EVALSHA", self._scripts.beat.sha, 1, key, LEASE_MS, *members)
        if (link := self._nodes.link(WORKERS_KEY)) is not None:
            words = (1, WORKERS_KEY, LEASE_MS, self._worker)
            reply: Any = await link.ask("EVALSHA", self._scripts.beat.sha, *words, within_s=CONNECT_S)
            self._offset_ms = reply[0] - self._wall()
            self._apart.workers = max(self._configured_workers, reply[1])

    async def _reload(self) -> None:
        with contextlib.suppress(Unanswered, hiredis.HiredisError):
            await self._nodes.load_scripts(DEADLINE_MS / 1_000)


class _Decision:
    """One question to the server, and what becomes of it with or without an answer."""

    __slots__ = ("_apart", "_counters", "_member", "_rules", "_tokens")

    def __init__(self, counters: RedisCounters, rules: tuple[Rule, ...], tokens: int, member: str) -> None:
        self._counters, self._rules, self._tokens, self._member = counters, rules, tokens, member
        self._apart: Grant | Denial | None = None

    def read(self, reply: object) -> object:
        return self._counters._read(reply, self._rules, self._tokens, self._member)

    def lapse(self) -> object:
        self._apart = self._counters._decide_apart(self._rules, self._tokens, self._member)
        return self._apart

    def late(self, reply: object) -> None:
        self._counters._settle_late(reply, self._rules, self._tokens, self._member, self._apart)


def _token_changes(grant: Grant, tokens: int) -> list[tuple[int, int]]:
    """(index, units) of the rules that count tokens, when a grant turns out to have used `tokens`."""
    if tokens == grant.tokens:
        return []
    counted = [i for i, rule in enumerate(grant.rules) if rule.metric == "tokens"]
    return [(i, grant.rules[i].units(tokens) - grant.rules[i].units(grant.tokens)) for i in counted]


def _joined(first: Grant, second: Grant) -> Grant:
    """Two grants for one request, made on two nodes."""
    return Grant(
        first.rules + second.rules,
        first.tokens,
        first.levels + second.levels,
        first.marks + second.marks,
        finished=True,
        parts=(first, second),
    )
