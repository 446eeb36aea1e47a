"""Traps that speculative engines fell into, each as a promise."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

from backend.adaptive import LengthPolicy
from backend.costs import StepCosts
from backend.drafts import Draft, NgramDraft
from backend.engine import Engine
from backend.errors import BadRequest, QueueFull
from backend.model import PackedModel
from backend.sampling import SamplingParams
from backend.sequence import Request, Update
from backend.sequence import Sequence as Running
from tests.backend.families import (
    CAPACITY,
    RandomDraft,
    ScriptedDraft,
    build_engine,
    digits,
    generated,
    model_draft,
    near_copy,
    prompts,
    random_model,
    run,
)

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama")


def plain_answers(model: Any, requests: list[Request]) -> dict[str, Running]:
    return run(build_engine(model), [dataclasses.replace(r, draft=None) for r in requests])


def perfect(model: Any, requests: list[Request], right: int = 99) -> ScriptedDraft:
    """A draft that knows what plain decoding says when nothing stops it."""
    unstopped = [dataclasses.replace(r, stop=(), stop_tokens=frozenset(), max_tokens=40) for r in requests]
    return ScriptedDraft({k: generated(s) for k, s in plain_answers(model, unstopped).items()}, right)


def collect(engine: Engine, requests: list[Request]) -> dict[str, list[Update]]:
    updates: dict[str, list[Update]] = {r.id: [] for r in requests}
    for request in requests:
        engine.add(request)
    while not engine.idle:
        for update in engine.step():
            updates[update.sequence.request.id].append(update)
    return updates


def test_full_acceptance_leaves_no_hole_in_the_draft_cache(model: Any) -> None:
    """A draft equal to the target is always right, so one miss would be a hole in what it has read."""
    requests = [Request(str(i), p, 30, GREEDY, draft="self") for i, p in enumerate(prompts(4))]
    for sequence in run(build_engine(model, {"self": model_draft(model)}, fixed=4), requests).values():
        assert sequence.stats.accepted_tokens == sequence.stats.draft_tokens > 0


def test_draft_state_does_not_survive_into_the_slots_next_request(model: Any) -> None:
    engine = build_engine(model, {"self": model_draft(model, slots=1)}, slots=1, fixed=4)
    for i, prompt in enumerate(prompts(4, seed=8)):
        (sequence,) = run(engine, [Request(str(i), prompt, 20, GREEDY, draft="self")]).values()
        assert sequence.stats.accepted_tokens == sequence.stats.draft_tokens > 0


def test_a_stop_token_inside_an_accepted_block_ends_the_answer_there(model: Any) -> None:
    prompt = prompts(1)[0]
    request = Request("a", prompt, 40, GREEDY, draft="perfect")
    answer = generated(plain_answers(model, [request])["a"])
    stop = next(t for i, t in enumerate(answer) if i >= 6 and t not in answer[:i])
    end = answer.index(stop) + 1
    stopped = dataclasses.replace(request, stop_tokens=frozenset({stop}))
    engine = build_engine(model, {"perfect": perfect(model, [request])}, fixed=8)
    found = run(engine, [stopped])["a"]
    assert (generated(found), found.finish_reason) == (answer[:end], "stop")
    assert found.text.text == digits(answer[: end - 1])


@pytest.mark.parametrize("extra", [0, 1, -1])
def test_stop_and_max_tokens_in_one_block_stop_wins_inside_the_budget(model: Any, extra: int) -> None:
    request = Request("a", prompts(1)[0], 40, GREEDY, draft="perfect")
    answer = generated(plain_answers(model, [request])["a"])
    stop = next(t for i, t in enumerate(answer) if i >= 6 and t not in answer[:i])
    budget = answer.index(stop) + 1 + extra
    limited = dataclasses.replace(request, stop_tokens=frozenset({stop}), max_tokens=budget)
    found = run(build_engine(model, {"perfect": perfect(model, [request])}, fixed=8), [limited])["a"]
    assert found.finish_reason == ("length" if extra < 0 else "stop")
    assert found.generated_tokens == min(budget, answer.index(stop) + 1)


def test_a_stop_string_trims_text_tokens_logprobs_and_usage_alike(model: Any) -> None:
    request = Request("a", prompts(1)[0], 40, GREEDY, draft="perfect", logprobs=2)
    answer = generated(plain_answers(model, [request])["a"])
    text = digits(answer)
    stop = text[len(digits(answer[:9])) - 2 : len(digits(answer[:10])) - 1]  # spans two tokens
    stopped = dataclasses.replace(request, stop=(stop,))
    plain = collect(build_engine(model), [dataclasses.replace(stopped, draft=None)])["a"]
    fast = collect(build_engine(model, {"perfect": perfect(model, [request])}, fixed=8), [stopped])["a"]
    for updates in (plain, fast):
        assert "".join(u.text for u in updates) == text[: text.index(stop)]
        assert updates[-1].finish_reason == "stop"
    assert plain[-1].generated_tokens == fast[-1].generated_tokens
    tokens = [[e.token for u in updates for e in u.logprobs] for updates in (plain, fast)]
    assert tokens[0] == tokens[1] == answer[: len(tokens[0])]
    assert digits(tokens[0]).startswith(text[: text.index(stop)])
    assert len(tokens[0]) < plain[-1].generated_tokens


def test_a_half_matched_stop_string_is_held_back_and_released(model: Any) -> None:
    request = Request("a", prompts(1)[0], 12, GREEDY)
    answer = digits(generated(plain_answers(model, [request])["a"]))
    never = answer[-4:] + "never"
    updates = collect(build_engine(model), [dataclasses.replace(request, stop=(never,))])["a"]
    assert "".join(u.text for u in updates) == answer


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_max_tokens_is_never_overshot_and_never_overdrafted(model: Any, budget: int) -> None:
    request = Request("a", prompts(1)[0], budget, GREEDY, draft="perfect")
    found = run(build_engine(model, {"perfect": perfect(model, [request])}, fixed=8), [request])["a"]
    assert found.generated_tokens == budget
    assert found.stats.draft_tokens <= budget - 1


def test_penalties_count_every_row_of_a_block(model: Any) -> None:
    """With penalties, a token inside a block depends on the block's earlier tokens."""
    params = SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3)
    requests = [Request(str(i), p, 30, params, draft="perfect") for i, p in enumerate(prompts(3))]
    plain = {k: generated(s) for k, s in plain_answers(model, requests).items()}
    fast = run(build_engine(model, {"perfect": ScriptedDraft(plain)}, fixed=6), requests)
    assert {k: generated(s) for k, s in fast.items()} == plain
    assert all(s.stats.accepted_tokens == s.stats.draft_tokens > 0 for s in fast.values())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_of_accepted_tokens_are_those_of_plain_decoding(model: Any, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=4)
    requests = [Request(str(i), p, 20, params, draft="near", logprobs=3) for i, p in enumerate(prompts(3))]
    plain = collect(build_engine(model), [dataclasses.replace(r, draft=None) for r in requests])
    fast = collect(build_engine(model, {"near": model_draft(near_copy(model, "llama"))}, fixed=5), requests)
    for name, updates in plain.items():
        left = [e for u in updates for e in u.logprobs]
        right = [e for u in fast[name] for e in u.logprobs]
        assert [e.token for e in left] == [e.token for e in right]
        for a, b in zip(left, right, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert a.logprob < 0.0
            assert [t for t, _ in a.top] == [t for t, _ in b.top]
            assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)


def test_a_seed_belongs_to_the_request_not_to_its_slot(model: Any) -> None:
    params = SamplingParams(temperature=1.2, seed=77)
    prompt = prompts(1)[0]
    alone = generated(run(build_engine(model, slots=1), [Request("x", prompt, 20, params)])["x"])
    others = [Request(str(i), p, 25, SamplingParams(seed=i)) for i, p in enumerate(prompts(5, seed=2))]
    crowd = run(build_engine(model, slots=4), [*others, Request("x", prompt, 20, params)], [0, 0, 1, 2, 3, 4])
    assert generated(crowd["x"]) == alone


@pytest.mark.parametrize("sizes", [(131, 140), (140, 131)])
def test_padded_vocabularies_of_target_and_draft_may_differ(sizes: tuple[int, int]) -> None:
    target = random_model("qwen2", vocabulary=sizes[0])
    draft = model_draft(random_model("qwen2", seed=4, vocabulary=sizes[1]), width=min(sizes))
    params = SamplingParams(temperature=1.0, logit_bias=((sizes[0] - 1, 2.0),), frequency_penalty=0.5, seed=3)
    requests = [Request(str(i), p, 20, params, draft="d") for i, p in enumerate(prompts(3, vocabulary=131))]
    plain = {k: generated(s) for k, s in plain_answers(target, requests).items()}
    assert {k: generated(s) for k, s in run(build_engine(target, {"d": draft}), requests).items()} == plain


def test_rejected_tokens_never_enter_the_prefix_cache(model: Any) -> None:
    engine = build_engine(model, {"wrong": RandomDraft()}, slots=2, fixed=6)
    requests = [Request(str(i), p, 20, GREEDY, draft="wrong") for i, p in enumerate(prompts(2))]
    for sequence in run(engine, requests).values():
        assert any(known == sequence.tokens[: len(known)] for known in engine.target.cache.tokens if known)
        again = Request("again", sequence.tokens, 10, GREEDY)
        warm = run(engine, [again])["again"]
        assert warm.cached_tokens >= sequence.prompt_tokens
        assert generated(warm) == generated(run(build_engine(model), [again])["again"])


def test_a_shared_system_prompt_is_read_once(model: Any) -> None:
    system = prompts(1, seed=40)[0] * 4
    system = (system * 40)[:80]
    requests = [Request(str(i), system + p[:9], 6, GREEDY) for i, p in enumerate(prompts(6, seed=41))]
    engine = build_engine(model, chunk=32)
    warm = run(engine, requests)
    assert sum(s.cached_tokens >= 64 for s in warm.values()) == 5
    assert engine.totals.prompt_tokens <= 80 + 6 * 32
    cold = {r.id: generated(run(build_engine(model), [r])[r.id]) for r in requests}
    assert {k: generated(s) for k, s in warm.items()} == cold


def test_no_slot_leaks_on_cancel_error_or_plain_requests(model: Any) -> None:
    class Failing(RandomDraft):
        def propose(self, jobs: Any) -> list[list[int]]:
            raise RuntimeError("broken draft")

    engine = build_engine(model, {"random": RandomDraft(), "failing": Failing()}, slots=3)
    waiting = [engine.add(Request(f"c{i}", p, 30, GREEDY, draft="random")) for i, p in enumerate(prompts(6))]
    engine.step()
    for sequence in waiting:
        update = engine.cancel(sequence)
        assert update is not None
        assert update.finish_reason == "cancelled"
        assert engine.cancel(sequence) is None
    assert engine.idle
    engine.add(Request("f", prompts(1)[0], 9, GREEDY, draft="failing"))
    engine.step()
    with pytest.raises(RuntimeError, match="broken draft"):
        engine.step()
    assert [u.error for u in engine.fail_all("sorry")] == ["sorry"]
    run(engine, [Request("p", prompts(1)[0], 5, GREEDY)])
    assert engine.scheduler.free_slots == 3


def test_500_requests_with_random_cancels_leave_every_slot_free_and_nothing_behind(model: Any) -> None:
    engine = build_engine(model, {"near": model_draft(near_copy(model, "llama")), "random": RandomDraft()})
    generator = torch.Generator().manual_seed(1)
    texts, live, all_of_them = prompts(40), [], weakref.WeakSet[Running]()
    for i in range(500):
        params = dataclasses.replace(GREEDY, seed=i)
        budget = int(torch.randint(1, 6, (), generator=generator))
        name = ("near", "random", None)[i % 3]
        live.append(engine.add(Request(str(i), texts[i % 40][:12], budget, params, draft=name)))
        all_of_them.add(live[-1])
        if i % 3 == 0:
            engine.step()
        if i % 2:
            victim = int(torch.randint(0, len(live), (), generator=generator))
            engine.cancel(live.pop(victim))
        while engine.scheduler.waiting > 100:
            engine.step()
    while not engine.idle:
        engine.step()
    assert engine.scheduler.free_slots == 8
    assert not engine.scheduler.running
    live.clear()
    gc.collect()
    assert len(all_of_them) <= 8  # a draft remembers whose text it read last in each slot


def test_a_bad_pair_decodes_plainly_and_is_counted(model: Any) -> None:
    """Costs decide what is drafted; that less than half is accepted is reported whatever they say."""
    request = Request("a", prompts(1)[0], 100, GREEDY, draft="bad")
    engine = adaptive_engine(model, {"bad": perfect(model, [request], right=0)}, token_s=0.002)
    found = run(engine, [request])["a"]
    assert found.stats.draft_tokens < 40
    eager = adaptive_engine(model, {"bad": perfect(model, [request], right=0)})
    eager.policy.fixed = 2
    run(eager, [request])
    assert eager.totals.low_acceptance == {"bad": 1}


def test_a_cheap_draft_is_used_also_under_half_acceptance(model: Any) -> None:
    """One right token of two costs next to nothing here and gains half a pass."""
    request = Request("a", prompts(1)[0], 100, GREEDY, draft="half")
    answer = generated(plain_answers(model, [request])["a"])
    mixed = [token if i % 5 in (0, 1) else (token + 1) % 131 for i, token in enumerate(answer)]
    engine = adaptive_engine(model, {"half": ScriptedDraft({"a": mixed})})
    found = run(engine, [request])["a"]
    assert generated(found) == answer
    assert engine.totals.low_acceptance == {"half": 1}
    assert found.stats.target_passes < 85


def test_a_draft_that_costs_more_than_it_gains_is_not_asked(model: Any) -> None:
    class Slow(RandomDraft):
        def step_seconds(self, rows: int) -> float:
            return 0.1

    engine = adaptive_engine(model, {"slow": Slow()})
    sequences = run(engine, [Request(str(i), p, 40, GREEDY, draft="slow") for i, p in enumerate(prompts(4))])
    assert sum(s.stats.draft_tokens for s in sequences.values()) == 0


def test_a_request_that_asks_for_speculation_drafts_at_least_once(model: Any) -> None:
    class Slow(RandomDraft):
        def step_seconds(self, rows: int) -> float:
            return 0.1

    engine = adaptive_engine(model, {"slow": ScriptedDraft({"a": [1] * 40})})
    found = run(engine, [Request("a", prompts(1)[0], 10, GREEDY, draft="slow", forced=True)])["a"]
    assert found.stats.draft_tokens >= 1


def test_tenants_take_turns_in_a_bounded_queue(model: Any) -> None:
    engine = build_engine(model, slots=1)
    engine.scheduler.queue_limit = 6
    first = [engine.add(Request(f"a{i}", [1, 2, 3], 1, GREEDY, tenant="a")) for i in range(5)]
    late = engine.add(Request("b", [4, 5], 1, GREEDY, tenant="b"))
    with pytest.raises(QueueFull) as refused:
        engine.add(Request("c", [4, 5], 1, GREEDY, tenant="c"))
    assert refused.value.retry_after_s > 0
    engine.step()
    engine.step()
    assert late.finish_reason == "length"
    assert sum(s.finish_reason is not None for s in first) == 1


def test_100_requests_on_8_slots_all_finish_in_full_batches(model: Any) -> None:
    engine = build_engine(model)
    requests = [Request(str(i), p[:8], 10, GREEDY) for i, p in enumerate(prompts(100))]
    sequences = run(engine, requests)
    assert all(s.generated_tokens == 10 for s in sequences.values())
    one_batch = build_engine(model)
    run(one_batch, requests[:8])
    assert engine.totals.rounds <= 1.3 * (100 / 8) * one_batch.totals.rounds


def test_a_prompt_longer_than_the_window_is_refused_and_the_engine_goes_on(model: Any) -> None:
    engine = build_engine(model)
    with pytest.raises(BadRequest) as refused:
        engine.add(Request("long", [1] * CAPACITY, 1, GREEDY))
    assert refused.value.code == "context_length_exceeded"
    full = run(engine, [Request("full", [1] * (CAPACITY - 3), 50, GREEDY, draft=None)])["full"]
    assert (full.generated_tokens, full.finish_reason) == (3, "length")


def test_several_drafts_serve_different_rows_of_one_round(model: Any) -> None:
    drafts: dict[str, Draft] = {"near": model_draft(near_copy(model, "llama")), "ngram": NgramDraft(3, 1)}
    names = ("near", "ngram", None)
    requests = [Request(str(i), p, 20, GREEDY, draft=names[i % 3]) for i, p in enumerate(prompts(6))]
    plain = {k: generated(s) for k, s in plain_answers(model, requests).items()}
    engine = build_engine(model, drafts)
    assert {k: generated(s) for k, s in run(engine, requests).items()} == plain
    assert engine.totals.draft_tokens.keys() == {"near", "ngram"}


class ToldCosts(LengthPolicy):
    """Believes what it was told: a tiny model's rounds would teach it other costs."""

    def learn_round(self, *_: Any) -> None:
        pass

    def _plain_is_due(self, rows: int) -> bool:
        return False


def adaptive_engine(model: Any, drafts: dict[str, Draft], token_s: float = 0.00006) -> Engine:
    """Costs as of a machine where one target step takes 20 ms, and verifying a token more next to nothing."""
    policy = ToldCosts(StepCosts((1, 65), (0.020, 0.020 + 64 * token_s)))
    return Engine(PackedModel(model, slots=8, capacity=CAPACITY), digits, drafts, policy=policy)
