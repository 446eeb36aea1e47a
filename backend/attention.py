"""Attention over packed ragged batches: all rows of a round lie behind one another in one sequence [1, T].

Registered with transformers' AttentionInterface, so the models run unchanged: each attention layer hands its new keys
and values here with the round's `PackedBatch`, which stores them in the slots and lets every row see its own slot only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.cache import KVCache

NAME = "tallygate_packed"
_SHORT = 16  # rows up to this many tokens (decoding, verification) attend together, padded; longer ones alone


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` tokens of one slot, at positions start … start + count - 1."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that attend in one call: slots first … last, `count` queries each, over `length` keys.

    gather: packed index of each padded query [rows * count], None where the packed order is already that.
    scatter: (packed index, padded index) of the real queries. mask: float [rows, 1, groups * count, length].
    """

    first: int
    last: int
    count: int
    length: int
    mask: Tensor
    gather: Tensor | None
    scatter: tuple[Tensor, Tensor] | None


class Layout(Protocol):
    """What a forward pass needs to know of its tokens: where they lie (int64 [T]), and what they may look at."""

    @property
    def positions(self) -> Tensor: ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [heads, T, dim], key and value [kv_heads, T, dim] → [T, heads, dim]."""
        ...


class PackedBatch:
    """One round's layout: which slot and position each packed token has, and how rows are grouped for attention."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment], query_groups: int) -> None:
        self.cache = cache
        self.segments = segments
        self.query_groups = query_groups
        self.device = cache.keys[0].device
        self.dtype = cache.keys[0].dtype
        slots = [s.slot for s in segments for _ in range(s.count)]
        positions = [p for s in segments for p in range(s.start, s.start + s.count)]
        self.slots = torch.tensor(slots, dtype=torch.int64, device=self.device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=self.device)
        self.groups = self._group()

    def _group(self) -> list[_Group]:
        offsets, total = [], 0
        for segment in self.segments:
            offsets.append(total)
            total += segment.count
        short = sorted((s.slot, i) for i, s in enumerate(self.segments) if s.count <= _SHORT)
        indices = [i for _, i in short]
        used = sum(self.segments[i].start + self.segments[i].count for i in indices)
        groups = []
        if indices:
            members = [self.segments[i] for i in indices]
            span = members[-1].slot - members[0].slot + 1
            padded = span * max(s.start + s.count for s in members)
            if padded <= 3 * used + 512 * len(members):
                groups.append(self._padded(indices, offsets, total))
            else:
                groups.extend(self._padded([i], offsets, total) for i in indices)
        long = [i for i, s in enumerate(self.segments) if s.count > _SHORT]
        groups.extend(self._padded([i], offsets, total) for i in long)
        return groups

    def _padded(self, indices: list[int], offsets: list[int], total: int) -> _Group:
        members = [self.segments[i] for i in indices]
        first, last = members[0].slot, members[-1].slot
        rows, count = last - first + 1, max(s.count for s in members)
        length = max(s.start + s.count for s in members)
        allowed = torch.zeros(rows, count, dtype=torch.int64)  # keys each padded query may see
        allowed += 1  # a padded query sees one key, so that its softmax is defined
        packed: list[int] = []
        padded: list[int] = []
        for i, segment in zip(indices, members, strict=True):
            row = segment.slot - first
            allowed[row, : segment.count] = torch.arange(segment.start + 1, segment.start + segment.count + 1)
            packed.extend(range(offsets[i], offsets[i] + segment.count))
            padded.extend(range(row * count, row * count + segment.count))
        visible = torch.arange(length)[None, None, :] < allowed[:, :, None]
        mask = torch.zeros(rows, count, length, dtype=self.dtype).masked_fill_(~visible, float("-inf"))
        mask = mask.repeat(1, self.query_groups, 1)[:, None].to(self.device)
        gather = scatter = None
        if packed != padded or rows * count != total:
            index = torch.zeros(rows * count, dtype=torch.int64)
            index[padded] = torch.tensor(packed, dtype=torch.int64)
            gather = index.to(self.device)
            scatter = (torch.tensor(packed, device=self.device), torch.tensor(padded, device=self.device))
        return _Group(first, last, count, length, mask, gather, scatter)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [heads, T, dim], key and value [kv_heads, T, dim] → [T, heads, dim]; stores key and value first."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots, :, self.positions] = key.transpose(0, 1)
        values[self.slots, :, self.positions] = value.transpose(0, 1)
        if len(self.groups) == 1 and self.groups[0].gather is None:
            return self._attend_group(self.groups[0], query, keys, values, scale)
        output = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        for group in self.groups:
            assert group.gather is not None
            assert group.scatter is not None
            part = self._attend_group(group, query[:, group.gather], keys, values, scale)
            output[group.scatter[0]] = part[group.scatter[1]]
        return output

    def _attend_group(self, group: _Group, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        heads, tokens, dim = query.shape
        kv_heads, rows = keys.shape[1], group.last - group.first + 1
        folds = heads // kv_heads  # grouped-query heads become more queries, so keys and values are not copied
        folded = query.reshape(kv_heads, folds, rows, group.count, dim).permute(2, 0, 1, 3, 4)
        folded = folded.reshape(rows, kv_heads, folds * group.count, dim)
        output = F.scaled_dot_product_attention(
            folded,
            keys[group.first : group.last + 1, :, : group.length],
            values[group.first : group.last + 1, :, : group.length],
            attn_mask=group.mask,
            scale=scale,
        )
        output = output.reshape(rows, kv_heads, folds, group.count, dim).permute(0, 3, 1, 2, 4)
        return output.reshape(tokens, heads, dim)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedBatch,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: query [1, heads, T, dim] → [1, T, heads, dim]."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return packed.attend(module.layer_idx, query[0], key[0], value[0], scale)[None], None


def register() -> None:
    """Make NAME known to transformers; no mask function, because the packed batch holds its own masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
