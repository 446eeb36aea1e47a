"""The pair that ships: the bundled target and the draft in backend/demo/weights, on prompts held out of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backend.bundled import bundled_target
from backend.demo.draft import WEIGHTS, load_demo_draft
from backend.demo.evaluate import Acceptance, Evaluation, held_out_conversations
from backend.demo.prompts import KINDS
from backend.loading import load_model

FLOOR = 0.38  # .438 measured on these three prompts, float32 and bfloat16; the rest is for other processors' rounding
MEGABYTES = 24


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    bundled_target(directory)
    return directory


def test_the_draft_fits_in_the_repository_and_says_what_it_shares() -> None:
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) <= MEGABYTES * 1_000_000
    assert json.loads((WEIGHTS / "config.json").read_text())["shares"] == ["embed_tokens", "lm_head", "norm"]


def test_the_draft_adds_no_embedding_of_its_own(data_dir: Path) -> None:
    target = load_model(bundled_target(data_dir), torch.bfloat16, torch.device("cpu"))
    draft = load_demo_draft(target)
    assert draft.embedding.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert all(tensor.shape[0] < target.config.vocab_size for tensor in draft.state_dict().values())


def test_acceptance_on_held_out_prompts_is_above_the_floor(data_dir: Path) -> None:
    evaluation = Evaluation(data_dir, WEIGHTS, torch.bfloat16, length=3)
    conversations = [held_out_conversations(kind, 1)[0] for kind in (KINDS[0], *KINDS[2:])]
    found: Acceptance = evaluation.acceptance(conversations, temperature=0.0, max_tokens=64)
    assert found.rate > FLOOR, found
