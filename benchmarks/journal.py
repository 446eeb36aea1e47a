"""How fast the journal is on this disk: appends, durable settles by concurrency, reading back. The disk's own fdatasync
time stands beside, because it bounds the rest.

    python -m benchmarks.journal [--directory DIR] [--seconds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import uvloop

from ledger.journal import JournalReader, JournalWriter
from ledger.records import Charge, Intent, Settle, Usage, encode


def intent(number: int) -> Intent:
    held = [Charge("prepaid:team-1", 4_300_000), Charge("budget:team-1:2026-11", 4_300_000)]
    return Intent(
        f"01939f5e-0000-7000-8000-{number:012x}", 1_796_000_000_000, "2026-11", "team-1", "key-1", None,
        "deepseek-v3.2", "price-1", 1_000, held, None, "local",
    )  # fmt: skip


def settle(number: int) -> Settle:
    usage = Usage(prompt_tokens=900, generated_tokens=250, billed_tokens=1_150, draft_tokens=300, accepted_tokens=220)
    charges = [Charge("prepaid:team-1", 3_000_000), Charge("budget:team-1:2026-11", 3_000_000)]
    return Settle(
        f"01939f5e-0000-7000-8000-{number:012x}", 1_796_000_000_000, 1_796_000_001_000, "2026-11", "team-1", "key-1",
        None, "deepseek-v3.2", "local", "qwen-0.5b", "completed", usage, "price-1", 378_000_000, 2_759_400_000,
        200_000_000, charges, 0,
    )  # fmt: skip


def sync_time_us(directory: Path, write_bytes: int, rounds: int = 300) -> float:
    """Median fdatasync after a write of this size into allocated space."""
    path = directory / "probe"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, rounds * write_bytes)
        os.fsync(fd)
        times = []
        for number in range(rounds):
            os.pwrite(fd, os.urandom(write_bytes), number * write_bytes)
            start = time.perf_counter()
            os.fdatasync(fd)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6
    finally:
        os.close(fd)
        path.unlink()


async def per_second(concurrency: int, seconds: float, step: Callable[[int], Awaitable[object]]) -> float:
    """How often `step` completes a second, with `concurrency` of them under way."""
    done = 0
    start = time.perf_counter()
    end = start + seconds

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < end:
            done += 1
            await step(done)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return done / (time.perf_counter() - start)


async def measure(directory: Path, seconds: float) -> None:
    writer = JournalWriter.open(directory / "0", epoch=1, journal_uuid=str(uuid4()))

    async def append_turn(number: int) -> None:
        for more in range(100):
            writer.append(settle(number * 100 + more))
        await asyncio.sleep(0)

    async def request(number: int) -> None:
        await writer.append_written(intent(number))
        await writer.append_durable(settle(number))

    for size in (700, 20_000, 80_000):
        print(f"fdatasync after {size:>6} bytes   {sync_time_us(directory, size):>10.0f} us")
    rate = 100 * await per_second(1, seconds, append_turn)
    print(f"append, 100 a turn            {rate:>10.0f} /s")
    await writer.flush()
    for concurrency in (1, 32, 128):
        rate = await per_second(concurrency, seconds, lambda number: writer.append_durable(settle(number)))
        print(f"append_durable, {concurrency:>3} at once  {rate:>10.0f} /s")
    for concurrency in (1, 32, 128):
        rate = await per_second(concurrency, seconds, request)
        print(f"INTENT+SETTLE, {concurrency:>3} at once   {rate:>10.0f} /s")
    await writer.close()
    reader = JournalReader(writer.path)
    start = time.perf_counter()
    frames = sum(1 for _ in reader.frames(0))
    print(f"read, verified                {frames / (time.perf_counter() - start):>10.0f} /s")
    print(f"({frames} frames; a SETTLE has {len(encode(settle(0)))} bytes, an INTENT {len(encode(intent(0)))})")
    reader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--seconds", type=float, default=2.0, help="per figure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        uvloop.run(measure(Path(directory), options.seconds))


if __name__ == "__main__":
    main()
