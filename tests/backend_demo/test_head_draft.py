"""Drafting from the target's last hidden state, with tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.demo.draft import RecurrentDraft, load_demo_draft, save_demo_draft
from backend.drafts import DraftJob
from backend.head_draft import HeadDraft
from backend.sampling import SamplingParams
from backend.sequence import Request
from tests.backend.families import VOCABULARY, build_engine, generated, prompts, random_model, run

GREEDY = SamplingParams(temperature=0.0)


def random_head(model: Any, hot: int = 100) -> RecurrentDraft:
    torch.manual_seed(4)
    weight: Tensor = model.get_input_embeddings().weight
    head = RecurrentDraft(weight.shape[1], 32, torch.randperm(VOCABULARY)[:hot].sort().values)
    head.attach(weight, model.get_output_embeddings().weight)
    return head.eval().requires_grad_(False)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_head_changes_no_token(length: int, temperature: float) -> None:
    model = random_model("llama")
    head = HeadDraft(random_head(model), "head")
    texts = prompts(6)

    def requests(draft: str | None) -> list[Request]:
        sampling = [SamplingParams(temperature=temperature, presence_penalty=0.2 * (i % 2), seed=i) for i in range(6)]
        return [Request(str(i), text, 20, sampling[i], draft=draft) for i, text in enumerate(texts)]

    plain = {key: generated(s) for key, s in run(build_engine(random_model("llama")), requests(None)).items()}
    engine = build_engine(random_model("llama"), {"head": head}, slots=4, fixed=length, chunk=16)
    found = run(engine, requests("head"), arrivals=[0, 0, 3, 5, 5, 9])
    assert {key: generated(s) for key, s in found.items()} == plain
    assert engine.totals.draft_tokens["head"] > 0


def test_a_round_starts_from_the_state_that_drew_the_last_token() -> None:
    model = random_model("llama")
    engine = build_engine(random_model("llama"), {"head": HeadDraft(random_head(model), "head")}, fixed=3, chunk=16)
    sequences = [engine.add(Request(str(i), text, 12, GREEDY, draft="head")) for i, text in enumerate(prompts(3))]
    checked = 0
    while not engine.idle:
        engine.step()
        for sequence in sequences:
            if sequence.hidden is not None:
                states = model.model(input_ids=torch.tensor([sequence.tokens[:-1]])).last_hidden_state
                torch.testing.assert_close(sequence.hidden, states[0, -1], atol=1e-4, rtol=1e-4)
                checked += 1
    assert checked > 3


def test_proposals_are_the_heads_own_greedy_tokens_and_hot() -> None:
    model = random_model("llama")
    head = random_head(model)
    engine = build_engine(random_model("llama"), fixed=0)
    sequence = engine.add(Request("0", prompts(1)[0], 12, GREEDY))
    engine.step()
    assert sequence.hidden is not None
    (proposed,) = HeadDraft(head, "head").propose([DraftJob(sequence, 4)])
    state, token = sequence.hidden[None], sequence.tokens[-1]
    for step in range(4):
        state = head.step(state, torch.tensor([token]), from_target=step == 0)
        token = int(head.hot_tokens[head.logits(state).argmax(-1)])
        assert proposed[step] == token


def test_the_head_shares_the_embedding_and_survives_saving(tmp_path: Path) -> None:
    model = random_model("llama")
    head = random_head(model)
    save_demo_draft(head, tmp_path, {"steps": 0})
    loaded = load_demo_draft(model, tmp_path)
    assert loaded.embedding.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    torch.testing.assert_close(loaded.down, head.down, atol=1e-2, rtol=1e-2)
    with pytest.raises(ValueError, match="wants an embedding of"):
        load_demo_draft(random_model("llama", vocabulary=140), tmp_path)
