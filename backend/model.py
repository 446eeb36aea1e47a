"""A transformers model that computes packed ragged batches over its own slots of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backend import attention
from backend.attention import PackedBatch, Segment
from backend.cache import KVCache
from backend.errors import ModelNotSupported
from backend.lean import LeanBody, Linear, supports

_TOLERANCE = 0.02  # relative to the largest logit; bfloat16 gets five times as much, a wrong mask is far above both


class PackedModel:
    """The forward pass of one model for many rows at once, and its keys and values.

    capacity: tokens per slot. head_rows: token ids to compute logits of (a cut head), None for the whole vocabulary;
    logits then have a column for each. Raises ModelNotSupported where attention is not plain causal attention.
    """

    def __init__(self, model: Any, *, slots: int, capacity: int, head_rows: Tensor | None = None) -> None:
        config = model.config
        refuse_unsupported(config, capacity)
        attention.register()
        model.eval()
        self.config = config
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.query_groups = heads // kv_heads
        self.vocabulary = int(config.vocab_size)
        self.cache = KVCache(
            int(config.num_hidden_layers), slots, kv_heads, head_dim, capacity, self.dtype, self.device
        )
        self._body: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        self.lean: LeanBody | None = None
        self.width = int(config.hidden_size)
        probe = _Probe(self, model)
        probe.check(self)
        if supports(model):
            self.lean = LeanBody(model, capacity + 1)
            self._body = self._head = None  # not needed any more, and large
            probe.check(self)
        if head_rows is not None:
            self._cut_head(model, head_rows)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> Tensor:
        """Hidden states [T, width] of the packed tokens; their keys and values are stored, but not yet known."""
        batch = PackedBatch(self.cache, segments, self.query_groups)
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=self.device)
        if self.lean is not None:
            return self.lean.forward(ids[0], batch)
        output = self._body(input_ids=ids, position_ids=batch.positions[None], use_cache=False, packed=batch)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _cut_head(self, model: Any, rows: Tensor) -> None:
        head = model.get_output_embeddings()
        bias = None if head.bias is None else head.bias.detach()[rows]
        cut = Linear(head.weight.detach()[rows].contiguous(), bias)
        if self.lean is not None:
            self.lean.head = cut
        self._head = cut

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, width] → [rows, vocabulary]."""
        if self.lean is not None:
            return self.lean.logits(hidden)
        result: Tensor = self._head(hidden)
        return result


def refuse_unsupported(config: Any, capacity: int) -> None:
    """Raise ModelNotSupported where the configuration says that attention is not plain causal attention."""
    name = getattr(config, "model_type", "this model")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    if "sliding_attention" in kinds or (window and "layer_types" not in config.to_dict()):
        if window and int(window) >= capacity:
            return
        raise ModelNotSupported(
            f"{name} uses sliding-window attention ({window} tokens), which cannot be rolled back exactly; "
            f"serve it with a context of at most the window (--context), or choose a model with full attention"
        )
    strange = kinds - {"full_attention"}
    if strange or not hasattr(config, "num_attention_heads"):
        raise ModelNotSupported(
            f"{name} keeps recurrent or unknown state ({', '.join(sorted(strange)) or 'no attention heads'}); "
            f"choose a model with full causal attention, such as Llama, Qwen2, Qwen3, Mistral 7B v0.3 or GPT-2"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotSupported(f"{name} is an encoder-decoder model; choose a decoder-only model")


class _Probe:
    """A short text and what the model's own attention makes of it, to compare the packed computation with."""

    @torch.inference_mode()
    def __init__(self, packed: PackedModel, model: Any) -> None:
        if packed.cache.capacity < 8:
            raise ModelNotSupported("the context must hold 8 tokens at least (--context)")
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, packed.vocabulary, (1, 7), generator=generator).to(packed.device)
        model.set_attn_implementation("eager")
        self._tokens: list[int] = ids[0].tolist()
        self._expected: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
        model.set_attn_implementation(attention.NAME)

    def check(self, packed: PackedModel) -> None:
        """Raises ModelNotSupported unless a prefill in two chunks gives the same logits."""
        name = packed.config.model_type
        try:
            first = packed.forward(self._tokens[:4], [Segment(0, 0, 4)])
            found = packed.logits(torch.cat([first, packed.forward(self._tokens[4:], [Segment(0, 4, 3)])])).float()
        except Exception as error:
            raise ModelNotSupported(f"{name} cannot run on packed batches: {error!r}") from error
        difference = float((self._expected - found).abs().max() / self._expected.abs().max().clamp(min=1e-6))
        if not difference < (_TOLERANCE if packed.dtype == torch.float32 else 5 * _TOLERANCE):
            raise ModelNotSupported(
                f"{name} computes other logits on packed batches (off by {difference:.3f}); "
                f"it does something to attention or logits that this engine does not know"
            )
