"""A worker process of its own: spends as fast as it can until it is refused, and writes down what it was told.

python -m tests.ledger_flow.spender URL JOURNAL_DIR SLOT HOUSE.json LOG [--until-killed] [--admitted-at MS] [--slowly]
    [--when-started]: opens, and waits for a file `start` beside LOG
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from ledger.database import Database
from ledger.errors import InsufficientQuota, LedgerUnavailable
from ledger.gate import Gate
from tests.ledger_flow.material import House, used

CLIENTS = 8


async def main(
    url: str,
    journal_dir: str,
    slot: str,
    given: dict[str, Any],
    log_file: str,
    forever: bool,
    admitted_ms: int | None,
    pause_s: float,
    starts_by: Path | None,
) -> None:
    house = House(await Database.open(url), Path(journal_dir), **given)
    gate = await Gate.open(house.db, house.journal_dir, int(slot))
    refreshing = asyncio.create_task(_refresh(gate))
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while starts_by is not None and not starts_by.exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.02)
    await asyncio.gather(
        *(_client(house, gate, log, number, forever, admitted_ms, pause_s) for number in range(CLIENTS))
    )
    refreshing.cancel()
    await asyncio.gather(refreshing, return_exceptions=True)  # before its connection is closed under it
    await gate.close()
    await house.db.close()


async def _refresh(gate: Gate) -> None:
    while True:
        await asyncio.sleep(0.1)
        await gate.refresh()


async def _client(
    house: House, gate: Gate, log: int, number: int, forever: bool, admitted_ms: int | None, pause_s: float
) -> None:
    """Half of the clients stream. Each line of the log is written before (S) or after (D) the ledger says so."""
    streamed = number % 2 == 1
    while True:
        ask = house.ask(prompt=100, output=600 if streamed else 200, streamed=streamed, at_ms=admitted_ms)
        try:
            hold = await gate.hold(ask)
        except InsufficientQuota:
            _write(log, f"R {ask.request_id} 0 0")
            if not forever:
                return
            await asyncio.sleep(0.05)
            continue
        except LedgerUnavailable as error:
            _write(log, f"U {ask.request_id} 0 0")
            await asyncio.sleep(error.retry_after_ms / 1000)
            continue
        produced = hold.output_tokens
        _write(log, f"S {ask.request_id} 100 {produced}")
        if streamed:
            for generated in range(50, produced + 1, 50):
                hold.progress(100, generated)
                await asyncio.sleep(0.002)
        receipt = await hold.settle(used(100, produced))
        _write(log, f"D {ask.request_id} {receipt.billed_tokens} {receipt.cost_usd_pico}")
        await asyncio.sleep(pause_s)


def _write(log: int, line: str) -> None:
    os.write(log, line.encode() + b"\n")


if __name__ == "__main__":
    url, journal_dir, slot, house_file, log_file, *options = sys.argv[1:]
    given = json.loads(Path(house_file).read_text())
    admitted_ms = int(options[options.index("--admitted-at") + 1]) if "--admitted-at" in options else None
    pause_s = 0.1 if "--slowly" in options else 0.0
    starts_by = Path(log_file).parent / "start" if "--when-started" in options else None
    forever = "--until-killed" in options
    asyncio.run(main(url, journal_dir, slot, given, log_file, forever, admitted_ms, pause_s, starts_by))
