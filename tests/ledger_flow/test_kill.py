"""kill −9 at random times under load, with the upstream's own log as the oracle. `SECONDS=` makes it a soak."""

from __future__ import annotations

import asyncio
import os
import random
import time

from ledger.quotas import Scope
from ledger.schema import accounts
from ledger.verify import verify
from tests.ledger_flow.material import USD, House
from tests.ledger_flow.processes import lines, spender
from tests.ledger_flow.test_holds import proven

SECONDS = float(os.environ.get("SECONDS", "6"))
SLOTS = 2


async def test_killed_again_and_again_nothing_seen_is_lost_doubled_or_invented(either: House) -> None:
    await either.budget(Scope.of_key(either.key_id), 5 * USD)
    chance = random.Random(20_261_130)
    stop = asyncio.Event()
    posting = asyncio.create_task(either.poster(batch_frames=300).run(stop))
    running = [spender(either, slot, "--until-killed") for slot in range(SLOTS)]
    async with asyncio.timeout(60):
        while sum(line.kind == "D" for line in lines(either.journal_dir.parent)) < 100:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    kills, until = 0, time.monotonic() + SECONDS
    while time.monotonic() < until:
        await asyncio.sleep(chance.uniform(0.8, 2.5))
        slot = chance.randrange(SLOTS)
        running[slot].kill()
        await asyncio.to_thread(running[slot].wait)
        running[slot] = spender(either, slot, "--until-killed")
        kills += 1
        if kills % 4 == 0:
            report = await verify(either.db, either.journal_dir)
            assert report.first_difference is None
    for process in running:
        process.kill()
        await asyncio.to_thread(process.wait)
    print(f"{kills} kills")
    stop.set()
    await posting
    for slot in range(SLOTS):
        await either.gate(slot)
    await proven(either)
    await check_against_the_oracle(either)


async def check_against_the_oracle(house: House) -> None:
    written = list(lines(house.journal_dir.parent))
    produced = {line.request_id: line.first + line.second for line in written if line.kind == "S"}
    seen = {line.request_id: (line.first, line.second) for line in written if line.kind == "D"}
    rows = {row.request_id: row for row in await house.rows()}
    assert len(rows) == len(await house.rows())
    assert len(seen) >= 100
    crashed = sum(row.status == "crashed" for row in rows.values())
    print(f"{len(rows)} requests posted, {len(seen)} receipts seen by clients, {crashed} settled after a crash")
    for request_id, told in seen.items():
        assert (rows[request_id].billed_tokens, rows[request_id].cost_usd_pico) == told
    for request_id, row in rows.items():
        assert row.billed_tokens <= produced[request_id]
        assert row.status == "crashed" or row.billed_tokens == produced[request_id]
    async with house.db.read() as c:
        for account in await c.execute(accounts.select()):
            assert account.debits_pico + account.leased_pico <= account.credits_pico
