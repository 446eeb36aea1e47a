"""A lean forward pass for the Llama family (Llama, Qwen2, Qwen3, Mistral): the same arithmetic in fewer, larger steps.

One weight matrix for q, k and v, one for gate and up, one rotary table; on a CPU the matrices are reordered once into
oneDNN's own layout, which is where its bfloat16 and small-batch speed is. The transformers model is read, not changed;
its layers are free to go once nobody else holds it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.attention import Layout

FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral"})
_FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn"})  # others change with the length of the text


class Linear:
    """y = x Wᵀ + b. On a CPU with oneDNN the weight is kept in its prepacked layout only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and torch._C._has_mkldnn
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, inputs: Tensor) -> Tensor:
        if self._packed:
            output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, "none", [], "")
            return output
        return F.linear(inputs, self._weight, self._bias)


def supports(model: Any) -> bool:
    """Whether this forward pass computes what `model` computes."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FAMILIES
        and getattr(config, "hidden_act", "") == "silu"
        and str(rope.get("rope_type", "default")) in _FIXED_ROPES
        and float(rope.get("partial_rotary_factor", 1.0)) == 1.0
    )


class LeanBody:
    """Embedding, layers and final norm; `head` gives logits. capacity: positions the rotary table covers."""

    def __init__(self, model: Any, capacity: int) -> None:
        body, config = model.base_model, model.config
        self._embedding: Tensor = body.embed_tokens.weight.detach()
        self._eps = float(config.rms_norm_eps)
        self._norm: Tensor = body.norm.weight.detach()
        self._cos, self._sin = _rotary_table(body, capacity)
        self._layers = [_Layer(layer, self._eps) for layer in body.layers]
        head = model.get_output_embeddings()
        self.head = Linear(head.weight.detach(), None if head.bias is None else head.bias.detach())

    def forward(self, ids: Tensor, batch: Layout) -> Tensor:
        """ids int64 [T] → hidden states [T, width]."""
        hidden = F.embedding(ids, self._embedding)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self._layers):
            hidden = layer.forward(hidden, cos, sin, batch, index)
        return F.rms_norm(hidden, self._norm.shape, self._norm, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class _Layer:
    def __init__(self, layer: Any, eps: float) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._eps = eps
        self._before_attention: Tensor = layer.input_layernorm.weight.detach()
        self._before_mlp: Tensor = layer.post_attention_layernorm.weight.detach()
        self._head_dim = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._query_heads = attention.q_proj.weight.shape[0] // self._head_dim
        self._key_heads = attention.k_proj.weight.shape[0] // self._head_dim
        self._output = _joined(attention.o_proj)
        self._gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self._down = _joined(mlp.down_proj)
        self._middle = mlp.gate_proj.weight.shape[0]
        self._query_norm: Tensor | None = None
        self._key_norm: Tensor | None = None
        if hasattr(attention, "q_norm"):
            self._query_norm = attention.q_norm.weight.detach()
            self._key_norm = attention.k_norm.weight.detach()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Layout, index: int) -> Tensor:
        tokens, width = hidden.shape
        normed = F.rms_norm(hidden, (width,), self._before_attention, self._eps)
        heads = self._qkv(normed).view(tokens, -1, self._head_dim)
        rotated = heads[:, : self._query_heads + self._key_heads]
        if self._query_norm is not None and self._key_norm is not None:
            rotated = self._normed_heads(rotated)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._head_dim // 2, -1), sin)
        attended = batch.attend(
            index,
            rotated[:, : self._query_heads].transpose(0, 1),
            rotated[:, self._query_heads :].transpose(0, 1),
            heads[:, self._query_heads + self._key_heads :].transpose(0, 1),
            self._scale,
        )
        hidden = hidden + self._output(attended.reshape(tokens, -1))
        normed = F.rms_norm(hidden, (width,), self._before_mlp, self._eps)
        both = self._gate_up(normed)
        return hidden + self._down(F.silu(both[:, : self._middle]).mul_(both[:, self._middle :]))

    def _normed_heads(self, heads: Tensor) -> Tensor:
        shape = (self._head_dim,)
        query = F.rms_norm(heads[:, : self._query_heads], shape, self._query_norm, self._eps)
        key = F.rms_norm(heads[:, self._query_heads :], shape, self._key_norm, self._eps)
        return torch.cat((query, key), 1)


def _joined(*modules: Any) -> Linear:
    weight = torch.cat([module.weight.detach() for module in modules])
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    return Linear(weight, torch.cat(biases) if biases else None)


@torch.inference_mode()
def _rotary_table(body: Any, capacity: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin, [capacity, 1, head_dim]: rotating is x cos + roll(x) sin."""
    weight = body.embed_tokens.weight
    positions = torch.arange(capacity, device=weight.device)[None]
    cos, sin = body.rotary_emb(weight[:1, None], position_ids=positions)
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    return cos[0][:, None].clone(), signed[:, None].clone()
