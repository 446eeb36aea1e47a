"""Keys and values, one slot per running request, and what is known to lie in each slot.

A slot outlives its request: its tokens stay until another request needs the place, which makes it the prefix cache.
Rolling back is lowering a number, so rejected tokens are never part of a slot's known tokens.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Collection, Sequence

import torch
from torch import Tensor


class KVCache:
    """Per layer two tensors [slots, kv_heads, capacity, head_dim]; capacity is in tokens.

    On a CPU the memory is reserved, not used: pages are touched when tokens arrive.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (slots, kv_heads, capacity + 1, head_dim)  # the last place is scratch: written to, never read
        self.keys: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.values: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.slots = slots
        self.capacity = capacity
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.last_used: list[int] = [0] * slots
        self._clock = 0

    def length(self, slot: int) -> int:
        """Tokens whose keys and values are known to be right."""
        return len(self.tokens[slot])

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Say that the tokens after the known ones are now computed and final."""
        self.tokens[slot].extend(tokens)

    def truncate(self, slot: int, length: int) -> None:
        """Forget what follows the first `length` tokens."""
        del self.tokens[slot][length:]

    def best_prefix(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(slot, length) of the longest known beginning of `tokens`; (0, 0) where there is none."""
        wanted = list(tokens)
        best = (0, 0)
        for slot, known in enumerate(self.tokens):
            length = common_prefix(known, wanted)
            if length > best[1]:
                best = (slot, length)
        return best

    def choose_free(self, free: Collection[int], tokens: Sequence[int]) -> int:
        """The free slot to give away: one that needs no copy, else an empty one, else the one longest unused."""
        wanted = list(tokens)
        source, length = self.best_prefix(wanted)
        if length and source in free and length * 2 >= len(self.tokens[source]):
            return source
        return min(free, key=lambda slot: (bool(self.tokens[slot]), self.last_used[slot], slot))

    def claim(self, slot: int, tokens: Sequence[int]) -> int:
        """Make `slot` hold as long a beginning of `tokens` as any slot knows; returns its length, < len(tokens)."""
        self._clock += 1
        source, length = self.best_prefix(tokens)
        length = min(length, len(tokens) - 1, self.capacity - 1)
        if source != slot and length > common_prefix(self.tokens[slot], list(tokens[:length])):
            for stored in (*self.keys, *self.values):
                stored[slot, :, :length] = stored[source, :, :length]
        self.tokens[slot] = list(tokens[:length])
        self.last_used[slot] = self.last_used[source] = self._clock
        return length


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from anonymous memory, which the system fills page by page as they are touched.

    Zeros and not whatever was there: masked keys count 0 times their value, and 0 times NaN is NaN. Small pages,
    because a slot's text touches a little of each head's place, and huge pages would make that all of it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the common beginning, by bisection over slices (comparing slices is fast, a loop is not)."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
