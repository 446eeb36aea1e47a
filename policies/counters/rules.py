"""What a counter store is asked and what it answers. The arithmetic is here, once, as functions of integers.

A minute or hour limit is a bucket (GCRA with burst = limit). Its level is kept in units x window_ms and drains `limit`
per millisecond, so every figure is an exact integer: in a burst exactly `limit` pass, and in any span t at most
limit x (1 + t / window). Level x window stays below 2**53, so that a Lua double is exact too.
Source: ITU-T I.371, the continuous-state leaky bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from policies.windows import Calendar

MAX_EXACT = 2**53 - 1
SLOT_WAIT_MS = 1_000
"""When a concurrency slot comes free cannot be known; clients are told to come back after this."""
LEASE_MS = 4_000
"""How long a concurrency slot stays taken after the last heartbeat of the worker that has it."""


class Kind(IntEnum):
    BUCKET = 0
    CALENDAR = 1
    SLOTS = 2


class Rule:
    """One limit on one counter, named `key`; the `{…}` part keeps a tenant's counters on one cluster slot."""

    __slots__ = (
        "about",
        "calendar",
        "hard",
        "key",
        "kind",
        "label",
        "limit",
        "metric",
        "own",
        "shared_by_all",
        "watched",
        "window_ms",
    )

    def __init__(
        self,
        key: str,
        kind: Kind,
        limit: int,
        *,
        metric: str,
        label: str,
        window_ms: int = 0,
        calendar: Calendar | None = None,
        hard: bool = True,
        own: bool = True,
        shared_by_all: bool = False,
        about: Any = None,
    ) -> None:
        self.key = key
        self.kind = kind
        self.limit = min(limit, MAX_EXACT // (2 * window_ms)) if window_ms else limit
        self.metric = metric
        self.label = label
        self.window_ms = window_ms
        self.calendar = calendar
        self.hard = hard
        self.watched = not hard or calendar is not None
        """Somebody wants to hear how full it is; a hard limit a minute tells its callers, and that is enough."""
        self.own = own
        """The caller may be told these numbers: they are not those of all tenants together."""
        self.shared_by_all = shared_by_all
        self.about = about
        """What the one who watches knows it by. It lives as long as the rule, so nobody has to remember it."""

    def share(self, workers: int, prefix: str) -> Rule:
        """The same rule for one of so many workers, on a counter of its own; at least 1 unless the limit is 0."""
        return Rule(
            prefix + self.key,
            self.kind,
            max(self.limit // workers, min(self.limit, 1)),
            metric=self.metric,
            label=self.label,
            window_ms=self.window_ms,
            calendar=self.calendar,
            hard=self.hard,
            own=self.own,
            shared_by_all=self.shared_by_all,
        )

    def cost(self, tokens: int) -> int:
        """What a request of so many tokens takes, in units of the limit."""
        return tokens if self.metric == "tokens" else 1

    def units(self, tokens: int) -> int:
        """What a request of so many tokens adds to the level."""
        return (tokens if self.metric == "tokens" else 1) * (self.window_ms or 1)

    def used(self, level: int) -> int:
        """A level in units of the limit, rounded up."""
        return -(-level // self.window_ms) if self.kind == Kind.BUCKET else level

    def reset_ms(self, level: int, wall_ms: int) -> int:
        """How long until the counter is empty if nothing more comes."""
        if self.kind == Kind.BUCKET:
            return -(-level // self.limit) if self.limit else 0
        if self.calendar is None:
            return 0
        _, end = self.calendar.bounds(wall_ms)
        return max(0, end - wall_ms)


def drain(level: int, at_ms: int, now_ms: int, limit: int) -> int:
    """The level of a bucket at `now_ms`. A clock that went back drains nothing."""
    return max(0, level - (now_ms - at_ms) * limit) if now_ms > at_ms else level


def bucket_wait_ms(over: int, limit: int) -> int:
    """Exact wait until a bucket that is over by so much has room."""
    return -(-over // limit)


def refundable(amount: int, level_after: int, at_ms: int, now_ms: int, limit: int) -> int:
    """How much of a charge may be given back to a bucket: what of the level right after it has not drained yet.

    More would make room for requests that the exact charge would not have let pass.
    """
    return min(amount, drain(level_after, at_ms, now_ms, limit))


@dataclass(slots=True, eq=False)
class Grant:
    """A decision that let a request pass; what is needed to correct or undo it.

    levels[i] is the level of rules[i] with this request, marks[i] the clock of a bucket or the window of a calendar.
    member names the concurrency slot, local is the decision made without the server, parts are decisions of two nodes.
    """

    rules: tuple[Rule, ...]
    tokens: int
    levels: list[int]
    marks: list[int]
    member: str = ""
    local: Grant | None = None
    parts: tuple[Grant, ...] = ()
    finished: bool = False


@dataclass(slots=True, eq=False)
class Denial:
    """A decision that did not. `levels` are without the request; `wait_ms` None: waiting does not help.

    rule is None when the store could not decide and is told to refuse then.
    """

    rule: Rule | None
    wait_ms: int | None
    rules: tuple[Rule, ...] = ()
    levels: tuple[int, ...] = ()


Watch = Callable[[Rule, int, int], None]
"""Called for a watched rule with its level before and after a charge."""


class Counters(Protocol):
    """A counter store. Decisions are all or nothing; a denial consumes nothing."""

    watch: Watch | None

    async def open(self) -> None:
        """Get ready. Does not fail when the store is away: it is then degraded."""

    async def admit(self, rules: tuple[Rule, ...], tokens: int) -> Grant | Denial:
        """Charge every rule, or none."""

    def correct(self, grant: Grant, tokens: int) -> None:
        """The request took so many tokens after all."""

    def release(self, grant: Grant, tokens: int | None = None) -> None:
        """The request is over and took so many tokens (None: as many as charged): its slots are free.

        Harmless when repeated."""

    def cancel(self, grant: Grant) -> None:
        """The request never ran: take back everything. Harmless when repeated."""

    def wall_ms(self) -> int:
        """UTC milliseconds, by the store's clock."""

    def decisions(self) -> Mapping[str, int]:
        """How many were made, by where the counters were: `shared`, `local` in an outage, `process` without a store."""

    def degraded(self) -> list[str]:
        """What does not work as it should, in sentences; empty when all is well."""

    async def close(self) -> None:
        """Free what this process holds."""
