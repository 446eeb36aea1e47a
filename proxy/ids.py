"""Request ids: UUIDv7 (RFC 9562), made here, so that ledger rows sort and partition by the time of admission."""

from __future__ import annotations

import os
import time

_RANDOM_BYTES = 4096


class RequestIds:
    """Gives UUIDv7 texts that only ever grow within one process, also when the wall clock steps back.

    The 12 bits after the version count the ids of one millisecond; when they run out the time field moves ahead.
    """

    def __init__(self) -> None:
        self._last_ms = 0
        self._count = 0
        self._random: list[str] = []

    def new(self, now_ms: int) -> str:
        """A fresh id for something that begins at `now_ms` (UTC epoch milliseconds)."""
        if now_ms > self._last_ms:
            self._last_ms = now_ms
            self._count = 0
        else:
            self._count += 1
            if self._count > 0xFFF:
                self._last_ms += 1
                self._count = 0
        time_hex = f"{self._last_ms:012x}"
        tail = self._tail()
        return f"{time_hex[:8]}-{time_hex[8:]}-7{self._count:03x}-{'89ab'[int(tail[0], 16) & 3]}{tail[1:4]}-{tail[4:]}"

    def _tail(self) -> str:
        """16 random hex digits, drawn from the system in blocks: a system call per id would cost more than the id."""
        if not self._random:
            digits = os.urandom(_RANDOM_BYTES).hex()
            self._random = [digits[start : start + 16] for start in range(0, len(digits), 16)]
        return self._random.pop()


def now_ms() -> int:
    """UTC epoch milliseconds of the wall clock."""
    return time.time_ns() // 1_000_000
