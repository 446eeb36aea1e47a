"""The bundled draft: a small recurrent head that goes on from the target's last hidden state.

After a pass of the target, its hidden state at the last position already says much about the next tokens. One step of
this draft takes a state and the newest token, and gives the next state and the logits of the token after it:

    state, token → fuse(norm(state) ‖ norm(embedding[token])) → SwiGLU block → next state → norm → hot rows of the head

The first step of a round starts from the target's state, the others from the draft's own. It keeps no keys and values,
so it has no prompt to read, nothing to roll back and nothing that could outlive a request. The embedding and the head
are the target's own; only the token ids of the hot head rows are stored with the weights.
Sources: recurrent drafting (arXiv 2403.09919), Hydra heads (arXiv 2402.05109), hot vocabulary (arXiv 2502.14856).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

MODEL_TYPE = "tallygate_recurrent_draft"
WEIGHTS = Path(__file__).parent / "weights"


class RecurrentDraft(nn.Module):
    """width: the target's hidden size. inner: width of the SwiGLU block. Holds no embedding: see `attach`."""

    hot_tokens: Tensor
    embedding: Tensor
    hot_head: Tensor

    def __init__(self, width: int, inner: int, hot_tokens: Tensor, eps: float = 1e-5, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout  # while training only
        self.width, self.inner, self.eps = width, inner, eps
        self.norm_target = nn.Parameter(torch.ones(width))
        self.norm_state = nn.Parameter(torch.ones(width))
        self.norm_token = nn.Parameter(torch.ones(width))
        self.norm_inner = nn.Parameter(torch.ones(width))
        self.norm_out = nn.Parameter(torch.ones(width))
        self.fuse_target = nn.Parameter(torch.randn(width, 2 * width) * (2 * width) ** -0.5)
        self.fuse_state = nn.Parameter(torch.randn(width, 2 * width) * (2 * width) ** -0.5)
        self.gate_up = nn.Parameter(torch.randn(2 * inner, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(width, inner) * 0.3 * inner**-0.5)
        self.register_buffer("hot_tokens", hot_tokens.to(torch.int64))
        self.register_buffer("embedding", torch.empty(0), persistent=False)
        self.register_buffer("hot_head", torch.empty(0), persistent=False)

    def attach(self, embedding: Tensor, head: Tensor) -> None:
        """Share the target's embedding [vocabulary, width] and copy the hot rows of its head (same shape)."""
        if embedding.shape[1] != self.width or head.shape[1] != self.width:
            raise ValueError(f"this draft belongs to a target of width {self.width}, not {embedding.shape[1]}")
        if int(self.hot_tokens.max()) >= head.shape[0]:
            raise ValueError(f"this draft has tokens beyond the target's vocabulary of {head.shape[0]}")
        self.embedding = embedding.detach()
        self.hot_head = head.detach()[self.hot_tokens.to(head.device)].contiguous()

    def step(self, state: Tensor, tokens: Tensor, *, from_target: bool) -> Tensor:
        """The states [n, width] after `tokens` [n]; `state` is the target's (after its final norm) or this draft's."""
        norm, fuse = (self.norm_target, self.fuse_target) if from_target else (self.norm_state, self.fuse_state)
        token = functional.embedding(tokens, self.embedding)
        both = torch.cat([self._norm(state, norm), self._norm(token, self.norm_token)], -1)
        x = functional.linear(functional.dropout(both, self.dropout, self.training), self._cast(fuse))
        gate, up = functional.linear(self._norm(x, self.norm_inner), self._cast(self.gate_up)).chunk(2, -1)
        inner = functional.dropout(functional.silu(gate) * up, self.dropout, self.training)
        return x + functional.linear(inner, self._cast(self.down))

    def readout(self, state: Tensor) -> Tensor:
        """What the hot head reads, [n, width]."""
        return self._norm(state, self.norm_out)

    def logits(self, state: Tensor) -> Tensor:
        """[n, hot tokens]: column i stands for token `hot_tokens[i]`."""
        return functional.linear(self.readout(state), self.hot_head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (self.width,), weight.float(), self.eps).to(self.embedding.dtype)

    def _cast(self, weight: Tensor) -> Tensor:
        return weight.to(self.embedding.dtype)  # training keeps float32 masters; no copy when serving


def load_demo_draft(target_model: Any, directory: Path = WEIGHTS) -> RecurrentDraft:
    """The draft in `directory`, sharing the embedding and head of a loaded transformers model (its dtype and device).

    Raises ValueError where it was not made for a target like this one.
    """
    config = json.loads((directory / "config.json").read_text())
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{directory} holds a {config.get('model_type')}, not a {MODEL_TYPE}")
    embedding: Tensor = target_model.get_input_embeddings().weight
    head: Tensor = target_model.get_output_embeddings().weight
    if tuple(embedding.shape) != (config["vocab_size"], config["hidden_size"]):
        raise ValueError(
            f"it wants an embedding of {config['vocab_size']} × {config['hidden_size']}, not {tuple(embedding.shape)}"
        )
    tensors = load_file(directory / "model.safetensors")
    draft = RecurrentDraft(
        config["hidden_size"], config["intermediate_size"], tensors["hot_tokens"], config["rms_norm_eps"]
    )
    draft.load_state_dict(tensors)
    draft.to(device=embedding.device, dtype=embedding.dtype)
    draft.attach(embedding, head)
    return draft.eval().requires_grad_(False)


def save_demo_draft(draft: RecurrentDraft, directory: Path, trained: dict[str, Any]) -> None:
    """Write config.json and model.safetensors (bfloat16) into `directory`; `trained` says how it was made."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": MODEL_TYPE,
        "target": "SmolLM2-135M-Instruct",
        "vocab_size": draft.embedding.shape[0],
        "hidden_size": draft.width,
        "intermediate_size": draft.inner,
        "rms_norm_eps": draft.eps,
        "hot_vocab_size": len(draft.hot_tokens),
        "dtype": "bfloat16",
        "shares": ["embed_tokens", "lm_head", "norm"],
        "trained": trained,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in draft.named_parameters()}
    save_file({**tensors, "hot_tokens": draft.hot_tokens.to(torch.int32)}, directory / "model.safetensors")
