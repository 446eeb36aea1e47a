"""Speculation changes the speed and nothing else."""

from __future__ import annotations

import pytest

from backend.drafts import Draft, NgramDraft, NgramThenModelDraft
from backend.sampling import SamplingParams
from backend.sequence import Request
from tests.backend.families import (
    FAMILIES,
    RandomDraft,
    ScriptedDraft,
    build_engine,
    generated,
    head_draft,
    model_draft,
    near_copy,
    prompts,
    random_model,
    run,
    transformers_greedy,
)

GREEDY = SamplingParams(temperature=0.0)


def sampled(i: int) -> SamplingParams:
    """A different mixture of processors for every request."""
    return SamplingParams(
        temperature=(0.7, 1.0, 1.5)[i % 3],
        top_k=(0, 20, 0)[i % 3],
        top_p=(1.0, 0.9)[i % 2],
        min_p=(0.0, 0.02)[i // 2 % 2],
        presence_penalty=(0.0, 0.5)[i // 3 % 2],
        frequency_penalty=(0.0, 0.3)[i % 2],
        repetition_penalty=(1.0, 1.2)[i // 2 % 2],
        logit_bias=((5, 3.0), (9, -100.0)) if i % 2 else (),
        seed=1000 + i,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_equals_plain_equals_transformers_greedy(family: str) -> None:
    model = random_model(family)
    near = near_copy(model, family)
    texts = prompts(8)
    expected = {str(i): transformers_greedy(model, prompt, 24) for i, prompt in enumerate(texts)}
    drafts: dict[str, Draft] = {
        "near": model_draft(near),
        "far": model_draft(random_model(family, seed=9)),
        "ngram": NgramDraft(longest=3, shortest=1),
        "both": NgramThenModelDraft(model_draft(near)),
        "head": head_draft(model),
        "random": RandomDraft(),
        "adversarial": ScriptedDraft(expected, right=2),
        "perfect": ScriptedDraft(expected),
    }
    for name in (None, *drafts):
        engine = build_engine(model, drafts, fixed=4)
        requests = [Request(str(i), prompt, 24, GREEDY, draft=name) for i, prompt in enumerate(texts)]
        found = {key: generated(sequence) for key, sequence in run(engine, requests).items()}
        assert found == expected, f"{family} with {name}"


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_any_length_batch_and_arrival_order_gives_the_same_sampled_text(length: int, batch: int) -> None:
    model = random_model("llama")
    texts = prompts(6, seed=length)
    requests = [Request(str(i), prompt, 20, sampled(i)) for i, prompt in enumerate(texts)]
    plain = {key: generated(s) for key, s in run(build_engine(model, slots=1), requests).items()}
    drafts: dict[str, Draft] = {"near": model_draft(near_copy(model, "llama")), "random": RandomDraft()}
    engine = build_engine(model, drafts, slots=batch, fixed=length, chunk=16)
    names = ("near", "random", "near")
    speculative = [Request(str(i), prompt, 20, sampled(i), draft=names[i % 3]) for i, prompt in enumerate(texts)]
    arrivals = [(i * 7) % 11 for i in range(len(texts))]
    found = {key: generated(s) for key, s in run(engine, speculative, arrivals).items()}
    assert found == plain


@pytest.mark.parametrize("fixed", [4, None])
def test_cancels_beside_it_do_not_change_an_answer(fixed: int | None) -> None:
    model = random_model("qwen2")
    texts = prompts(9, seed=3)
    plain = {
        key: generated(s)
        for key, s in run(
            build_engine(model, slots=1), [Request(str(i), p, 20, sampled(i)) for i, p in enumerate(texts)]
        ).items()
    }
    drafts: dict[str, Draft] = {"near": model_draft(near_copy(model, "qwen2")), "perfect": ScriptedDraft(plain)}
    engine = build_engine(model, drafts, slots=3, fixed=fixed, chunk=16)
    names = ("near", "perfect", None)
    sequences = [engine.add(Request(str(i), p, 20, sampled(i), draft=names[i % 3])) for i, p in enumerate(texts)]
    for step in range(400):
        if step % 3 == 2 and step // 3 < len(sequences) and step // 3 % 2:
            engine.cancel(sequences[step // 3])
        engine.step()
    assert engine.idle
    survivors = [s for s in sequences if s.finish_reason == "length"]
    assert len(survivors) >= 5
    assert all(generated(s) == plain[s.request.id] for s in survivors)
    for cut in sequences:
        assert generated(cut) == plain[cut.request.id][: cut.generated_tokens]
