"""A worker dies at any point; the next one on its slot finishes what it left, and the leases return."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from ledger.audit import By
from ledger.claims import claim
from ledger.database import CommitUnknown, Database
from ledger.errors import (
    AlreadyAnswered,
    Conflict,
    IdempotencyInProgress,
    IdempotencyMismatch,
    InsufficientQuota,
    LedgerUnavailable,
)
from ledger.gate import Gate
from ledger.invoices import finalize
from ledger.journal import Files, list_epochs
from ledger.keys import KeyChange, KeyHasher, create_key, delete_key, rotate_key, update_key
from ledger.leases import Fenced
from ledger.lost_journals import declare_lost
from ledger.periods import period_bounds, period_of
from ledger.publishing import Quote, publish_prices
from ledger.quotas import Scope
from ledger.schema import epochs, leases, slots
from ledger.teams import TeamChange, update_team
from ledger.topups import expire_grants, grant, refund
from ledger.verify import verify
from ledger.verify_acts import check_acts
from ledger.verify_keys import check_keys
from tests.ledger_flow.conftest import furnished
from tests.ledger_flow.material import MODEL, OUTPUT, USD, House, crash, now_ms, price, run, used
from tests.ledger_flow.test_holds import proven
from tests.services import Postgres


async def test_an_orphan_that_delivered_is_settled_as_estimated_for_what_was_delivered(either: House) -> None:
    gate = await either.gate()
    hold = await gate.hold(either.ask(prompt=100, output=2_000, streamed=True))
    hold.progress(90, 300)
    hold.progress(90, 400)
    await gate.journal.flush()
    crash(either, gate)
    await either.gate()
    await either.post()
    (row,) = await either.rows()
    assert (row.status, row.estimated, row.estimate_reason) == ("crashed", 1, "crash")
    assert (row.prompt_tokens, row.generated_tokens, row.billed_tokens) == (90, 300, 390)
    assert row.cost_usd_pico == price(90, 300)
    await proven(either)


async def test_an_orphan_is_billed_from_every_account_that_its_stream_was_extended_from(either: House) -> None:
    """The INTENT names the grant alone; the balance came in later and pays all the same."""
    by, in_a_day = By("test", now_ms()), now_ms() + 86_400_000
    gift = price(100, 1_024) + OUTPUT
    async with either.db.begin() as c:
        await grant(c, by, either.team_id, gift, currency="USD", reference="gift", expires_at_ms=in_a_day)
    gate = await either.gate()
    hold = await gate.hold(either.ask(prompt=100, output=5_000, streamed=True))
    for generated in range(1, 4_097):
        assert hold.covers(generated) or await hold.extend(generated - 1)
        hold.progress(100, generated)
    await gate.journal.flush()
    crash(either, gate)
    await either.gate()
    await either.post()
    (row,) = await either.rows()
    assert (row.billed_tokens, row.loss_pico) == (100 + 4_096, 0)
    assert (await either.account("grant")).debits_pico == gift
    assert (await either.account()).debits_pico == price(100, 4_096) - gift
    await proven(either)


async def test_an_orphan_pays_the_price_that_was_pinned_when_it_began(either: House) -> None:
    """The team gets a cheaper plan between its crash and the recovery."""
    by = By("test", now_ms() - 120_000)
    async with either.db.begin() as c:
        cheap = Quote.parse(MODEL, input="0.1", output="0.1", scope="plan:cheap")
        await publish_prices(c, by, [cheap], effective_from_ms=by.at_ms + 60_000)
    gate = await either.gate()
    hold = await gate.hold(either.ask(streamed=True))
    hold.progress(100, 300)
    await gate.journal.flush()
    crash(either, gate)
    async with either.db.begin() as c:
        await update_team(c, By("test", now_ms()), either.team_id, TeamChange(plan="cheap"))
    await either.gate()
    await either.post()
    (row,) = await either.rows()
    assert row.cost_usd_pico == price(100, 300)
    await proven(either)


async def test_an_orphan_that_delivered_nothing_is_voided_and_its_money_returns(either: House) -> None:
    gate = await either.gate()
    await gate.hold(either.ask())
    await gate.journal.flush()
    crash(either, gate)
    assert await either.leased() > 0
    await either.post()
    assert await either.leased() > 0  # no evidence yet
    await either.gate()
    await either.post()
    assert await either.rows() == []
    await proven(either)


def posted_before_each(house: House, number: int) -> None:
    """A poster is at work: all that is durable is posted just before the `number`th and later write transactions."""
    real, begun = house.db.begin, 0

    @asynccontextmanager
    async def begin() -> AsyncIterator[Any]:
        nonlocal begun
        begun += 1
        if begun >= number:
            house.db.begin = real  # type: ignore[method-assign]
            await house.post()
            house.db.begin = begin  # type: ignore[method-assign]
        async with real() as c:
            yield c

    house.db.begin = begin  # type: ignore[method-assign]


async def test_what_is_posted_while_a_start_recovers_is_not_taken_off_the_orphans_money(either: House) -> None:
    """The lease holds just enough for both requests."""
    await either.budget(Scope.of_key(either.key_id), price(100, 1_000) + price(100, 300))
    gate = await either.gate()
    await run(gate, either.ask(prompt=100, output=1_000))
    hold = await gate.hold(either.ask(prompt=100, output=300, streamed=True))
    hold.progress(100, 300)
    await gate.journal.flush()
    crash(either, gate)
    posted_before_each(either, 2)
    await either.gate()
    await either.post()
    first, second = await either.rows()
    assert (first.billed_tokens, second.billed_tokens, second.loss_pico) == (1_100, 400, 0)
    await proven(either)


async def test_settled_before_the_crash_is_posted_once_and_never_again(either: House) -> None:
    gate = await either.gate()
    for _ in range(3):
        await run(gate, either.ask())
    await either.post()
    for _ in range(2):
        await run(gate, either.ask())
    crash(either, gate)
    for _ in range(3):  # crashes again and again while it recovers
        gate = await either.gate()
        crash(either, gate)
    await either.gate()
    await either.post()
    assert len(await either.rows()) == 5
    assert (await either.account()).debits_pico == 5 * price(100, 200)
    await proven(either)


async def test_a_crash_while_recovering_settles_each_orphan_once(either: House) -> None:
    gate = await either.gate()
    for n in range(4):
        hold = await gate.hold(either.ask(streamed=True))
        hold.progress(100, 256 + n)
    await gate.journal.flush()
    crash(either, gate)
    second = await either.gate()
    orphan = await second.hold(either.ask(streamed=True))
    orphan.progress(100, 256)
    await second.journal.flush()
    crash(either, second)
    await either.gate()
    await either.post()
    assert len(await either.rows()) == 5
    await proven(either)


async def test_progress_is_journalled_within_a_second_at_any_speed(house: House) -> None:
    gate = await house.gate()
    hold = await gate.hold(house.ask(streamed=True))
    hold.progress(100, 3)
    await asyncio.sleep(1.0)
    await gate.journal.flush()
    crash(house, gate)
    await house.gate()
    await house.post()
    (row,) = await house.rows()
    assert row.generated_tokens == 3
    await proven(house)


async def test_a_clean_close_leaves_nothing_to_recover(either: House) -> None:
    gate = await either.gate()
    await run(gate, either.ask())
    await gate.close()
    await either.post()
    assert await either.leased() == 0
    await either.gate()
    await proven(either)


async def test_a_request_cancelled_while_its_key_is_claimed_frees_the_key(house: House) -> None:
    gate = await house.gate()
    await run(gate, house.ask())
    real, claimed = house.db.begin, asyncio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[Any]:
        async with real() as c:
            yield c
        claimed.set()
        await asyncio.sleep(60)

    house.db.begin = slow  # type: ignore[method-assign]
    task = asyncio.create_task(gate.hold(house.ask(idempotency_key="k", body_hash="b")))
    await claimed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    house.db.begin = real  # type: ignore[method-assign]
    await house.post()
    hold = await gate.hold(house.ask(idempotency_key="k", body_hash="b"))
    await hold.void("done")
    await proven(house)


async def test_a_claim_whose_commit_arrives_late_frees_its_key_without_waiting_for_the_epoch(either: House) -> None:
    moved = 0
    gate = await either.gate(clock=lambda: now_ms() + moved)
    real = either.db.begin

    @asynccontextmanager
    async def cut_off() -> AsyncIterator[Any]:
        raise CommitUnknown("the connection broke during COMMIT")
        yield

    either.db.begin = cut_off  # type: ignore[method-assign]
    keyed = {"idempotency_key": "k", "body_hash": "b"}
    ask = either.ask(**keyed)
    await gate._plans.make(ask)
    with pytest.raises(LedgerUnavailable):
        await gate.hold(ask)
    either.db.begin = real  # type: ignore[method-assign]
    await either.post()  # the key is freed, as far as anybody can see
    await claim(either.db, ask, gate.leases.slot_id, gate.leases.epoch, now_ms())  # and here the COMMIT arrives
    with pytest.raises(IdempotencyInProgress):
        await gate.hold(either.ask(**keyed))
    moved = 5_000
    await gate.refresh()
    await run(gate, either.ask(**keyed))
    await proven(either)


async def test_a_request_that_still_waits_for_sql_when_its_worker_closes_strands_nothing(house: House) -> None:
    """Its lease or claim arrives after the end of the epoch was written: the next start must find it."""
    gate = await house.gate()
    real, waits, go = house.db.begin, asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[Any]:
        waits.set()
        await go.wait()
        async with real() as c:
            yield c

    house.db.begin = slow  # type: ignore[method-assign]
    task = asyncio.create_task(gate.hold(house.ask(idempotency_key="k", body_hash="b")))
    await waits.wait()
    house.db.begin = real  # type: ignore[method-assign]
    await gate.close(patience_s=0.1)
    await house.post()
    go.set()
    with pytest.raises(LedgerUnavailable):
        await task
    gate = await house.gate()
    await house.post()
    assert await house.leased() == 0
    await run(gate, house.ask(idempotency_key="k", body_hash="b"))
    await proven(house)


async def test_an_idempotency_key_runs_once_and_replays_its_answer(either: House) -> None:
    gate = await either.gate()
    keyed = {"idempotency_key": "k", "body_hash": "h"}
    hold = await gate.hold(either.ask(**keyed))
    with pytest.raises(IdempotencyInProgress) as running:
        await gate.hold(either.ask(**keyed))
    assert running.value.request_id == hold.ask.request_id
    with pytest.raises(IdempotencyMismatch):
        await gate.hold(either.ask(idempotency_key="k", body_hash="other"))
    await hold.settle(used(answer=b"the answer"))
    await either.post()
    with pytest.raises(AlreadyAnswered) as done:
        await gate.hold(either.ask(**keyed))
    assert (done.value.answer, done.value.request_id) == (b"the answer", hold.ask.request_id)
    assert len(await either.rows()) == 1
    await proven(either)


async def test_a_void_or_refused_request_frees_its_idempotency_key(either: House) -> None:
    await either.budget(Scope.of_key(either.key_id), price(100, 200))
    gate = await either.gate()
    keyed = {"idempotency_key": "k", "body_hash": "h"}
    hold = await gate.hold(either.ask(**keyed))
    await hold.void("upstream refused")
    await either.post()
    with pytest.raises(InsufficientQuota):
        await gate.hold(either.ask(prompt=1_000_000, **keyed))
    await gate.journal.flush()
    await either.post()
    await run(gate, either.ask(**keyed))
    await proven(either)


async def test_an_orphan_with_an_idempotency_key_is_waived_and_may_run_again(either: House) -> None:
    gate = await either.gate()
    keyed = {"idempotency_key": "k", "body_hash": "h"}
    hold = await gate.hold(either.ask(streamed=True, **keyed))
    hold.progress(100, 300)
    await gate.journal.flush()
    crash(either, gate)
    gate = await either.gate()
    await either.post()
    (row,) = await either.rows()
    assert (row.billed_tokens, row.waiver_reason, row.loss_pico) == (0, "crash", price(100, 300))
    await run(gate, either.ask(**keyed))
    await proven(either)


async def test_leases_of_a_lost_journal_stay_locked_until_they_are_declared_lost(either: House) -> None:
    gate = await either.gate()
    await run(gate, either.ask())
    slot_id = gate.leases.slot_id
    crash(either, gate)
    (info,) = list_epochs(either.journal_dir / "0")
    shutil.rmtree(info.path)
    gate = await either.gate()
    assert any("lost" in words for words in gate.degraded())
    await either.post()
    locked = await either.leased()
    assert locked > 0
    async with either.db.begin() as c:
        freed = await declare_lost(c, By("ops", now_ms(), "the disk burnt"), slot_id, info.epoch)
    assert sum(amount for _, _, amount in freed) == locked
    await gate.refresh()
    assert gate.degraded() == []
    with pytest.raises(Conflict):
        async with either.db.begin() as c:
            await declare_lost(c, By("ops", now_ms()), slot_id, info.epoch)
    await proven(either)


async def test_a_slot_whose_whole_volume_is_lost_can_be_declared_so_once_it_is_silent(either: House) -> None:
    gate = await either.gate()
    await run(gate, either.ask())
    slot_id, epoch = gate.leases.slot_id, gate.leases.epoch
    crash(either, gate)
    await either.post()
    shutil.rmtree(either.journal_dir)
    locked = await either.leased()
    assert locked > 0
    async with either.db.begin() as c:
        freed = await declare_lost(c, By("ops", now_ms() + 60_000, "the disk burnt"), slot_id, epoch)
    assert sum(amount for _, _, amount in freed) == locked
    async with either.db.read() as c:
        with pytest.raises(Fenced):  # were it alive after all, it would stop here
            await gate.leases.recalled(c)
    await run(await either.gate(), either.ask())
    await either.post()


async def test_the_key_of_a_request_whose_epoch_was_declared_lost_is_free_again(either: House) -> None:
    gate, keyed = await either.gate(), {"idempotency_key": "k", "body_hash": "b"}
    await gate.hold(either.ask(**keyed))
    crash(either, gate)
    shutil.rmtree(either.journal_dir)
    async with either.db.begin() as c:
        await declare_lost(c, By("ops", now_ms() + 60_000, "the disk burnt"), gate.leases.slot_id, 1)
    await run(await either.gate(), either.ask(**keyed))
    await proven(either)


@pytest.mark.parametrize("what", ["journal", "slot", "epoch"])
async def test_a_journal_removed_under_a_live_server_is_noticed_by_it_and_by_the_proof(house: House, what: str) -> None:
    gate = await house.gate()
    await run(gate, house.ask())
    report = await verify(house.db, house.journal_dir)
    assert report.first_difference is None
    (info,) = list_epochs(house.journal_dir / "0")
    shutil.rmtree({"journal": house.journal_dir, "slot": house.journal_dir / "0", "epoch": info.path}[what])
    report = await verify(house.db, house.journal_dir)
    assert f"epoch 1 of slot {gate.leases.slot_id} is not in" in (report.first_difference or "")
    await asyncio.sleep(1.1)
    with pytest.raises(LedgerUnavailable, match="journal's disk"):
        await gate.hold(house.ask())
    crash(house, gate)


async def test_a_slot_in_use_cannot_be_opened_or_declared_lost(either: House) -> None:
    gate = await either.gate()
    with pytest.raises(LedgerUnavailable):
        await either.gate()
    with pytest.raises(Conflict):
        async with either.db.begin() as c:
            await declare_lost(c, By("ops", now_ms()), gate.leases.slot_id, gate.leases.epoch)
    await run(gate, either.ask())
    await proven(either)


async def four_more(house: House, gate: Gate) -> None:
    """Three in this epoch and one in the next, all posted: what a backup made before them does not know."""
    for _ in range(3):
        await run(gate, house.ask())
    await gate.close()
    await house.post()
    gate = await house.gate()
    await run(gate, house.ask())
    await gate.close()
    await house.post()
    assert len(await house.rows()) == 5


async def test_a_database_older_than_the_journal_gets_what_the_journal_knows(house: House) -> None:
    gate = await house.gate()
    await run(gate, house.ask())
    await house.post()
    path = house.db.engine.url.database
    assert path is not None
    await house.db.close()
    shutil.copy(path, path + ".backup")
    await four_more(house, gate)
    await house.db.close()
    for end in ("-wal", "-shm"):
        (house.journal_dir.parent / f"tallygate.db{end}").unlink(missing_ok=True)
    shutil.copy(path + ".backup", path)
    assert len(await house.rows()) == 1
    await house.gate()
    await house.post()
    assert len(await house.rows()) == 5
    assert (await house.account()).debits_pico == 5 * price(100, 200)
    await proven(house)


async def test_a_poster_brings_a_restored_database_up_to_date_before_any_gateway_starts(house: House) -> None:
    """And beside one that does: leases that were taken since the backup are taken again by whoever comes first."""
    gate = await house.gate()
    await run(gate, house.ask())
    path = house.db.engine.url.database
    assert path is not None
    await house.db.close()
    shutil.copy(path, path + ".backup")
    big = 4_000_000
    for _ in range(3):
        await run(gate, house.ask(prompt=0, output=big))
    await gate.close()
    gate = await house.gate()
    await run(gate, house.ask(prompt=0, output=big))
    await gate.close()
    await house.post()
    house.gates.clear()
    await house.db.close()
    for end in ("-wal", "-shm"):
        (house.journal_dir.parent / f"tallygate.db{end}").unlink(missing_ok=True)
    shutil.copy(path + ".backup", path)
    await house.post()
    assert len(await house.rows()) == 4
    posted_before_each(house, 2)
    await house.gate()
    await house.post()
    assert len(await house.rows()) == 5
    assert (await house.account()).debits_pico == price(100, 200) + 4 * price(0, big)
    await proven(house)


async def test_a_postgresql_database_older_than_the_journal_gets_what_the_journal_knows(
    postgres: Postgres, ledger_postgres_url: str, tmp_path: Path
) -> None:
    async with furnished(ledger_postgres_url, tmp_path / "journal") as house:
        gate = await house.gate()
        await run(gate, house.ask())
        await house.post()
        await house.db.close()  # a database that nobody uses can be copied
        backup = postgres.create_database(ledger_postgres_url.rpartition("/")[2])
        await four_more(house, gate)
    restored = dataclasses.replace(house, db=await Database.open(postgres.url(backup)), gates=[])
    assert len(await restored.rows()) == 1
    await restored.gate()
    await restored.post()
    assert len(await restored.rows()) == 5
    assert (await restored.account()).debits_pico == 5 * price(100, 200)
    await proven(restored)
    await restored.close()
    postgres.drop_database(backup)


async def test_what_a_crash_left_is_charged_no_further_than_the_lease_reaches(either: House) -> None:
    await either.budget(Scope.of_key(either.key_id), price(100, 100))
    gate = await either.gate()
    hold = await gate.hold(either.ask(prompt=100, output=500, streamed=True))
    assert hold.output_tokens == 100
    hold.progress(100, 300)  # an upstream that does not stop
    await gate.journal.flush()
    crash(either, gate)
    await either.gate()
    await either.post()
    (row,) = await either.rows()
    assert (row.billed_tokens, row.waiver_reason, row.loss_pico) == (200, "overrun", price(0, 200))
    await proven(either)


async def test_the_proof_names_the_first_difference(house: House) -> None:
    gate = await house.gate()
    for _ in range(3):
        await run(gate, house.ask())
    await gate.close()
    await house.post()
    tampered = {
        "usage": "UPDATE usage SET generated_tokens = generated_tokens + 1, billed_tokens = billed_tokens + 1",
        "transfers": "UPDATE transfers SET amount_pico = amount_pico + 1 WHERE kind = 'usage'",
        "rollups": "UPDATE rollups SET requests = requests + 1",
        "accounts": "UPDATE accounts SET debits_pico = debits_pico - 1 WHERE kind = 'prepaid'",
        "leases": "UPDATE leases SET posted_pico = posted_pico - 1, returned_pico = returned_pico + 1",
        "top-ups": "UPDATE topups SET amount_pico = amount_pico + 1",
        "batches": "UPDATE batches SET rows = rows - 1",
        "journal": "UPDATE batches SET chain_hash = 'x'",
    }
    for check, statement in tampered.items():
        async with house.db.begin() as c:
            await c.execute(text("SAVEPOINT before"))
            await c.execute(text(statement))
        report = await verify(house.db, house.journal_dir)
        failed = [found.name for found in report.checks if not found.ok]
        assert check in failed, (check, failed)
        assert report.first_difference is not None
        undo = statement.replace("+ 1", "~ 1").replace("- 1", "+ 1").replace("~ 1", "- 1")
        async with house.db.begin() as c:
            if "'x'" not in undo:
                await c.execute(text(undo))
    assert USD


async def test_the_proof_names_what_was_changed_by_hand_and_no_act_says_so(house: House) -> None:
    await house.budget(Scope.of_key(house.key_id), 100 * USD)
    gate = await house.gate()
    await run(gate, house.ask())
    await gate.close()
    await house.post()
    by = By("test", now_ms())
    async with house.db.begin() as c:
        gift = await grant(c, by, house.team_id, USD, currency="USD", reference="g", expires_at_ms=by.at_ms + 1_000)
        await refund(c, by, house.team_id, USD, currency="USD", reference="r")
        assert await expire_grants(c, By("test", by.at_ms + 2_000)) == 1
        change = TeamChange(credit_limit_pico=USD)
        await update_team(c, by, house.team_id, change)
    month = period_of(by.at_ms, "Asia/Shanghai")
    assert (await house.close_month(month)).state == "closed"
    async with house.db.begin() as c:
        await finalize(c, house.team_id, month, By("test", period_bounds(month, "Asia/Shanghai")[1]))
    await proven(house)
    assert gift
    tampered = [
        "UPDATE invoices SET billed_pico = billed_pico + 10000000000, carry_out_pico = carry_out_pico - 10000000000",
        "UPDATE invoices SET document = x'7b7d'",
        "UPDATE invoices SET state = 'void'",
        "DELETE FROM invoices",
        "UPDATE teams SET tax_rate_bp = 600",
        "UPDATE accounts SET target_pico = target_pico * 2 WHERE kind = 'budget'",
        "UPDATE accounts SET target_pico = target_pico - 1 WHERE kind = 'prepaid'",
        "UPDATE accounts SET target_pico = 0 WHERE kind = 'credit_line'",
        "UPDATE quotas SET limit_value = limit_value * 2",
        "UPDATE periods SET state = 'open'",
        "DELETE FROM quotas",
        "UPDATE transfers SET amount_pico = amount_pico - 1 WHERE kind = 'grant'",
        "DELETE FROM transfers WHERE kind = 'refund'",
        "DELETE FROM transfers WHERE kind = 'expiry'",
    ]
    for statement in tampered:
        async with house.db.read() as c:
            assert await check_acts(c) == (9, None)
        async with house.db.engine.connect() as c, c.begin() as transaction:
            await c.execute(text(statement))
            assert (await check_acts(c))[1] is not None, statement
            await transaction.rollback()


async def test_the_proof_names_a_key_that_was_changed_by_hand(house: House) -> None:
    by = By("test", now_ms())
    hasher = KeyHasher(b"0123456789abcdef")
    async with house.db.begin() as c:
        await rotate_key(c, by, hasher, house.key_id, overlap_s=60)
        await update_key(c, by, house.key_id, KeyChange(models=(MODEL,), allowed_ips=("10.0.0.0/8",)))
        gone = await create_key(c, by, hasher, house.team_id, name="second")
        await delete_key(c, by, gone.key.id)
    for statement in (
        f"UPDATE keys SET state = 'active' WHERE id = '{gone.key.id}'",
        "UPDATE keys SET allowed_ips = NULL",
        "UPDATE keys SET models = '[\"other\"]'",
        "UPDATE keys SET end_user_required = 1",
        f"UPDATE keys SET expires_at_ms = {by.at_ms}",
        f"INSERT INTO key_secrets VALUES ('stolen', '{house.key_id}', NULL)",
        f"DELETE FROM key_secrets WHERE key_id = '{gone.key.id}'",
        f"UPDATE key_secrets SET key_id = '{house.key_id}' WHERE key_id = '{gone.key.id}'",
    ):
        async with house.db.read() as c:
            assert await check_keys(c) == (2, None)
        async with house.db.engine.connect() as c, c.begin() as transaction:
            await c.execute(text(statement))
            assert (await check_keys(c))[1] is not None, statement
            await transaction.rollback()
    await proven(house)


async def test_an_unknown_journal_is_refused_with_words(house: House) -> None:
    gate = await house.gate()
    await run(gate, house.ask())
    crash(house, gate)
    (info,) = list_epochs(house.journal_dir / "0")
    (info.path / "durable").write_bytes(b"")
    await house.gate()
    await house.post()
    await proven(house)


class FullDisk(Files):
    def free_bytes(self, path: Path) -> int:
        return 1 << 20


async def test_a_start_on_a_full_disk_waits_and_leaves_no_epochs_behind(house: House) -> None:
    for _ in range(3):
        with pytest.raises(LedgerUnavailable, match="1 MiB free"):
            await house.gate(files=FullDisk())
    assert (await house.gate()).journal.epoch == 1


async def test_what_is_journalled_and_unknown_to_sql_counts_as_not_posted(house: House) -> None:
    gate = await house.gate()
    for _ in range(3):
        await run(gate, house.ask())
    await house.gates.pop().close()
    async with house.db.begin() as c:  # a database restored from before this epoch
        for table in (leases, epochs, slots):
            await c.execute(table.delete())
    assert (await verify(house.db, house.journal_dir)).unposted == 3
