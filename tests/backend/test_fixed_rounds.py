"""Rounds of fixed shape, the ones that CUDA graphs capture, give what packed rounds give. Here they run uncaptured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend.drafts import Draft, NgramDraft
from backend.graphs import calibrate_fixed
from backend.sampling import Noise, Row, SamplingParams, draw, draw_in_place
from backend.sequence import Request
from tests.backend.families import (
    ScriptedDraft,
    build_engine,
    generated,
    head_draft,
    model_draft,
    near_copy,
    prompts,
    random_model,
    run,
)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_fixed_rounds_equal_packed_rounds(family: str, length: int) -> None:
    model = random_model(family)
    names = ("near", "self", "ngram", "head", None)
    requests = [
        Request(
            str(i),
            prompt,
            25,
            SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, frequency_penalty=0.5 if i == 5 else 0.0),
            draft=names[i // 2 % 5],
            logprobs=2 if i == 0 else None,
        )
        for i, prompt in enumerate(prompts(8, seed=length))
    ]
    plain = {k: generated(s) for k, s in run(build_engine(model), requests_without_drafts(requests)).items()}
    for draft in names:
        drafts: dict[str, Draft] = {
            "near": model_draft(near_copy(model, family)),
            "self": model_draft(model),
            "ngram": NgramDraft(3, 1),
            "head": head_draft(model),
        }
        engine = build_engine(model, drafts, fixed=length, slots=5, fixed_rounds=True)
        chosen = [dataclasses.replace(r, draft=draft) for r in requests]
        found = run(engine, chosen, arrivals=[0, 0, 3, 5, 5, 9, 12, 12])
        assert {k: generated(s) for k, s in found.items()} == plain, draft
        assert engine.fixed is not None
        assert engine.fixed.rounds > 3
        if draft == "self":
            drafted = sum(s.stats.draft_tokens for s in found.values())
            assert sum(s.stats.accepted_tokens for s in found.values()) == drafted > 0


def test_mixed_drafts_and_unready_drafts_run_in_packed_rounds() -> None:
    model = random_model("llama")
    requests = [
        Request(str(i), prompt, 15, SamplingParams(temperature=0.0), draft=("near", "known", None)[i % 3])
        for i, prompt in enumerate(prompts(6))
    ]
    plain = {k: generated(s) for k, s in run(build_engine(model), requests_without_drafts(requests)).items()}
    drafts: dict[str, Draft] = {"near": model_draft(near_copy(model, "llama")), "known": ScriptedDraft(plain)}
    engine = build_engine(model, drafts, fixed_rounds=True)
    assert {k: generated(s) for k, s in run(engine, requests).items()} == plain


def test_measuring_fixed_rounds_between_requests_changes_no_answer_and_prices_every_step() -> None:
    model = random_model("llama")
    drafts: dict[str, Draft] = {"near": model_draft(near_copy(model, "llama")), "head": head_draft(model)}
    engine = build_engine(model, drafts, fixed=3, slots=4, fixed_rounds=True)
    requests = [
        Request(str(i), prompt, 20, SamplingParams(temperature=0.0), draft=("near", "head")[i % 2])
        for i, prompt in enumerate(prompts(4))
    ]
    plain = {k: generated(s) for k, s in run(build_engine(model), requests_without_drafts(requests)).items()}
    sequences = [engine.add(request) for request in requests]
    for _ in range(4):
        engine.step()
    assert engine.fixed is not None
    calibrate_fixed(engine.fixed, engine.policy, drafts.values())
    while not engine.idle:
        engine.step()
    assert {s.request.id: generated(s) for s in sequences} == plain
    assert 0.0 < engine.policy.target(1) <= engine.policy.target(36)
    assert all(draft.step_seconds(rows) > 0.0 for draft in drafts.values() for rows in (1, 3, 4))


def test_a_length_beyond_the_captured_ones_runs_in_packed_rounds() -> None:
    model = random_model("llama")
    requests = [Request("a", prompts(1)[0], 30, SamplingParams(temperature=0.0), draft="self")]
    engine = build_engine(model, {"self": model_draft(model)}, fixed=11, fixed_rounds=True)
    engine.policy.longest = 11
    found = run(engine, requests)["a"]
    assert generated(found) == generated(run(build_engine(model), requests_without_drafts(requests))["a"])
    assert found.stats.target_passes < 5


def test_drawing_in_tensors_equals_drawing_by_rows() -> None:
    torch.manual_seed(0)
    logits, noise = torch.randn(12, 50), Noise(50, torch.device("cpu"))
    rows = [Row(SamplingParams(temperature=(0.0, 0.7, 1.0)[i % 3], seed=i - 5), 3 * i) for i in range(12)]
    found = draw_in_place(
        logits.clone(),
        torch.tensor([row.params.seed for row in rows]),
        torch.tensor([row.position for row in rows]),
        torch.tensor([row.params.temperature for row in rows]),
        noise,
    )
    assert found.tolist() == draw(logits, rows, noise).tolist()


def requests_without_drafts(requests: list[Request]) -> list[Request]:
    return [dataclasses.replace(request, draft=None) for request in requests]
