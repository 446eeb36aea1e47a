"""How much a caller may ask: limits on requests, tokens and concurrency, decided together, all or nothing.

Spend is not decided here: a spend quota is a budget account of the ledger.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from policies.counters.rules import Counters, Denial, Grant, Kind, Rule
from policies.refusal import Refusal
from policies.windows import Calendar, Span, Window

if TYPE_CHECKING:
    from policies.access import Principal

Scope = Literal["global", "team", "key", "end_user"]
Metric = Literal["requests", "tokens", "concurrency", "spend"]
BUCKET_MS: dict[str, int] = {"minute": 60_000, "hour": 3_600_000}
THRESHOLDS = (50, 80, 100)
MAX_PLANS = 4_096
MAX_THRESHOLDS = 10_000


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit as an administrator wrote it.

    scope end_user: `end_user` names one user of the team; None gives each user a counter of their own.
    window: None for concurrency. model: None counts all models together. hard: False never refuses, only reports.
    """

    id: str
    scope: Scope
    metric: Metric
    window: Window | None
    limit: int
    model: str | None = None
    hard: bool = True
    end_user: str | None = None

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"a limit cannot be negative: {self.limit}")
        if (self.window is None) != (self.metric == "concurrency"):
            raise ValueError(f"{self.metric} takes {'no window' if self.metric == 'concurrency' else 'a window'}")


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit has just reached so many per cent. The same one may come again after usage fell back."""

    team_id: str
    key_id: str
    end_user: str | None
    quota: Quota
    percent: int
    used: int
    at_ms: int
    since_ms: int
    """The start of the calendar window; of the hour for a limit without one."""


class Ticket:
    """Leave to run one request. Exactly one of `release` and `cancel` ends it; repeating either is harmless."""

    __slots__ = ("_counters", "_grant")

    def __init__(self, counters: Counters, grant: Grant) -> None:
        self._counters = counters
        self._grant = grant

    def correct(self, actual_tokens: int) -> None:
        """Replace the estimate of tokens by what was used. A later call replaces an earlier one."""
        self._counters.correct(self._grant, actual_tokens)

    def release(self, actual_tokens: int | None = None) -> None:
        """The request is over: its concurrency slots are free again. What it used stays counted.

        With `actual_tokens` it is `correct` and `release` in one, which costs one script instead of two."""
        self._counters.release(self._grant, actual_tokens)

    def cancel(self) -> None:
        """The request was refused further on and never ran: it consumes nothing."""
        self._counters.cancel(self._grant)

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*` with the caller's own numbers: the limit that is nearest, for requests and for tokens."""
        return rate_headers(self._grant.rules, self._grant.levels, self._counters.wall_ms())


class Limiter:
    """Decides whether a request may run now. One per process; the counters are memory's or Redis's."""

    def __init__(self, counters: Counters, *, global_timezone: str = "UTC") -> None:
        self._counters = counters
        self._global_timezone = global_timezone
        self._plans: dict[str, tuple[Principal, dict[tuple[str, str | None], tuple[Rule, ...]]]] = {}
        self._thresholds: deque[Threshold] = deque(maxlen=MAX_THRESHOLDS)
        counters.watch = self._watch

    async def admit(self, principal: Principal, model: str, end_user: str | None, estimated_tokens: int) -> Ticket:
        """Charge every limit that applies, or none. Raises Refusal 429 that names the limit and the exact wait."""
        rules = self._rules(principal, model, end_user)
        decision = await self._counters.admit(rules, estimated_tokens)
        if isinstance(decision, Denial):
            raise self._refusal(decision, estimated_tokens)
        return Ticket(self._counters, decision)

    def take_thresholds(self) -> list[Threshold]:
        """Soft limits, and hard ones of a day, a month or in total, that reached 50, 80 or 100 % since last time."""
        taken = list(self._thresholds)
        self._thresholds.clear()
        return taken

    def decisions(self) -> Mapping[str, int]:
        """How many were made, by where the counters were: `shared`, `local` in an outage, `process` without a store."""
        return self._counters.decisions()

    def degraded(self) -> list[str]:
        return self._counters.degraded()

    def _rules(self, principal: Principal, model: str, end_user: str | None) -> tuple[Rule, ...]:
        known = self._plans.get(principal.key_id)
        if known is None or known[0] is not principal:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            known = self._plans[principal.key_id] = (principal, {})
        plans = known[1]
        who = (model, end_user)
        rules = plans.get(who)
        if rules is None:
            if len(plans) >= MAX_PLANS:
                plans.clear()
            rules = plans[who] = self._compile(principal, model, end_user)
        return rules

    def _compile(self, principal: Principal, model: str, end_user: str | None) -> tuple[Rule, ...]:
        rules: dict[str, Rule] = {}
        for quota in principal.quotas:
            if not applies(quota, model, end_user) or (quota.limit == 0 and not quota.hard):
                continue
            rule = compile_rule(quota, principal, end_user, self._global_timezone)
            twin = rules.get(rule.key)
            if twin is None or rule.limit < twin.limit:
                rules[rule.key] = rule
        return tuple(sorted(rules.values(), key=lambda rule: not rule.shared_by_all))

    def _watch(self, rule: Rule, before: int, after: int) -> None:
        for percent in THRESHOLDS:
            mark = rule.limit * percent * (rule.window_ms or 1)
            if before * 100 < mark <= after * 100 and rule.about is not None:
                principal, end_user, quota = rule.about
                now, used = self._counters.wall_ms(), rule.used(after)
                since = now - now % BUCKET_MS["hour"] if rule.calendar is None else rule.calendar.bounds(now)[0]
                event = Threshold(principal.team_id, principal.key_id, end_user, quota, percent, used, now, since)
                self._thresholds.append(event)

    def _refusal(self, denial: Denial, tokens: int) -> Refusal:
        rule = denial.rule
        if rule is None:
            return Refusal(
                503,
                "api_error",
                "limits_unavailable",
                "Rate limits cannot be checked right now. Try again shortly.",
                retry_after_ms=denial.wait_ms,
                should_retry=True,
            )
        at = denial.rules.index(rule)
        cost, used = rule.cost(tokens), rule.used(denial.levels[at])
        if denial.wait_ms is None and cost > rule.limit:
            advice = "The request alone is larger than the limit: make it smaller, or ask for a higher limit."
        elif denial.wait_ms is None:
            advice = "This limit does not refill: ask for a higher one."
        else:
            advice = f"Try again in {format_duration(denial.wait_ms)}."
        return Refusal(
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
            f"Rate limit reached: {rule.label} (limit {rule.limit}, used {used}, requested {cost}). {advice}",
            retry_after_ms=denial.wait_ms,
            should_retry=denial.wait_ms is not None,
            headers=rate_headers(denial.rules, denial.levels, self._counters.wall_ms()),
        )


def applies(quota: Quota, model: str, end_user: str | None) -> bool:
    """Whether the quota limits such a request by counters."""
    if quota.metric == "spend" or (quota.model is not None and quota.model != model):
        return False
    return quota.scope != "end_user" or (bool(end_user) and quota.end_user in (None, end_user))


def compile_rule(quota: Quota, principal: Principal, end_user: str | None, global_timezone: str) -> Rule:
    """The quota as a rule. The name of its counter does not hold the limit, so raising one keeps the count."""
    everyone = quota.scope == "global"
    subject = {"global": "", "team": "", "key": principal.key_id, "end_user": _short(end_user or "")}[quota.scope]
    softness = "" if quota.hard else ":soft"
    parts = (quota.scope, subject, quota.metric, quota.window or "now", quota.model or "*")
    key = f"tg:{{{'*' if everyone else principal.team_id}}}:{':'.join(parts)}{softness}"
    scope = {"global": "of the service", "team": "of the team", "key": "of this key", "end_user": "of this end user"}
    per = f" per {quota.window}" if quota.window not in (None, "total") else ""
    named = {"requests": f"requests{per}", "tokens": f"tokens{per}", "concurrency": "concurrent requests"}
    total = " in total" if quota.window == "total" else ""
    label = f"{named[quota.metric]}{total} {scope[quota.scope]}{f' for {quota.model}' if quota.model else ''}"
    kind, window_ms, calendar = Kind.SLOTS, 0, None
    if quota.window in BUCKET_MS:
        kind, window_ms = Kind.BUCKET, BUCKET_MS[cast(str, quota.window)]
    elif quota.window is not None:
        kind = Kind.CALENDAR
        calendar = Calendar(cast(Span, quota.window), global_timezone if everyone else principal.timezone)
    return Rule(
        key,
        kind,
        quota.limit,
        metric=quota.metric,
        label=label,
        window_ms=window_ms,
        calendar=calendar,
        hard=quota.hard,
        own=not everyone,
        shared_by_all=everyone,
        about=(principal, end_user, quota),
    )


def rate_headers(rules: tuple[Rule, ...], levels: Iterable[int], wall_ms: int) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` of the hard limit with the least left, per metric."""
    nearest: dict[str, tuple[int, Rule, int]] = {}
    for rule, level in zip(rules, levels, strict=True):
        if rule.own and rule.hard and rule.kind != Kind.SLOTS:
            left = max(0, rule.limit - rule.used(level))
            best = nearest.get(rule.metric)
            if best is None or left < best[0]:
                nearest[rule.metric] = (left, rule, level)
    headers = {}
    for metric, (left, rule, level) in nearest.items():
        headers[f"x-ratelimit-limit-{metric}"] = str(rule.limit)
        headers[f"x-ratelimit-remaining-{metric}"] = str(left)
        headers[f"x-ratelimit-reset-{metric}"] = format_duration(rule.reset_ms(level, wall_ms))
    return headers


def format_duration(ms: int) -> str:
    """As OpenAI writes resets: 120ms, 1s, 1.5s, 6m0s, 2h0m0s."""
    if ms < 1_000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms / 1_000:.3f}".rstrip("0").rstrip(".")
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _short(end_user: str) -> str:
    """End users are free text of any length and may be personal data: the counter holds a digest."""
    return hashlib.blake2b(end_user.encode(), digest_size=12).hexdigest()
