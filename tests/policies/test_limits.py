"""Promises of limits, on memory and on a real Valkey, against an exact model."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies import quotas
from policies.quotas import Quota
from tests.policies.stores import NOON, Store

MINUTE = 60_000
HOUR = 3_600_000
DAY = 24 * HOUR
exactly = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def per_minute(limit: int, metric: str = "requests", **more: object) -> Quota:
    return Quota(f"q-{metric}-{limit}", "key", metric, "minute", limit, **more)  # type: ignore[arg-type]


@dataclass
class Bucket:
    """The definition, in fractions: fills by cost, drains `limit` per window, never above `limit`."""

    limit: int
    window_ms: int
    level: Fraction = field(default_factory=Fraction)
    at: int = NOON

    def admit(self, now: int, cost: int) -> bool:
        self.level = max(Fraction(0), self.level - Fraction((now - self.at) * self.limit, self.window_ms))
        self.at = now
        if self.level + cost > self.limit:
            return False
        self.level += cost
        return True


@exactly
@given(
    limit=st.integers(1, 50),
    steps=st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 12)), min_size=1, max_size=30),
)
def test_decisions_are_those_of_the_exact_bucket(store: Store, limit: int, steps: list[tuple[int, int]]) -> None:
    store.at(NOON)
    caller, model = store.new_caller(per_minute(limit, "tokens")), Bucket(limit, MINUTE)
    for pause, cost in steps:
        store.pass_ms(pause)
        assert (store.ask(caller, cost) is not None) == model.admit(store.now, cost)


@exactly
@given(
    limit=st.integers(1, 30),
    steps=st.lists(st.tuples(st.integers(0, 9_000), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30),
)
def test_in_any_span_what_was_used_is_at_most_limit_times_one_plus_span_by_window(
    store: Store, limit: int, steps: list[tuple[int, int, int]]
) -> None:
    """Also when estimates are corrected downwards at any later time."""
    store.at(NOON)
    caller = store.new_caller(per_minute(limit, "tokens"))
    used: list[tuple[int, int]] = []
    open_tickets = []
    for pause, estimate, actual in steps:
        store.pass_ms(pause)
        ticket = store.ask(caller, estimate)
        if ticket is not None:
            used.append((store.now, min(actual, estimate)))
            open_tickets.append((ticket, min(actual, estimate)))
        if len(open_tickets) > 2:
            late, tokens = open_tickets.pop(0)
            late.release(tokens)
            store.settle()
    for first, (start, _) in enumerate(used):
        for end in range(first, len(used)):
            total = sum(tokens for _, tokens in used[first : end + 1])
            assert total * MINUTE <= limit * (MINUTE + used[end][0] - start)


@exactly
@given(
    limit=st.integers(1, 1_000),
    window=st.sampled_from(["minute", "hour"]),
    cost=st.integers(1, 50),
    pauses=st.lists(st.integers(0, 500), min_size=1, max_size=12),
)
def test_the_wait_is_exact_to_the_millisecond(
    store: Store, limit: int, window: str, cost: int, pauses: list[int]
) -> None:
    store.at(NOON)
    caller = store.new_caller(Quota("q", "team", "tokens", window, limit))  # type: ignore[arg-type]
    for pause in pauses:
        store.pass_ms(pause)
        if store.ask(caller, cost) is None:
            wait = store.refusal.retry_after_ms
            if wait is None:
                assert cost > limit
                return
            store.pass_ms(wait - 1)
            assert store.ask(caller, cost) is None
            assert store.refusal.retry_after_ms == 1
            store.pass_ms(1)
            assert store.ask(caller, cost) is not None


@pytest.mark.parametrize("limit", [1, 7, 1_000])
def test_a_burst_admits_exactly_the_limit(store: Store, limit: int) -> None:
    caller = store.new_caller(per_minute(limit))
    assert sum(store.ask(caller) is not None for _ in range(limit + 50)) == limit
    assert store.refusal.status == 429
    assert store.refusal.should_retry is True


def test_a_refusal_consumes_nothing_of_any_limit(store: Store) -> None:
    caller = store.new_caller(
        Quota("a", "team", "requests", "minute", 100),
        Quota("b", "key", "requests", "day", 100),
        Quota("c", "key", "concurrency", None, 100),
        Quota("d", "key", "tokens", "hour", 10),
    )
    first = store.ask(caller, 10)
    assert first is not None
    for _ in range(500):
        assert store.ask(caller, 1) is None
    assert "tokens per hour of this key (limit 10, used 10, requested 1)" in store.refusal.message
    assert store.refusal.headers["x-ratelimit-remaining-requests"] == "99"
    first.release(0)
    store.settle()
    second = store.ask(caller, 10)
    assert second is not None
    assert second.headers()["x-ratelimit-remaining-requests"] == "98"
    assert second.headers()["x-ratelimit-remaining-tokens"] == "0"


def test_of_several_limits_the_one_that_lasts_longest_is_named(store: Store) -> None:
    caller = store.new_caller(
        Quota("a", "key", "requests", "minute", 1), Quota("b", "team", "requests", "hour", 1, model="m")
    )
    assert store.ask(caller) is not None
    assert store.ask(caller) is None
    assert "requests per hour of the team for m" in store.refusal.message
    assert store.refusal.retry_after_ms == HOUR


def test_a_cancelled_request_leaves_no_trace(store: Store) -> None:
    caller = store.new_caller(
        per_minute(1), Quota("t", "key", "tokens", "total", 5), Quota("c", "key", "concurrency", None, 1)
    )
    for _ in range(20):
        ticket = store.ask(caller, 5)
        assert ticket is not None
        ticket.cancel()
        ticket.cancel()
        ticket.release()
        store.settle()


def test_tokens_above_the_estimate_are_charged_and_below_given_back(store: Store) -> None:
    caller = store.new_caller(per_minute(100, "tokens"))
    ticket = store.ask(caller, 10)
    assert ticket is not None
    ticket.correct(90)
    ticket.correct(95)
    store.settle()
    assert store.ask(caller, 6) is None
    ticket.release(40)
    store.settle()
    assert store.ask(caller, 60) is not None
    assert store.ask(caller, 1) is None


def test_a_request_larger_than_its_limit_is_told_that_waiting_is_in_vain(store: Store) -> None:
    caller = store.new_caller(per_minute(100, "tokens"))
    assert store.ask(caller, 101) is None
    assert store.refusal.retry_after_ms is None
    assert store.refusal.should_retry is False
    assert "larger than the limit" in store.refusal.message


def test_never_more_at_once_than_the_concurrency_limit(store: Store) -> None:
    caller = store.new_caller(Quota("c", "team", "concurrency", None, 8))
    running = [store.ask(caller) for _ in range(20)]
    assert sum(ticket is not None for ticket in running) == 8
    assert store.refusal.retry_after_ms == 1_000
    for _ in range(3):  # repeating a release frees one slot only
        assert running[0] is not None
        running[0].release()
    store.settle()
    assert store.ask(caller) is not None
    assert store.ask(caller) is None


def test_scopes_are_counted_apart(store: Store) -> None:
    quotas = (
        Quota("u", "end_user", "requests", "minute", 1),
        Quota("n", "end_user", "requests", "minute", 2, end_user="vip", model="m2"),
        Quota("m", "key", "requests", "minute", 3, model="m1"),
    )
    caller = store.new_caller(*quotas)
    assert [store.ask(caller, model="m1", end_user=user) is not None for user in ("a", "a", "b")] == [True, False, True]
    assert [store.ask(caller, model="m1") is not None for _ in range(3)] == [True, False, False]
    assert store.ask(caller, model="m2") is not None
    other = store.new_caller(*quotas)
    assert store.ask(other, model="m1", end_user="a") is not None


def test_a_global_limit_is_shared_by_all_teams_and_its_numbers_are_not_shown(store: Store) -> None:
    everyone = Quota("g", "global", "requests", "hour", 3, model=f"only-{store.now}-{id(store)}")
    callers = [store.new_caller(everyone), store.new_caller(everyone)]
    model = everyone.model or ""
    tickets = [store.ask(callers[i % 2], model=model) for i in range(4)]
    assert [ticket is not None for ticket in tickets] == [True, True, True, False]
    assert tickets[0] is not None
    assert tickets[0].headers() == {}


def test_headers_are_the_callers_own_numbers(store: Store) -> None:
    caller = store.new_caller(per_minute(60), Quota("t", "team", "tokens", "hour", 3_600_000))
    for _ in range(3):
        ticket = store.ask(caller, 1_000)
    assert ticket is not None
    assert ticket.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "57",
        "x-ratelimit-reset-requests": "3s",
        "x-ratelimit-limit-tokens": "3600000",
        "x-ratelimit-remaining-tokens": "3597000",
        "x-ratelimit-reset-tokens": "3s",
    }


def test_a_soft_limit_reports_and_never_refuses(store: Store) -> None:
    quota = Quota("s", "team", "tokens", "month", 100, hard=False)
    caller = store.new_caller(quota)
    tickets = [store.ask(caller, 30, end_user="u") for _ in range(4)]
    assert None not in tickets
    crossed = store.limiter.take_thresholds()
    assert [(event.percent, event.used) for event in crossed] == [(50, 60), (80, 90), (100, 120)]
    assert {event.quota.id for event in crossed} == {"s"}
    assert {event.team_id for event in crossed} == {caller.team_id}
    assert store.limiter.take_thresholds() == []


def test_a_hard_limit_of_a_day_reports_too_and_one_of_a_minute_does_not(store: Store) -> None:
    caller = store.new_caller(Quota("d", "team", "requests", "day", 4), Quota("m", "team", "requests", "minute", 4))
    assert [store.ask(caller) is not None for _ in range(5)] == [True] * 4 + [False]
    crossed = store.limiter.take_thresholds()
    assert [(event.quota.id, event.percent) for event in crossed] == [("d", 50), ("d", 80), ("d", 100)]


def test_raising_a_limit_keeps_what_was_counted(store: Store) -> None:
    caller = store.new_caller(Quota("old", "team", "requests", "day", 2))
    assert [store.ask(caller) is not None for _ in range(3)] == [True, True, False]
    raised = store.new_caller()
    raised = type(caller)(
        caller.team_id,
        caller.key_id,
        "test",
        "CNY",
        caller.timezone,
        quotas=(Quota("new", "team", "requests", "day", 3),),
    )
    assert [store.ask(raised) is not None for _ in range(2)] == [True, False]


# -- calendar windows

SHANGHAI_MONTH_TURN = NOON + 4 * HOUR
UTC_MONTH_TURN = SHANGHAI_MONTH_TURN + 8 * HOUR


@pytest.mark.parametrize(("timezone", "turn"), [("Asia/Shanghai", SHANGHAI_MONTH_TURN), ("UTC", UTC_MONTH_TURN)])
@pytest.mark.parametrize("window", ["day", "month"])
def test_calendar_limits_turn_at_the_teams_midnight(store: Store, timezone: str, turn: int, window: str) -> None:
    caller = store.new_caller(Quota("d", "team", "requests", window, 3), timezone=timezone)  # type: ignore[arg-type]
    store.at(turn - 1)
    assert [store.ask(caller) is not None for _ in range(4)] == [True, True, True, False]
    assert store.refusal.retry_after_ms == 1
    store.at(turn)
    assert [store.ask(caller) is not None for _ in range(4)] == [True, True, True, False]


def test_a_total_never_refills(store: Store) -> None:
    caller = store.new_caller(Quota("t", "team", "requests", "total", 2))
    assert [store.ask(caller) is not None for _ in range(3)] == [True, True, False]
    assert store.refusal.retry_after_ms is None
    store.pass_ms(400 * DAY)
    assert store.ask(caller) is None


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -25 * HOUR, 40 * DAY])
def test_a_clock_jump_resets_no_window_twice_and_none_never(store: Store, jump: int) -> None:
    """The clock jumps near midnight and comes back: one allowance before the true turn at most once more, then one."""
    caller = store.new_caller(Quota("d", "team", "requests", "day", 5))
    store.at(SHANGHAI_MONTH_TURN - HOUR // 2)
    passed = sum(store.ask(caller) is not None for _ in range(10))
    store.at(store.now + jump)
    passed += sum(store.ask(caller) is not None for _ in range(10))
    store.at(SHANGHAI_MONTH_TURN - HOUR // 4)
    passed += sum(store.ask(caller) is not None for _ in range(10))
    store.at(SHANGHAI_MONTH_TURN + 1)
    passed += sum(store.ask(caller) is not None for _ in range(10))
    days = 2 if abs(jump) < 2 * DAY else 3  # a jump of weeks is another day while it lasts
    assert passed <= 5 * days
    store.at(SHANGHAI_MONTH_TURN + 2 * DAY)
    assert sum(store.ask(caller) is not None for _ in range(10)) == 5


def test_a_full_minute_drains_on_when_the_clock_goes_back_an_hour(store: Store) -> None:
    caller = store.new_caller(per_minute(6))
    assert sum(store.ask(caller) is not None for _ in range(10)) == 6
    store.pass_ms(-HOUR)
    assert store.ask(caller) is None
    assert store.refusal.retry_after_ms == 10_000
    store.pass_ms(10_000)
    assert store.ask(caller) is not None
    assert store.ask(caller) is None


def test_a_correction_after_the_turn_does_not_touch_the_new_window(store: Store) -> None:
    caller = store.new_caller(Quota("d", "team", "tokens", "day", 10))
    store.at(SHANGHAI_MONTH_TURN - 1)
    old = store.ask(caller, 10)
    store.at(SHANGHAI_MONTH_TURN)
    assert store.ask(caller, 10) is not None
    assert old is not None
    old.release(0)
    store.settle()
    assert store.ask(caller, 1) is None


class Name(str):
    """A user's name that tells whether it is still known."""


def test_users_that_a_client_makes_up_do_not_fill_the_memory(
    memory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MAX_PLANS", 50)
    memory_store.at(NOON)
    caller = memory_store.new_caller(Quota("u", "end_user", "requests", "day", 1_000))
    names = weakref.WeakSet[Name]()
    for number in range(500):
        name = Name(f"user {number}")
        names.add(name)
        memory_store.ask(caller, end_user=name)
    assert len(names) <= 50
