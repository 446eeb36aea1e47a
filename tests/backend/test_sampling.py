"""Draws follow the processed distribution exactly, and processors do what their names say."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from backend.sampling import Noise, Row, SamplingParams, draw, first_largest, logprobs_of, process
from backend.speculate import Rates, accept, accepted_counts, best_lengths, closed_form_speedup, expected_tokens

CPU = torch.device("cpu")
DRAWS = 20_000
WIDTH = 40


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """p-value of Pearson's test over the cells that can occur; Wilson-Hilferty approximation."""
    cells = expected > 0
    assert int(counts[~cells].sum()) == 0
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    degrees = int(cells.sum()) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def reference(logits: Tensor, params: SamplingParams, counts: dict[int, int]) -> Tensor:
    """Exact probabilities, written another way than the code under test: sort, cut, renormalise in float64."""
    scores = logits.double().clone()
    for token, count in counts.items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias:
        scores[token] += bias
    p = (scores / params.temperature).softmax(0)
    order = p.argsort(descending=True)
    kept = order[: params.top_k] if params.top_k else order
    mass, nucleus = 0.0, []
    total = float(p[kept].sum())
    for token in kept.tolist():
        nucleus.append(token)
        mass += float(p[token]) / total
        if mass >= params.top_p:
            break
    q = torch.zeros_like(p)
    q[nucleus] = p[nucleus]
    q[q < params.min_p * q.max()] = 0.0
    return q / q.sum()


CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=1.0, top_k=12, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.8, frequency_penalty=0.4, logit_bias=((3, 1.5),)),
]


@pytest.mark.parametrize("params", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_20000_draws_have_the_exact_distribution(params: SamplingParams, over: str) -> None:
    torch.manual_seed(11)
    logits = torch.randn(WIDTH) * 2
    counts = {1: 2, 5: 1, 9: 4}
    noise = Noise(WIDTH, CPU)
    row = Row(params, 0, counts)
    scores = process(logits[None], [row], noise)[0]
    spread = torch.arange(DRAWS) + 3
    fixed = torch.full((DRAWS,), 99)
    gumbel = noise.gumbel(fixed, spread) if over == "positions" else noise.gumbel(spread, fixed)
    found = torch.bincount((scores + gumbel).argmax(-1), minlength=WIDTH).double()
    assert chi_square_p(found, reference(logits, params, counts) * DRAWS) > 1e-3


def test_draws_of_neighbouring_positions_are_independent() -> None:
    torch.manual_seed(2)
    logits = torch.randn(8)
    draws = (logits + Noise(8, CPU).gumbel(torch.full((DRAWS,), 5), torch.arange(DRAWS))).argmax(-1)
    pairs = torch.bincount(draws[:-1] * 8 + draws[1:], minlength=64).double()
    p = logits.double().softmax(0)
    assert chi_square_p(pairs, torch.outer(p, p).flatten() * (DRAWS - 1)) > 1e-3


def test_a_cut_head_draws_with_the_noise_of_the_whole_vocabulary() -> None:
    torch.manual_seed(3)
    logits = torch.randn(5, WIDTH)
    hot = torch.tensor([4, 9, 17, 30])
    rows = [Row(SamplingParams(seed=i, logit_bias=((9, 0.5),)), i) for i in range(5)]
    cut = draw(logits[:, hot], rows, Noise(WIDTH, CPU, hot)).tolist()
    masked = torch.full_like(logits, float("-inf"))
    masked[:, hot] = logits[:, hot]
    assert cut == draw(masked, rows, Noise(WIDTH, CPU)).tolist()


def test_greedy_takes_the_first_of_equal_logits() -> None:
    rows = [Row(SamplingParams(temperature=0.0), 0)]
    assert draw(torch.tensor([[1.0, 3.0, 3.0]]), rows, Noise(3, CPU)).tolist() == [1]


def test_a_row_counts_its_own_drafted_tokens() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5)
    rows = [Row(params, 5, {2: 1}), Row(params, 6, {2: 1}, drafted=(2, 3))]
    scores = process(torch.zeros(2, 4), rows, Noise(4, CPU))
    assert scores.tolist() == [[0.0, 0.0, -1.5, 0.0], [0.0, 0.0, -2.5, -1.5]]


def test_repetition_penalty_covers_the_prompt_and_pushes_down_either_sign() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    row = Row(params, 3, {1: 1}, prompt=frozenset({0}))
    assert process(torch.tensor([[2.0, -2.0, 2.0]]), [row], Noise(3, CPU)).tolist() == [[1.0, -4.0, 2.0]]


def test_a_mask_is_obeyed_by_greedy_and_sampled_rows() -> None:
    allowed = torch.tensor([False, True, False])
    rows = [Row(SamplingParams(temperature=t, seed=i), i, allowed=allowed) for i, t in enumerate((0.0, 1.0, 2.0))]
    assert draw(torch.tensor([[5.0, 0.0, 5.0]] * 3), rows, Noise(3, CPU)).tolist() == [1, 1, 1]


def test_logprobs_are_those_of_the_model_before_any_processor() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    (entry,) = logprobs_of(logits, [1], [2])
    assert entry.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 1]))
    assert [token for token, _ in entry.top] == [2, 1]


def test_accept_keeps_what_agrees_and_the_first_correction() -> None:
    assert accept([], [7]) == [7]
    assert accept([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert accept([1, 2, 3], [1, 9, 3, 4]) == [1, 9]
    assert accept([1], [0, 5]) == [0]


def test_accepted_counts_on_the_device_equal_accept() -> None:
    generator = torch.Generator().manual_seed(0)
    drafted = torch.randint(0, 2, (200, 5), generator=generator)
    drawn = torch.randint(0, 2, (200, 6), generator=generator)
    lengths = torch.randint(0, 6, (200,), generator=generator)
    counts = accepted_counts(drafted, drawn, lengths).tolist()
    for i, length in enumerate(lengths.tolist()):
        kept = accept(drafted[i, :length].tolist(), drawn[i, : length + 1].tolist())
        assert counts[i] == len(kept) - 1


def test_closed_form_follows_the_geometric_series() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx(sum(0.8**i for i in range(5)))
    assert expected_tokens(1.0, 4) == 5.0
    assert closed_form_speedup(0.8, 4, 0.05) == pytest.approx(3.3616 / 1.2)
    assert closed_form_speedup(0.8, 0, 0.05) == 1.0


def test_lengths_follow_cost_and_acceptance_down_to_zero() -> None:
    def flat(tokens: int) -> float:
        return 0.020

    def steep(tokens: int) -> float:
        return 0.020 * tokens

    def cheap(rows: int) -> float:
        return 0.001

    def dear(rows: int) -> float:
        return 0.018

    def rates(*values: float) -> list[Rates]:
        return [Rates(value, value) for value in values]

    assert best_lengths(rates(0.9), [8], 0, cheap, flat).lengths == [8]
    assert best_lengths(rates(0.3), [8], 0, dear, flat).lengths == [0]
    assert best_lengths(rates(0.95), [8], 0, cheap, steep).lengths == [0]
    good, bad = best_lengths(rates(0.95, 0.05), [8, 8], 0, cheap, lambda tokens: 0.02 + 0.002 * tokens).lengths
    assert good > 3
    assert bad <= 1
    assert best_lengths([Rates(0.2, 0.99)], [8], 0, cheap, lambda tokens: 0.02 + 0.003 * tokens).lengths == [8]


def test_lengths_are_the_best_of_all_that_can_be_chosen() -> None:
    generator = torch.Generator().manual_seed(4)

    def target(tokens: int) -> float:
        return 0.02 + 0.0015 * tokens

    def draft(rows: int) -> float:
        return 0.001 + 0.0003 * rows

    for _ in range(30):
        first, second, third = torch.rand(3, generator=generator).tolist()
        rates = [Rates(first, second), Rates(second, third), Rates(third, first)]

        def speed(lengths: tuple[int, ...], rates: list[Rates] = rates) -> float:
            pairs = list(zip(rates, lengths, strict=True))
            tokens = 4 + sum(rate.first * rate.later**depth for rate, k in pairs for depth in range(k))
            drafting = sum(draft(n) for depth in range(3) if (n := sum(k > depth for k in lengths)))
            return tokens / (target(4 + sum(lengths)) + drafting)

        choice = best_lengths(rates, [3, 3, 3], 1, draft, target)
        chosen = tuple(choice.lengths)
        best = max(speed(lengths) for lengths in itertools.product(range(4), repeat=3))
        assert speed(chosen) > 0.97 * best
        assert choice.gain == pytest.approx(speed(chosen) / speed((0, 0, 0)))


@pytest.mark.parametrize("width", [40, 96, 512, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_the_largest_scores_wins_however_it_is_searched(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = torch.randint(0, 60, (7, width), generator=generator).to(dtype)  # full of ties
    scores[3] = float("-inf")
    scores[3, width - 1] = -5.0
    wanted = [row.index(max(row)) for row in scores.tolist()]
    assert first_largest(scores).tolist() == wanted
    assert first_largest(scores[:, : width - 8]).tolist() == scores[:, : width - 8].argmax(-1).tolist()
