"""Draft lengths follow what rounds cost and what is accepted, and drafting does not lose."""

from __future__ import annotations

import pytest
import torch

from backend.adaptive import LengthPolicy
from backend.costs import LearnedCosts, StepCosts
from backend.drafts import Draft
from backend.sampling import SamplingParams
from backend.sequence import Request
from backend.sequence import Sequence as Running
from tests.backend.families import RandomDraft, digits

SIZES = (1, 2, 4, 8, 16, 24, 40, 72)


class PricedDraft(RandomDraft):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def step_seconds(self, rows: int) -> float:
        return self._seconds


def real_seconds(tokens: int) -> float:
    """A machine whose cores are busy with a few tokens already, as measured on two of them."""
    return 0.019 + 0.0009 * tokens


def simulate(
    batch: int, acceptance: float, told: StepCosts, *, draft_s: float = 0.001, rounds: int = 400, busy: bool = False
) -> float:
    """Speed of adaptive decoding over plain decoding with the policy's own choices, by the clock of `real_seconds`.

    busy: what the policy sees is two to four times as long for a while, and off by a third either way at random.
    """
    generator = torch.Generator().manual_seed(round(acceptance * 100) + batch)
    policy = LengthPolicy(told)
    drafts: dict[str, Draft] = {"d": PricedDraft(draft_s)}
    clock, tokens = 0.0, 0
    rows: list[Running] = []
    for round_number in range(rounds):
        if round_number % 100 == 0:  # the next requests
            rows = [
                Running(Request(str(i), [1, 2], 10_000, SamplingParams(0.0), draft="d"), digits) for i in range(batch)
            ]
        lengths = policy.lengths(rows, drafts, 1 << 20)
        for row, length in zip(rows, lengths, strict=True):
            hits = (torch.rand(length, generator=generator) < acceptance).long().cumprod(0).sum()
            row.tracker.record(length, int(hits))
            policy.learn("d", min(length, int(hits) + 1), int(hits))
            tokens += 1 + int(hits)
        drafting, passing = draft_s * max(lengths), real_seconds(batch + sum(lengths))
        clock += drafting + passing
        slow = 1.0
        if busy:
            slow = (2.0, 1.0, 4.0, 1.0)[round_number // 70 % 4] * (
                0.67 + 0.67 * float(torch.rand((), generator=generator))
            )
        policy.learn_round(rows, lengths, sum(lengths), drafts, slow * drafting, slow * passing)
    return tokens / clock / (batch / real_seconds(batch))


@pytest.mark.parametrize("error", [0.0, 0.3, -0.2])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.7, 0.9, 0.98])
def test_adaptive_is_never_slower_than_plain_whatever_start_costs_were_measured(
    acceptance: float, batch: int, error: float
) -> None:
    """error: how far off the measurement of every second size was, as on a busy machine."""
    told = StepCosts.measured({n: real_seconds(n) * (1 + error * (i % 2)) for i, n in enumerate(SIZES)})
    assert simulate(batch, acceptance, told) >= 0.97


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.9])
def test_a_machine_that_is_busy_at_times_does_not_mislead_it(acceptance: float, batch: int) -> None:
    told = StepCosts.measured({n: real_seconds(n) for n in SIZES})
    assert simulate(batch, acceptance, told, busy=True, rounds=800) >= 0.97


def test_a_good_cheap_pair_is_much_faster_at_batch_1_and_a_hopeless_one_costs_under_2_percent() -> None:
    told = StepCosts(SIZES, tuple(real_seconds(n) for n in SIZES))
    assert simulate(1, 0.8, told) > 2.2
    assert simulate(1, 0.05, told) > 0.98
    assert simulate(8, 0.05, told) > 0.98


def test_costs_learn_a_wrong_measurement_in_use() -> None:
    costs = LearnedCosts(StepCosts((1, 8, 16), (0.010, 0.020, 0.030)))
    for _ in range(200):
        costs.learn(8, 0.030)
        costs.learn(16, 0.033)
    assert costs(8) == pytest.approx(0.030, rel=0.05)
    assert costs(16) == pytest.approx(0.033, rel=0.05)


def test_one_interrupted_round_changes_the_ratio_of_costs_by_a_percent() -> None:
    costs = LearnedCosts(StepCosts((1, 8, 16), (0.010, 0.020, 0.030)))
    for _ in range(60):
        costs.learn(8, 0.020)
    costs.learn(8, 5.0)
    assert costs(8) / costs(16) == pytest.approx(2 / 3, rel=0.015)
