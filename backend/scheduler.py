"""Who runs in the next round: a bounded fair queue, slots, and prompts read in chunks between decoding rounds."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from backend.cache import KVCache, common_prefix
from backend.errors import QueueFull
from backend.sequence import Sequence as Running

_SHARED_PREFIX = 32  # a request waits for another that is just reading this much more of the same prompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt to read: `count` tokens from `start`. The last chunk also yields the first token."""

    sequence: Running
    start: int
    count: int

    @property
    def last(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Round:
    """One round's work, by slot order within each list."""

    chunks: list[Chunk]
    decoding: list[Running]

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decoding)


class Scheduler:
    """Slots and the queue before them. Tenants take turns; within a tenant, first come, first served."""

    def __init__(self, cache: KVCache, *, queue_limit: int = 256, chunk_tokens: int = 256) -> None:
        self._cache = cache
        self._free = set(range(cache.slots))
        self._waiting: OrderedDict[str, deque[Running]] = OrderedDict()
        self.running: list[Running] = []
        self.queue_limit = queue_limit
        self.chunk_tokens = chunk_tokens

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def add(self, sequence: Running, retry_after_s: float = 1.0) -> None:
        """Queue a request. Raises QueueFull when the queue is at its bound."""
        if self.waiting >= self.queue_limit:
            raise QueueFull(
                f"{self.waiting} requests are waiting already; send this one again later", retry_after_s=retry_after_s
            )
        self._waiting.setdefault(sequence.request.tenant, deque()).append(sequence)

    def remove(self, sequence: Running) -> None:
        """Take a request out, wherever it is; its slot is free for the next round."""
        queue = self._waiting.get(sequence.request.tenant)
        if queue is not None and sequence in queue:
            queue.remove(sequence)
            if not queue:
                del self._waiting[sequence.request.tenant]
        if sequence in self.running:
            self.running.remove(sequence)
            assert sequence.slot is not None
            self._free.add(sequence.slot)
            sequence.slot = None

    def plan(self) -> Round:
        """Seat who can be seated, and share the round's prompt tokens out, oldest first."""
        self._admit()
        decoding = [s for s in self.running if not s.prefilling]
        budget = max(32, self.chunk_tokens // 4) if decoding else self.chunk_tokens  # nobody's stream stalls for long
        chunks = []
        for sequence in self.running:
            if sequence.prefilling and budget > 0:
                count = min(len(sequence.tokens) - sequence.computed, budget)
                budget -= count
                chunks.append(Chunk(sequence, sequence.computed, count))
        return Round(sorted(chunks, key=lambda c: c.sequence.slot or 0), sorted(decoding, key=lambda s: s.slot or 0))

    def _admit(self) -> None:
        for tenant in list(self._waiting):
            if not self._free:
                return
            self._admit_from(tenant)
        if self._free and self._waiting and any(not self._must_wait(q[0]) for q in self._waiting.values()):
            self._admit()

    def _admit_from(self, tenant: str) -> None:
        queue = self._waiting[tenant]
        if self._must_wait(queue[0]):
            return
        sequence = queue.popleft()
        if queue:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]
        slot = self._cache.choose_free(self._free, sequence.tokens)
        self._free.remove(slot)
        sequence.slot = slot
        sequence.started_s = time.monotonic()
        sequence.computed = sequence.cached_tokens = self._cache.claim(slot, sequence.tokens)
        self.running.append(sequence)

    def _must_wait(self, sequence: Running) -> bool:
        """Another request is reading much of the same prompt now: its result can be copied in a round or few."""
        known = self._cache.best_prefix(sequence.tokens)[1]
        return any(
            common_prefix(other.tokens[: other.prompt_tokens], sequence.tokens) >= known + _SHARED_PREFIX
            for other in self.running
            if other.prefilling
        )
