"""Memory and Valkey take the same decisions: any course of events, both at once, compared answer by answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.quotas import Quota, Ticket
from tests.policies.stores import NOON, Store

LIMITS = st.lists(
    st.one_of(
        st.builds(
            Quota,
            st.just("q"),
            st.sampled_from(["team", "key", "end_user"]),
            st.sampled_from(["requests", "tokens"]),
            st.sampled_from(["minute", "hour", "day", "month", "total"]),
            st.integers(0, 60),
            st.sampled_from([None, "m1", "m2"]),
            st.booleans(),
        ),
        st.builds(
            Quota, st.just("c"), st.sampled_from(["team", "key"]), st.just("concurrency"), st.none(), st.integers(0, 4)
        ),
    ),
    min_size=1,
    max_size=5,
)


@dataclass(frozen=True)
class Step:
    """Time passes, somebody asks, and an older ticket may be settled."""

    pause_ms: int
    tokens: int
    model: str
    end_user: str | None
    then: Literal["nothing", "correct", "release", "settle", "cancel"]
    which: int
    actual: int


STEPS = st.lists(
    st.builds(
        Step,
        st.one_of(st.integers(0, 5_000), st.sampled_from([0, 0, 3_600_000, 14_400_000, 86_400_000])),
        st.integers(0, 15),
        st.sampled_from(["m1", "m2"]),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from(["nothing", "correct", "release", "settle", "cancel"]),
        st.integers(0, 10),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=25,
)


def told(store: Store, ticket: Ticket | None) -> object:
    """All that a caller learns."""
    if ticket is not None:
        return ticket.headers()
    refusal = store.refusal
    return (refusal.status, refusal.message, refusal.retry_after_ms, refusal.should_retry, refusal.headers)


def finish(step: Step, tickets: list[Ticket]) -> None:
    if step.then == "nothing" or not tickets:
        return
    ticket = tickets[step.which % len(tickets)]
    if step.then == "correct":
        ticket.correct(step.actual)
    elif step.then == "cancel":
        ticket.cancel()
    else:
        ticket.release(step.actual if step.then == "settle" else None)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(quotas=LIMITS, steps=STEPS)
def test_both_stores_tell_the_same(
    memory_store: Store, valkey_store: Store, quotas: list[Quota], steps: list[Step]
) -> None:
    stores = (memory_store, valkey_store)
    callers = [store.new_caller(*quotas) for store in stores]
    tickets: tuple[list[Ticket], list[Ticket]] = ([], [])
    for store in stores:
        store.at(NOON)
        store.limiter.take_thresholds()
    for step in steps:
        answers = []
        for store, caller, mine in zip(stores, callers, tickets, strict=True):
            store.pass_ms(step.pause_ms)
            ticket = store.ask(caller, step.tokens, model=step.model, end_user=step.end_user)
            if ticket is not None:
                mine.append(ticket)
            answers.append(told(store, ticket))
            finish(step, mine)
            store.settle()
        assert answers[0] == answers[1]
    assert [(e.percent, e.used) for e in memory_store.limiter.take_thresholds()] == [
        (e.percent, e.used) for e in valkey_store.limiter.take_thresholds()
    ]
