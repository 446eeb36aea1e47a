"""Five tiny random model families, and drafts that are wrong in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from backend.adaptive import LengthPolicy
from backend.costs import StepCosts
from backend.demo.draft import RecurrentDraft
from backend.drafts import Draft, DraftJob, ModelDraft
from backend.engine import Engine
from backend.head_draft import HeadDraft
from backend.model import PackedModel
from backend.sequence import Request
from backend.sequence import Sequence as Running

VOCABULARY = 131
CAPACITY = 192
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2")


def config_of(family: str, vocabulary: int = VOCABULARY) -> PretrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.3,
    }
    if family == "llama":
        return LlamaConfig(**sizes)
    if family == "qwen2":
        return Qwen2Config(**sizes)
    if family == "qwen3":
        return Qwen3Config(**sizes)
    if family == "mistral":
        return MistralConfig(**sizes, sliding_window=None)
    assert family == "gpt2"
    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=48,
        n_layer=2,
        n_head=6,
        n_positions=1024,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )


def random_model(family: str, seed: int = 0, vocabulary: int = VOCABULARY) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_of(family, vocabulary), dtype=torch.float32).eval()


def near_copy(model: Any, family: str, noise: float = 0.02) -> Any:
    """A draft that agrees with the model often: the same weights, disturbed."""
    copy = random_model(family, 0, model.config.vocab_size)
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in copy.parameters():
            scale = noise * parameter.std().nan_to_num(0.0)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return copy


def model_draft(model: Any, slots: int = 8, width: int = VOCABULARY) -> ModelDraft:
    return ModelDraft(PackedModel(model, slots=slots, capacity=CAPACITY), "test", width)


def head_draft(model: Any) -> HeadDraft:
    """An untrained recurrent head over half of the vocabulary."""
    torch.manual_seed(6)
    head = RecurrentDraft(48, 32, torch.arange(0, VOCABULARY, 2))
    head.attach(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    return HeadDraft(head.eval().requires_grad_(False), "untrained head")


class RandomDraft:
    """Proposes anything, sometimes nothing."""

    weights = "random"

    def __init__(self, seed: int = 3) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def can_draft(self, sequence: Running) -> bool:
        return True

    def step_seconds(self, rows: int) -> float:
        return 0.0

    def propose(self, jobs: Sequence[DraftJob]) -> list[list[int]]:
        return [self._tokens(job.length) for job in jobs]

    def _tokens(self, length: int) -> list[int]:
        count = int(torch.randint(0, length + 1, (), generator=self._generator))
        found: list[int] = torch.randint(0, VOCABULARY, (count,), generator=self._generator).tolist()
        return found


class ScriptedDraft:
    """Knows the answers; right for `right` tokens of every block, and wrong by one after that (adversarial)."""

    weights = "scripted"

    def __init__(self, answers: dict[str, list[int]], right: int = 99) -> None:
        self._answers = answers
        self._right = right

    def can_draft(self, sequence: Running) -> bool:
        return True

    def step_seconds(self, rows: int) -> float:
        return 0.0

    def propose(self, jobs: Sequence[DraftJob]) -> list[list[int]]:
        proposals = []
        for job in jobs:
            answer = self._answers.get(job.sequence.request.id, [])
            at = job.sequence.generated_tokens
            block = answer[at : at + job.length]
            proposals.append([t if i < self._right else (t + 1) % VOCABULARY for i, t in enumerate(block)])
        return proposals


def digits(tokens: list[int]) -> str:
    """A text for tokens that have none."""
    return "".join(f"<{token}>" for token in tokens)


def build_engine(
    model: Any,
    drafts: dict[str, Draft] | None = None,
    *,
    slots: int = 8,
    fixed: int | None = 4,
    chunk: int = 256,
    fixed_rounds: bool = False,
) -> Engine:
    target = PackedModel(model, slots=slots, capacity=CAPACITY)
    policy = LengthPolicy(StepCosts(), fixed=fixed)
    return Engine(target, digits, drafts, policy=policy, chunk_tokens=chunk, fixed_rounds=fixed_rounds)


def run(engine: Engine, requests: Sequence[Request], arrivals: Sequence[int] | None = None) -> dict[str, Running]:
    """Run to the end; arrivals[i] is the round in which request i arrives."""
    rounds = list(arrivals or [0] * len(requests))
    sequences: dict[str, Running] = {}
    step = 0
    while len(sequences) < len(requests) or not engine.idle:
        for request, at in zip(requests, rounds, strict=True):
            if at <= step and request.id not in sequences:
                sequences[request.id] = engine.add(request)
        engine.step()
        step += 1
        assert step < 5000
    return sequences


def generated(sequence: Running) -> list[int]:
    return sequence.tokens[sequence.prompt_tokens :]


def prompts(count: int, seed: int = 5, vocabulary: int = VOCABULARY) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 60, (count,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def transformers_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers' own `generate` says, with its own attention."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    model.set_attn_implementation(implementation)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
